"""`unbroken run` with real processes, sockets and gloo: faults of every part, seen from the outside."""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import is_gone

from unbroken_core.conventions.tokens import Kind, derive_token

Start = Callable[..., Any]
BOTH = pytest.mark.parametrize("workload", ["bare", "wrapped"])


@pytest.mark.timeout(200)
def test_killed_worker_of_a_torchrun_script_restarts_all_processes(start_job: Start) -> None:
    """A script written for torchrun runs unchanged and survives a SIGKILL by the process rung. 1.17"""
    job = start_job("--pods", "2", "--ranks-per-pod", "2", "--last-call", "1", workload="plain")
    before = job.wait_started(0, 4)
    os.kill(before[3], signal.SIGKILL)
    after = job.wait_started(1, 4)
    assert set(before.values()).isdisjoint(after.values())
    assert job.complete() == 0
    assert [event.iteration for event in job.events("finished")] == [1] * 4
    assert "fault 1: process-signal of rank 3 in torch-workload-1: killed by signal 9 (SIGKILL)" in job.text()
    assert "recovered 1: rung process" in job.text()


@pytest.mark.timeout(200)
@BOTH
def test_spare_takes_over_a_killed_pod_in_local_order(start_job: Start, workload: str) -> None:
    job = start_job("--pods", "2", "--spares", "1", "--ranks-per-pod", "2", "--last-call", "60", workload=workload)
    before = job.wait_started(0, 4)
    pod = next(pod for pod in job.status()["pods"] if pod["ranks"] == [2, 3])
    spare = next(pod for pod in job.status()["pods"] if not pod["ranks"])
    job.part_of_pod("unbroken.launch", pod["pod"]).kill()
    after = job.wait_started(1, 4)
    job.wait_for(lambda: all(is_gone(before[rank]) for rank in (2, 3)), "end of the lost pod's workers")
    if workload == "wrapped":
        assert (after[0], after[1]) == (before[0], before[1])
    promoted = next(pod for pod in job.status()["pods"] if pod["ranks"] == [2, 3])
    assert promoted["pod"] == spare["pod"]
    job.wait_for(lambda: f"{pod['pod']} was killed by SIGKILL: replaced by" in job.text(), "replacement")
    assert job.complete() == 0


@pytest.mark.timeout(200)
@BOTH
@pytest.mark.parametrize("part", ["unbroken.agent", "unbroken.rendezvous"])
def test_killed_agent_or_rendezvous_comes_back_without_an_interruption(
    start_job: Start, workload: str, part: str
) -> None:
    """1.25"""
    job = start_job("--pods", "2", "--reconnect-timeout", "30", workload=workload)
    before = job.wait_started(0, 2)
    kill_and_wait(job, part)
    check_uninterrupted(job, before)


@pytest.mark.timeout(200)
def test_account_goes_on_when_the_rendezvous_was_killed_and_is_told_at_the_end(start_job: Start) -> None:
    """Seen before: the next rendezvous knew of no time before the iteration that it took over."""
    job = start_job("--pods", "2", "--spares", "1", "--reconnect-timeout", "30", workload="wrapped")
    before = job.wait_started(0, 2)
    job.wait_for(lambda: (job.status()["ran_for_s"] or 0.0) > 3.0, "three seconds in iteration 0")
    os.kill(before[1], signal.SIGKILL)
    job.wait_started(1, 2)
    # The run has heard of it, then: of what it has not heard, the next rendezvous cannot say what it was for.
    job.wait_for(lambda: "recovered 1: rung" in job.text(), "the end of the recovery, as the run has heard of it")
    known, known_at_s, victim = job.status(), time.monotonic(), job.parts("unbroken.rendezvous")[0]
    victim.kill()
    job.wait_for(lambda: "rendezvous was killed by SIGKILL: started again" in job.text(), "another rendezvous")

    def has_all() -> bool:
        passed_s = time.monotonic() - known_at_s
        try:
            status = job.status()
        except OSError:
            return False
        found: float = status["ran_for_s"] or 0.0
        # Iteration 0 took longer than that: who has forgotten it never gets there.
        return bool(status["term"] > known["term"] and found >= known["ran_for_s"] + passed_s - 1.0)

    job.wait_for(has_all, "all of the time in the account")
    assert job.complete() == 0
    told = re.findall(r" time: (.*) of \d+ s; ettr (\S+), ettr_capacity (\S+), goodput_allocated (\S+)\n", job.text())
    assert len(told) == 1
    shares = dict(share.split() for share in told[0][0].split(", "))
    assert {"progress", "restart"} <= set(shares)
    assert sum(float(share.removesuffix("%")) for share in shares.values()) == pytest.approx(100.0, abs=0.5)
    assert float(told[0][3]) < float(told[0][1]), "the spare was paid for, too"


