"""Workers of `unbroken run` break themselves, as `unbroken inject` tells them: the job finds each cause by itself."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.devices import System

Start = Callable[..., Any]
SLOW = Path(__file__).parents[1] / "straggler_workload.py"


def inject(job: Any, *options: str) -> subprocess.CompletedProcess[str]:
    """Break a run, as its first lines say how it is reached."""
    words = shlex.split(re.findall(r"see it live: unbroken page (.*)", job.text())[0])
    code = "import sys; from unbroken_cli.commands.inject import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words, *options], capture_output=True, text=True, timeout=280, check=False
    )


def why(job: Any) -> str:
    """Return what `unbroken why` says of the last fault."""
    words = shlex.split(re.findall(r"see it live: unbroken page (.*)", job.text())[0])
    code = "import sys; from unbroken_cli.commands.why import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_an_injected_exception_restarts_in_the_process_and_an_exit_the_process(start_job: Start) -> None:
    job = start_job("--pods", "2", "--ranks-per-pod", "2", "--allow-faults", workload="wrapped")
    before = job.wait_started(0, 4)
    done = inject(job, "--fault", "exception", "--rank", "2", "--yes", "--wait", "100", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    said = f"exception: rank 2, iteration 0, process {before[2]}"
    assert (found["localRank"], found["said"]) == (0, said)
    recovery = found["recovery"]
    assert [recovery[name] for name in ("cause", "rank", "rung", "pod")] == [
        "exception",
        2,
        "in-process",
        found["pod"],
    ]
    assert recovery["detail"].startswith("InjectedFault: on purpose, by `unbroken inject --fault exception`")
    assert job.wait_started(1, 4) == before
    assert "InjectedFault: on purpose" in why(job)
    ended = inject(job, "--fault", "exit", "--code", "7", "--rank", "1", "--yes", "--wait", "100")
    assert ended.returncode == 0, ended.stderr
    after = job.wait_started(2, 4)
    assert {rank for rank in before if after[rank] != before[rank]} == {1}
    assert re.search(r"fault 2: process-exit of rank 1 in torch-workload-0: exited with code 7", job.text())
    assert "recovered 2: rung process" in job.text()
    assert job.complete() == 0


@pytest.mark.timeout(300)
def test_a_run_that_allows_no_faults_has_no_socket_and_breaks_nobody_from_inside(start_job: Start) -> None:
    job = start_job("--pods", "2", workload="wrapped")
    before = job.wait_started(0, 2)
    refused = inject(job, "--fault", "exception", "--yes")
    assert refused.returncode == 1
    assert "this pod allows no faults; want UNBROKEN_ALLOW_FAULTS=1" in refused.stderr
    assert not list(job.temporary.rglob("fault-*"))
    assert job.complete() == 0
    assert {event.rank: event.pid for event in job.events("finished")} == before


@pytest.mark.timeout(300)
def test_what_cannot_be_done_is_refused_with_what_was_seen_and_wanted(start_job: Start) -> None:
    job = start_job("--pods", "1", "--spares", "1", "--allow-faults", "--last-call", "60", workload="wrapped")
    before = job.wait_started(0, 1)
    spare = next(str(pod["pod"]) for pod in job.status()["pods"] if not pod["ranks"])
    wanted = {
        ("exception", "--pod", spare): "this worker is not inside its training function now: it is a spare",
        ("exception", "--local-rank", "3"): "worker 3: no process of it takes faults now",
        ("exception", "--rank", "4"): "--rank 4: want one of 0 to 0",
        ("mismatch",): "mismatch: want a process group of at least 2 ranks, got 1",
        ("oom",): "pods of `unbroken run` share this machine",
        ("slow",): "slow: want either milliseconds or factor, got milliseconds 0 and factor 0",
        ("slow", "--factor", "1000"): "factor: want 1.01 to 100, got 1000",
        ("hang-gil", "--seconds", "86400"): "seconds: want 1 to 3600, got 86400",
        ("exit", "--code", "0"): "code: want 1 to 255, got 0",
        ("exception", "--code", "3"): "--code: --fault exception takes nothing more",
    }
    for (kind, *options), message in wanted.items():
        refused = inject(job, "--fault", kind, *options, "--yes")
        assert refused.returncode in (1, 2), options
        assert message in refused.stderr, refused.stderr
    assert job.complete() == 0
    assert {event.rank: event.pid for event in job.events("finished")} == before


@pytest.mark.timeout(400)
def test_a_mismatched_collective_and_a_held_gil_are_found_as_those_of_a_script(start_job: Start) -> None:
    """2.22"""
    options = ("--pods", "4", "--soft-timeout", "8", "--hard-timeout", "14", "--allow-faults")
    job = start_job(*options, workload="wrapped")
    job.wait_started(0, 4)
    done = inject(job, "--fault", "mismatch", "--rank", "1", "--yes", "--wait", "200")
    assert done.returncode == 0, done.stderr
    assert job.wait_started(1, 4)
    assert re.search(r"the script's mistake, no machine's: .* rank 1 barrier", why(job)), job.text()
    done = inject(job, "--fault", "hang-gil", "--rank", "3", "--seconds", "120", "--yes", "--wait", "200")
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 3 hung for \d+ s without running any thread", why(job)), job.text()
    assert job.complete() == 0


@pytest.mark.timeout(600)
def test_a_worker_that_is_told_to_be_slow_is_named_as_the_straggler(start_job: Start, tmp_path: Path) -> None:
    stragglers = ("--stragglers", "Report", "--straggler-window", "5", "--heartbeat-timeout", "10")
    command = [str(SLOW), str(tmp_path), "none"]
    job = start_job("--pods", "4", *stragglers, "--allow-faults", workload="wrapped", command=command)
    job.wait_for(lambda: len(list(tmp_path.glob("rank-*-0"))) == 4, "a step of all ranks", 280)
    pod = next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [2])
    done = inject(job, "--fault", "slow", "--rank", "2", "--milliseconds", "200", "--seconds", "400", "--yes")
    assert done.returncode == 0, done.stderr
    again = inject(job, "--fault", "slow", "--rank", "2", "--factor", "2", "--yes")
    assert "still holds; nothing was done" in again.stderr

    def named() -> str:
        found = (job.status().get("health") or {}).get("findings", ())
        return str({item["pod"]: item["finding"]["message"] for item in found}.get(pod, ""))

    assert "in two windows busy for " in job.wait_for(named, "the straggler", 280)
    assert job.status()["recoveries"] == []
    assert job.complete() == 0


@pytest.mark.timeout(400)
def test_an_xid_on_purpose_moves_ranks_as_one_of_the_driver_would_and_says_what_it_is(
    start_job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_WATCH_DELAY", "0")
    monkeypatch.setenv("UNBROKEN_WATCH_ROOT", str(System(tmp_path / "root").root))
    options = ("--pods", "2", "--spares", "1", "--last-call", "60", "--health", "Act", "--allow-faults")
    job = start_job(*options, workload="wrapped")
    job.wait_started(0, 2)
    job.wait_for(lambda: (job.status().get("health") or {}).get("num_pods") == 3, "a word of every watch")
    victim = next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [1])
    done = inject(job, "--fault", "xid", "--rank", "1", "--seconds", "600", "--yes", "--wait", "200", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["said"] == "xid: the watch finds it within seconds, for 600 s; nothing is broken"
    recovery = found["recovery"]
    assert [recovery[name] for name in ("cause", "rung", "pod")] == ["device-fault", "pod", victim]
    assert "xid-79 on injected is fatal" in recovery["detail"]
    assert "on purpose, by `unbroken inject`" in why(job)
    assert job.complete() == 0
