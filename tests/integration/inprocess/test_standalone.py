"""Wrapped functions without launcher and agent beside them: torchrun, and workers with nothing but the variables."""

import contextlib
import signal
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .standalone_job import SCRIPT, Job

pytestmark = pytest.mark.timeout(600)
"""Above the sum of the job's own limits, which say what they waited for."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Return a job that has not started."""
    with Job(tmp_path) as started:
        yield started


def two_hosts(rank: int) -> dict[str, str]:
    """Return the variables of two hosts with two workers each."""
    host = rank // 2
    return {
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.2",
        "UNBROKEN_POD_IP": f"127.0.0.{host + 2}",
    }


def test_torchrun_job_restarts_in_its_processes(job: Job) -> None:
    """2.4, 2.20: no launcher, agent or rendezvous was there, and none is left."""
    job.torchrun(3, str(SCRIPT), "exception")
    job.wait()
    assert job.values() == ["0 in 1", "1 in 1", "2 in 1"]
    pids = {event.rank: event.pid for event in job.events("started") if event.iteration == 0}
    assert {event.rank: event.pid for event in job.events("returned")} == pids
    job.wait_for_nobody()
    assert not list(job.temporary.glob("unbroken-*/*"))


def test_torchrun_starts_the_script_again_in_a_new_job(job: Job) -> None:
    """2.30: it ends all workers when one of them ends; the job of those before is not mistaken for a new one."""
    job.torchrun(2, str(SCRIPT), "steps", max_restarts=1)
    before = {event.pid for event in job.wait_for_started(0, 2)}
    psutil.Process(min(before)).kill()
    job.wait_for(lambda: len({event.pid for event in job.events("started")} - before) == 2, "two new workers")
    job.finish()
    job.wait()
    assert job.values() == ["0 in 0", "1 in 0"]
    job.wait_for_nobody()


def test_variables_alone_are_enough(job: Job) -> None:
    """2.4, 2.5: neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set; the workers of the host are counted."""
    job.plain(3, "exception", is_forked=False)
    job.wait()
    assert job.values() == ["0 in 1", "1 in 1", "2 in 1"]
    job.wait_for_nobody()


def test_hosts_meet_at_the_first_one(job: Job) -> None:
    """2.5, 2.9: one host process a host, one root in the job."""
    job.plain(4, "steps", two_hosts)
    started = job.wait_for_started(0, 4)
    assert sorted(event.value for event in started) == [f"{rank}/4@127.0.0.2" for rank in range(4)]
    found = job.standalone_processes()
    assert (len(found["host"]), len(found["root"])) == (2, 1)
    workers = {process.pid for process in job.processes}
    assert not {process.ppid() for process in found["host"] + found["root"]} & workers
    job.finish()
    job.wait()
    job.wait_for_nobody()