@pytest.mark.timeout(200)
def test_encrypted_run_goes_on_with_its_authority_after_rendezvous_and_agent_were_killed(start_job: Start) -> None:
    job = start_job("--pods", "2", "--reconnect-timeout", "30", "--tls", workload="wrapped")
    before = job.wait_started(0, 2)
    authority = job.private("ca.crt").read_text()
    check_refusals(job)
    kill_and_wait(job, "unbroken.rendezvous")
    kill_and_wait(job, "unbroken.agent")
    check_refusals(job)
    assert job.private("ca.crt").read_text() == authority
    command = re.search(r"see it live: unbroken (page .*)", job.text())
    assert command is not None
    page = [sys.executable, "-m", "unbroken", *shlex.split(command[1]), "-o", "json"]
    with subprocess.Popen(page, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["job"] == "torch-workload"
        process.terminate()
    check_uninterrupted(job, before)


def check_refusals(job: Any) -> None:
    """Nobody speaks in clear with the rendezvous of an encrypted run, nor trusts it without the run's authority."""
    listen = job.parts("unbroken.rendezvous")[0].environ()["UNBROKEN_LISTEN"]
    right = {"Authorization": f"Bearer {job.private('token').read_text()}"}
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(urllib.request.Request(f"http://{listen}/v1/status", headers=right), timeout=30)
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"https://{listen}/v1/status", headers=right), timeout=30)
    assert isinstance(caught.value.reason, ssl.SSLCertVerificationError)
    assert job.status()["job"] == "torch-workload"


def kill_and_wait(job: Any, part: str) -> None:
    """Kill one process of a part of two pods; return when another one has taken its place, and the job trains."""
    victim = job.parts(part)[0]
    num_before = job.text().count("SIGKILL: started again")
    victim.kill()
    job.wait_for(lambda: job.text().count("SIGKILL: started again") > num_before, "restart")

    def is_taken_over() -> bool:
        parts = job.parts(part)
        if victim.pid in [process.pid for process in parts] or not job.parts("unbroken.rendezvous"):
            return False
        try:
            status = job.status()
        except OSError:
            return False
        return status["phase"] == "running" and [pod["is_connected"] for pod in status["pods"]] == [True, True]

    job.wait_for(is_taken_over, "adoption of the running workers")


def check_uninterrupted(job: Any, before: dict[int, int]) -> None:
    """The job ends well, and every worker has trained from its first step to its last."""
    assert job.complete() == 0
    finished = {event.rank: (event.iteration, event.pid) for event in job.events("finished")}
    assert finished == {rank: (0, pid) for rank, pid in before.items()}
    assert not re.search(r"\bfault \d", job.text())


@pytest.mark.timeout(200)
def test_fault_after_an_agent_and_the_rendezvous_were_restarted_is_recovered(start_job: Start) -> None:
    job = start_job("--pods", "3", "--reconnect-timeout", "30", workload="wrapped")
    before = job.wait_started(0, 3)
    for part in ("unbroken.agent", "unbroken.rendezvous"):
        job.parts(part)[0].kill()
    job.wait_for(lambda: job.text().count("SIGKILL: started again") == 2, "restart of both")
    os.kill(before[1], signal.SIGKILL)
    after = job.wait_started(1, 3)
    assert after[1] != before[1]
    assert (after[0], after[2]) == (before[0], before[2])
    assert job.complete() == 0


@pytest.mark.timeout(200)
def test_wrapped_script_in_a_job_without_in_process_restarts_is_started_again(start_job: Start, tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "from unbroken import inprocess\n"
        "@inprocess.Wrapper()\n"
        "def train(call: inprocess.CallWrapper) -> None:\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    if call.iteration == 0 and os.environ['RANK'] == '1':\n"
        "        raise ValueError('injected')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    print('sum in', call.iteration, os.getpid())\n"
        "train()\n"
    )
    job = start_job("--pods", "2", "--last-call", "1", command=[str(script)])
    assert job.wait_for_exit() == 0
    assert "fault 1: exception of rank 1" in job.text()
    assert "recovered 1: rung process" in job.text()
    assert len(re.findall(r"sum in 1 \d+", job.text())) == 2


@pytest.mark.timeout(200)
def test_hang_is_told_with_the_place_where_the_culprit_stands(start_job: Start, tmp_path: Path) -> None:
    """2.22: the rank that holds the GIL is named, with its frames, and not the one that waits for it."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import ctypes, os, pathlib, sys\n"
        "import torch, torch.distributed as dist\n"
        "from unbroken import inprocess\n"
        "hung = pathlib.Path(sys.argv[1])\n"
        "def holds_the_gil():\n"
        "    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "@inprocess.Wrapper()\n"
        "def train() -> None:\n"
        "    dist.init_process_group('gloo')\n"
        "    if os.environ['RANK'] == '1' and not hung.exists():\n"
        "        hung.touch()\n"
        "        holds_the_gil()\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "train()\n"
    )
    options = (
        "--pods",
        "2",
        "--last-call",
        "1",
        "--soft-timeout",
        "4",
        "--hard-timeout",
        "8",
        "--log-dir",
        str(tmp_path),
    )
    job = start_job(*options, workload="wrapped", command=[str(script), str(tmp_path / "hung")])
    assert job.wait_for_exit() == 0
    # The one that waits may be told first, when its agent is quicker; the process that is ended is the culprit's. And
    # on a busy machine the groups may take longer than a rank may say nothing, before the one is to hang.
    assert re.search(
        r"fault \d+: (soft|hard)-timeout of rank 1 .*; stands at \S*hangs.py:8 in holds_the_gil < ", job.text()
    )
    (log,) = [path for path in tmp_path.rglob("0.log") if "holds_the_gil" in path.read_text()]
    assert "no progress; the main thread stands at" in log.read_text()


@pytest.mark.timeout(200)
def test_initialize_that_always_fails_ends_the_job_with_its_words(start_job: Start, tmp_path: Path) -> None:
    """2.29: it is retried within the job's limits, not for ever."""
    script = tmp_path / "unready.py"
    script.write_text(
        "from unbroken import inprocess\n"
        "class Fails(inprocess.initialize.Initialize):\n"
        "    def __call__(self, state):\n"
        "        raise RuntimeError('no licence left')\n"
        "@inprocess.Wrapper(initialize=Fails())\n"
        "def train() -> None:\n"
        "    raise AssertionError('not reached')\n"
        "train()\n"
    )
    job = start_job("--pods", "2", "--last-call", "1", workload="wrapped", command=[str(script)])
    assert job.wait_for_exit() == 1
    assert "RuntimeError: no licence left" in job.text()
    assert "without progress" in job.text()
    assert "not reached" not in job.text()


@pytest.mark.timeout(200)
def test_script_that_cannot_get_ready_fails_the_job_with_its_reason(start_job: Start, tmp_path: Path) -> None:
    """Three jobs at once: each of them waits longer and longer before it tries again."""
    scripts = {
        "exits.py": "raise SystemExit('no data')\n",
        "plain.py": "print('done')\n",
        "script": "#!/no/such/interpreter\n",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    exits = start_job("--pods", "2", "--last-call", "1", workload="wrapped", command=[str(tmp_path / "exits.py")])
    plain = start_job("--pods", "1", "--last-call", "1", workload="wrapped", command=[str(tmp_path / "plain.py")])
    missing = start_job("--pods", "1", "--last-call", "1", command=[str(tmp_path / "script")])
    assert [job.wait_for_exit() for job in (exits, plain, missing)] == [1, 1, 1]
    assert "exited with code 1: no data" in exits.text()
    assert "does the script call unbroken.inprocess.Wrapper?" in plain.text()
    assert "exited with code 127" in missing.text()
    assert "the interpreter named in its first line does not exist" in missing.text()


@pytest.mark.timeout(200)
def test_grandchildren_die_with_their_worker_and_nothing_outlives_the_run(start_job: Start) -> None:
    """4.27: the process group is killed, so that no data loader survives."""
    workload = Path(__file__).parents[1] / "sidecar_workload.py"
    job = start_job("--pods", "1", "--ranks-per-pod", "2", command=[str(workload), "bare", "--grandchild"])
    before = job.wait_started(0, 2)
    old = [int(event.name.split("-")[1]) for event in job.events("grandchild") if event.pid == before[0]]
    assert len(old) == 1
    os.kill(before[0], signal.SIGKILL)
    job.wait_started(1, 2)
    job.wait_for(lambda: is_gone(old[0]), "end of the killed worker's child")
    everything = psutil.Process(job.process.pid).children(recursive=True)
    grandchildren = {int(event.name.split("-")[1]) for event in job.events("grandchild")}
    job.process.kill()
    job.process.wait()
    parts = {process.pid for process in everything} - grandchildren
    job.wait_for(lambda: all(map(is_gone, parts)), "end of all parts")
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.timeout(200)
def test_interrupt_from_the_keyboard_ends_everything_and_leaves_no_file(start_job: Start) -> None:
    job = start_job("--pods", "2", "--ranks-per-pod", "2")
    job.wait_started(0, 4)
    everything = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGINT)
    assert job.wait_for_exit() == 130
    assert all(is_gone(process.pid) for process in everything)
    assert list(job.temporary.glob("unbroken-*")) == []