def test_hosts_may_have_different_numbers_of_workers(job: Job) -> None:
    """2.5, 2.20: nobody says how many there are."""
    job.plain(3, "exception", lambda rank: {"GROUP_RANK": str(rank // 2)})
    job.wait()
    # Each has written a log. They themselves may all have ended by now.
    assert len(list(job.folder.glob("logs/standalone-*"))) == 2
    assert job.values() == ["0 in 1", "1 in 1", "2 in 1"]
    job.wait_for_nobody()


def test_killed_rank_0_is_a_fault_like_any_other(job: Job) -> None:
    """2.24: the others go on, with the rendezvous that its host had started. 3.39"""
    job.plain(3, "steps")
    job.wait_for_started(0, 3)
    job.processes[0].send_signal(signal.SIGKILL)
    assert {event.value.partition("@")[0] for event in job.wait_for_started(1, 2)} == {"0/2", "1/2"}
    job.finish()
    job.wait([-signal.SIGKILL, 0, 0])
    assert job.values() == ["0 in 1", "1 in 1"]
    job.wait_for_nobody()


def test_lost_workers_of_the_first_host_are_a_fault_like_any_other(job: Job) -> None:
    """2.24: its host process ends with them, the root does not."""
    job.plain(4, "steps", two_hosts)
    job.wait_for_started(0, 4)
    for process in job.processes[:2]:
        process.send_signal(signal.SIGKILL)
    job.wait_for(lambda: len(job.standalone_processes()["host"]) == 1, "end of the first host's process")

    def have_a_world() -> bool:
        # Not in iteration 1 for sure: the first of the two may be seen to be lost a moment before the other, and an
        # iteration of three ends then, whether or not somebody has started it.
        worlds = defaultdict[int, set[str]](set)
        for event in job.events("started"):
            worlds[event.iteration].add(event.value)
        return {"0/2@127.0.0.3", "1/2@127.0.0.3"} in worlds.values()

    job.wait_for(have_a_world, "the two that are left in a world of their own")
    job.finish()
    job.wait([-signal.SIGKILL, -signal.SIGKILL, 0, 0])
    job.wait_for_nobody()


def test_killed_root_is_started_again(job: Job) -> None:
    """2.24: training goes on meanwhile, and the next fault finds a rendezvous."""
    job.plain(3, "steps")
    job.wait_for_started(0, 3)
    (root,) = job.standalone_processes()["root"]
    root.kill()

    def has_another() -> bool:
        return any(process.pid != root.pid for process in job.standalone_processes()["root"])

    job.wait_for(has_another, "another root")
    job.processes[1].send_signal(signal.SIGKILL)
    job.wait_for_started(1, 2)
    job.finish()
    job.wait([0, -signal.SIGKILL, 0])
    assert job.values() == ["0 in 1", "1 in 1"]
    job.wait_for_nobody()


def test_loss_of_the_first_host_has_an_end(job: Job) -> None:
    """2.24: without a rendezvous nobody waits for ever."""
    job.plain(4, "adrift", two_hosts)
    job.wait_for_started(0, 4)
    (root,) = job.standalone_processes()["root"]
    # The one that can start the root again has written down how.
    (owner,) = [
        host for host in job.standalone_processes()["host"] if (Path(host.cmdline()[-2]) / "assignment.json").exists()
    ]
    for process in (owner, root, *job.processes[:2]):
        process.kill()
    job.wait([-signal.SIGKILL, -signal.SIGKILL, 1, 1])
    assert {event.value.partition(":")[0] for event in job.events("raised")} == {"RestartAbort"}
    job.wait_for_nobody()


@pytest.mark.parametrize("victims", ["workers", "workers and host processes"])
def test_nothing_is_left_when_the_whole_job_is_killed(job: Job, victims: str) -> None:
    """2.24: no wait is without an end."""
    job.plain(4, "steps", two_hosts)
    job.wait_for_started(0, 4)
    hosts = job.standalone_processes()["host"]
    job.kill_all()
    for host in hosts if "host" in victims else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            host.kill()
    job.wait([-signal.SIGKILL] * 4)
    job.wait_for_nobody(60.0)


def test_stopped_worker_is_ended_and_the_others_go_on(job: Job) -> None:
    """2.22: the timeouts are those of the wrapper's options; SIGTERM, SIGCONT, SIGKILL."""
    job.plain(3, "hang")
    # In iteration 0, or in a later one where it took the machine longer than the soft timeout to bring them together.
    job.wait_for_world(3)
    job.processes[1].send_signal(signal.SIGSTOP)
    job.wait_for(lambda: job.processes[1].poll() is not None, "end of the stopped worker")
    job.wait_for(
        lambda: {"0/2", "1/2"} == {event.value.partition("@")[0] for event in job.events("started")[-2:]}, "two"
    )
    job.finish()
    job.wait([0, -signal.SIGTERM, 0])
    assert [value.partition(" ")[0] for value in job.values()] == ["0", "1"]
    job.wait_for_nobody()


def test_second_call_is_a_job_of_its_own(job: Job) -> None:
    """2.3: repeated calls work."""
    job.plain(3, "twice", lambda rank: {"LOCAL_RANK": str(rank)})
    job.wait()
    assert job.values() == ["0 in 1", "0 in 1", "1 in 1", "1 in 1", "2 in 1", "2 in 1"]
    job.wait_for_nobody()


def test_ranks_beyond_the_policy_are_spares(job: Job) -> None:
    """0.8, 2.4, 2.27: all workers join, the policy says who is active; a spare returns None when all are done."""
    job.plain(3, "spare")
    job.wait()
    assert job.values() == ["0 in 0", "1 in 0", "None"]
    job.wait_for_nobody()


def test_end_of_retries_ends_every_worker(job: Job) -> None:
    """2.20: RetryController(max_iterations=3) lets the function run three times."""
    job.plain(2, "abort")
    job.wait([1, 1])
    assert {event.value.partition(":")[0] for event in job.events("raised")} == {"RestartAbort"}
    assert sum(event.rank == 1 for event in job.events("started")) == 3
    job.wait_for_nobody()


def test_unhealthy_worker_leaves_and_the_others_go_on(job: Job) -> None:
    """2.14, 2.18: its process is its own afterwards."""
    job.plain(3, "unhealthy")
    job.wait([0, 1, 0])
    assert job.values() == ["0 in 1", "1 in 1"]
    assert [event.value.partition(":")[0] for event in job.events("raised")] == ["HealthCheckError"]
    job.wait_for_nobody()


def test_worker_that_never_calls_is_named(job: Job) -> None:
    """2.5: the barrier of the start has an end, and says who is missing."""
    job.plain(3, "missing")
    job.wait([1, 0, 1])
    texts = [event.value for event in job.events("raised")]
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("TimeoutError: ")
        assert "2 of 3 workers called the wrapped function, on 1 host; missing ranks: 1" in text
    job.wait_for_nobody()


@contextlib.contextmanager
def occupied(port: int, count: int) -> Iterator[None]:
    """Listen on so many ports, and say nothing there."""
    with contextlib.ExitStack() as stack:
        for number in range(port, port + count):
            stack.enter_context(socket.create_server(("127.0.0.1", number)))
        yield


def test_port_in_use_is_passed_over(job: Job) -> None:
    """2.5: on every host."""
    with occupied(job.port + 2, 2):
        job.plain(4, "exception", lambda rank: {**two_hosts(rank), "MASTER_ADDR": "127.0.0.1"})
        job.wait()
    assert job.values() == [f"{rank} in 1" for rank in range(4)]
    job.wait_for_nobody()


def test_ports_in_use_are_named(job: Job) -> None:
    """2.5, 2.20: a store that cannot be made is an error of the call."""
    with occupied(job.port + 2, 8):
        # Who comes when the others have heard it already finds nobody, and waits for rank 0.
        job.plain(2, "exception", ranks=[1])
        job.wait_for(lambda: job.num_guests() == 1, "rank 1 with its host process")
        job.plain(2, "exception", ranks=[0])
        job.wait([1, 1])
    for event in job.events("raised"):
        assert event.value.startswith("RestartError: job of 2 workers: ports ")
        assert "Address already in use" in event.value
        assert "UNBROKEN_PORT" in event.value
    job.wait_for_nobody()


def test_script_of_the_reference_runs_with_another_import(job: Job, tmp_path: Path) -> None:
    """2.1, 2.4: one line differs."""
    text = Path(__file__).with_name("reference_script.txt").read_text()
    theirs, ours = "import nvidia_resiliency_ext.inprocess as inprocess", "import unbroken.inprocess as inprocess"
    assert text.count(theirs) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(theirs, ours))
    job.torchrun(2, str(script))
    job.wait()
    output = (tmp_path / "out-0").read_text()
    assert "rank 0 of 2 in 1" in output
    assert "rank 1 of 2 in 1" in output
    job.wait_for_nobody()