@pytest.mark.timeout(200)
def test_wrong_token_and_garbage_are_refused_counted_and_change_nothing(start_job: Start) -> None:
    job = start_job("--pods", "1")
    # Of an observation of the run that is on its way the status tells nothing but a higher revision.
    told = ("term", "phase", "reason", "iteration", "world_size", "pods", "refused")
    job.wait_started(0, 1)
    job.wait_for(lambda: job.status()["phase"] == "running", "the job to run")
    before = job.status()
    assert job.request("/v1/status", token="wrong")[0] == 401
    assert job.request("/v1/agents", token="")[0] == 401
    assert job.request("/v1/observation", data=b"not json")[0] == 403
    operator = derive_token(job.private("job-key").read_text(), Kind.OPERATOR, job.uid)
    code, body = job.request("/v1/observation", operator, data=b"not json")
    assert (code, body) == (400, b"message: want JSON, got b'not json'\n")
    code, body = job.request("/v1/status?after=x")
    assert (code, body) == (400, b"after: want an integer, got 'x'\n")
    after = job.status()
    assert {name: after[name] for name in told} == {name: before[name] for name in told}
    metrics = job.parts("unbroken.rendezvous")[0].environ()["UNBROKEN_METRICS_LISTEN"]
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert 'unbroken_refused_total{reason="unauthorized"} 2.0' in text
    assert 'unbroken_refused_total{reason="malformed"} 2.0' in text
    assert 'unbroken_refused_total{reason="forbidden"} 1.0' in text
    assert 'unbroken_ranks{role="active"} 1.0' in text
    assert job.complete() == 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        pytest.param(["--pods", "0", sys.executable], "want", id="no pods"),
        pytest.param(["--rungs", "magic", sys.executable], "--rungs: want NAME", id="unknown rung"),
        pytest.param(["no-such.py"], "script: 'no-such.py' does not exist", id="no script"),
        pytest.param(
            ["--min-pods", "3", "--pods", "2", sys.executable], "--min-pods: want 1 to --pods (2), got 3", id="min"
        ),
        pytest.param(
            ["--soft-timeout", "9", "--hard-timeout", "8", sys.executable],
            "--soft-timeout: want less than --hard-timeout (8.0), got 9.0",
            id="soft above hard",
        ),
        pytest.param(
            ["--pods", "2", "--layers", "rack", "--domains", "a", sys.executable],
            "--domains: want one for each of 2 pods",
            id="domains",
        ),
    ],
)
def test_bad_options_say_what_was_seen_and_wanted(start_job: Start, options: list[str], wanted: str) -> None:
    job = start_job(workload="wrapped", command=options)
    assert job.wait_for_exit() == 2
    assert wanted in job.text()


@pytest.mark.timeout(200)
def test_a_quiet_run_that_completes_says_nothing_of_its_own(start_job: Start, tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text("print('a word of the script')\n")
    job = start_job("--pods", "2", "--quiet", command=[str(script)])
    assert job.wait_for_exit() == 0
    said = sorted(job.text().splitlines())
    assert said == ["[quiet-0/0] a word of the script", "[quiet-1/0] a word of the script"]
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit(7)\n")
    failed = start_job("--pods", "1", "--quiet", "--max-replacements", "0", command=[str(failing)])
    assert failed.wait_for_exit() != 0
    assert "failed: " in failed.text(), "why it failed is said all the same"


@pytest.mark.timeout(200)
def test_each_worker_is_named_with_its_process_and_ctrl_c_is_no_fault(start_job: Start) -> None:
    job = start_job("--pods", "2", "--ranks-per-pod", "2")
    pids = job.wait_started(0, 4)
    for pid in pids.values():
        assert re.search(rf"^\[sidecar-workload-[01]/[01]\] process {pid}$", job.text(), re.MULTILINE)
    job.process.send_signal(signal.SIGINT)
    assert job.wait_for_exit() == 130
    assert "SIGINT: ending the job" in job.text()
    assert "fault " not in job.text()
    # Rather than ours: a rank may print how its peers went, if it is not stopped before them.
    assert not re.search(r'File ".*/(unbroken|unbroken_core)/', job.text())


@pytest.mark.timeout(200)
def test_a_script_on_standard_input_runs_on_each_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unbroken", "run", "--quiet", "--pods", "2", "--rungs", "process", "-", "x"]
    script = "import sys; print('got', *sys.argv[1:])\n"
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[job-0/0] got x", "[job-1/0] got x"]
    empty = subprocess.run(command, input="", capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert empty.returncode == 2
    assert empty.stderr == "unbroken run: script on standard input: want at most 1048576 bytes of Python, got nothing\n"


SPOILED = """
import os, pathlib, sys
import torch.distributed as dist
import unbroken.inprocess as inprocess

@inprocess.Wrapper()
def train():
    dist.init_process_group("gloo")
    mine = pathlib.Path(sys.argv[1]) / f"first-of-{os.environ['RANK']}"
    try:
        mine.symlink_to(str(os.getpid()))
    except FileExistsError:
        pass
    if dist.get_rank() == 1 and os.readlink(mine) == str(os.getpid()):
        raise RuntimeError("partially initialized module")
    dist.barrier()
    dist.destroy_process_group()

train()
"""


@pytest.mark.timeout(200)
def test_process_that_a_fault_has_spoiled_is_replaced_before_the_job_is_given_up(
    start_job: Start, tmp_path: Path
) -> None:
    """Seen before: a module whose import was interrupted raised in each iteration until the job had failed."""
    script = tmp_path / "spoiled.py"
    script.write_text(SPOILED)
    job = start_job("--pods", "2", workload="wrapped", command=[str(script), str(tmp_path)])
    assert job.wait_for_exit() == 0, job.text()
    assert re.findall(r"recovered \d+: rung (\S+)", job.text())[-1] == "process", job.text()


def inject(job: Any, *options: str) -> subprocess.CompletedProcess[str]:
    """Break a run, as its first lines say how it is reached."""
    words = shlex.split(re.findall(r"see it live: unbroken page (.*)", job.text())[0])
    code = "import sys; from unbroken_cli.commands.inject import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words, *options], capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.timeout(250)
def test_inject_breaks_a_run_on_this_machine_and_shows_its_recovery(start_job: Start) -> None:
    job = start_job("--pods", "2", "--ranks-per-pod", "2")
    pids = job.wait_started(0, 4)
    asked = inject(job, "--fault", "kill")
    assert (asked.returncode, "nothing was done. Add --yes" in asked.stderr) == (2, True)
    nobody = inject(job, "--fault", "kill", "--yes", "--pod", "others-0")
    assert (nobody.returncode, "needs pod 'others-0' that is connected" in nobody.stderr) == (2, True)
    done = inject(job, "--fault", "kill", "--local-rank", "1", "--yes", "--wait", "100")
    assert done.returncode == 0, done.stderr
    assert f"process {pids[3]}" in done.stdout
    assert "process-signal" in done.stdout
    job.wait_started(1, 4)
    lost = inject(job, "--fault", "lose-pod", "--yes", "--wait", "100")
    assert lost.returncode == 0, lost.stderr
    assert "was killed by SIGKILL: replaced by" in job.text()
    rendezvous = job.parts("unbroken.rendezvous")[0].pid
    away = inject(job, "--fault", "lose-rendezvous", "--yes")
    assert (away.returncode, away.stdout) == (0, f"lose-rendezvous: the rendezvous, process {rendezvous}\n")
    assert job.complete() == 0
