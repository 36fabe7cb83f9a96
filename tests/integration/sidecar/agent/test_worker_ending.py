"""How soon a worker's death is known: before its memory is freed, and never when it did not die. Real processes."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from unbroken.agent.adapters.death_watch import DeathWatch
from unbroken.agent.adapters.stamp_page import StampPage
from unbroken.launch.config import LaunchConfig, read_config
from unbroken.launch.exit_status import exit_status
from unbroken.launch.output import Console
from unbroken.launch.workers import Workers
from unbroken_core.pod.pod_messages import Inspect, Spawn
from unbroken_core.pod.stamps import page_bytes

LIMIT_S = 30.0
WORKER = """
import os, sys, time
from pathlib import Path
from unbroken.inprocess.pod.progress import ProgressSlot
progress = ProgressSlot(int(sys.argv[2]), 0)
progress.attach(Path(sys.argv[1]))
progress.hold()
progress.hold()
{body}
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    """A page of two slots."""
    path = tmp_path / "stamps"
    stamps = StampPage(path, 2)
    yield path
    stamps.close()


@pytest.fixture
def deaths() -> "queue.Queue[tuple[int, int]]":
    """What the watch has seen: local ranks and incarnations."""
    return queue.Queue()


@pytest.fixture
def watch(page: Path, deaths: "queue.Queue[tuple[int, int]]") -> Iterator[DeathWatch]:
    """A watch over the page."""
    found = DeathWatch(page, 2, lambda rank, incarnation: deaths.put((rank, incarnation)))
    yield found
    found.close()


@contextlib.contextmanager
def worker(
    page: Path, local_rank: int = 0, body: str = "", first_line: str = "ready\n"
) -> "Iterator[subprocess.Popen[str]]":
    """Run a process that holds its lock, and more."""
    command = [sys.executable, "-c", WORKER.format(body=body), str(page), str(local_rank)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == first_line
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_death_and_exit_code_are_known_before_the_process_is_reaped(
    page: Path, watch: DeathWatch, deaths: "queue.Queue[tuple[int, int]]"
) -> None:
    """Two processes at the same place, one after the other; an exit code as well as a signal. 2.22 1.27"""
    others = set(threading.enumerate())
    with worker(page, 1) as process:
        watch.watch(1, 4)
        watch.watch(1, 4)
        process.send_signal(signal.SIGKILL)
        assert deaths.get(timeout=LIMIT_S) == (1, 4)
        wait_until(lambda: exit_status(process.pid) == signal.SIGKILL, "SIGKILL in /proc")
    # It tells of the death before it ends itself, and until then nobody else watches the place.
    wait_until(lambda: set(threading.enumerate()) <= others, "the end of the watcher's thread")
    body = "import threading; threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(3))).start()"
    with worker(page, 1, body) as process:
        watch.watch(1, 5)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert deaths.get(timeout=LIMIT_S) == (1, 5)
        wait_until(lambda: exit_status(process.pid) == 3 << 8, "exit code 3 in /proc")
    assert deaths.empty()


def test_nothing_is_seen_of_what_is_no_death_of_a_worker(
    page: Path, watch: DeathWatch, deaths: "queue.Queue[tuple[int, int]]"
) -> None:
    """A child that it forked dies; then it leaves the wrapped call before it is killed."""
    body = """
if os.fork() == 0:
    progress.forget()
    os._exit(0)
os.wait()
print("forked", flush=True)
sys.stdin.readline()
progress.detach()
"""
    with worker(page, 0, body, "forked\n") as process, worker(page, 1) as other:
        watch.watch(0, 0)
        watch.watch(1, 0)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.wait(LIMIT_S)
        other.kill()
        # The other one's death is the proof that the watch works.
        assert deaths.get(timeout=LIMIT_S) == (1, 0)
        assert deaths.empty()


def test_main_thread_that_ends_alone_is_no_exit_code(
    page: Path, watch: DeathWatch, deaths: "queue.Queue[tuple[int, int]]"
) -> None:
    """The process goes on; so does its place."""
    body = """
import ctypes, threading
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with worker(page, 0, body) as process:
        watch.watch(0, 0)
        assert deaths.get(timeout=LIMIT_S) == (0, 0)
        assert exit_status(process.pid) is None
    assert exit_status(os.getpid()) is None


def test_stopped_process_has_no_exit_code() -> None:
    """Linux shows the signal that stopped it in the same place."""
    process = subprocess.Popen(["sleep", "600"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert exit_status(process.pid) is None
    process.kill()
    process.wait(LIMIT_S)


def told(workers: Workers) -> tuple[int, int | None, bool]:
    """Return incarnation and exit code of the place as the agent is told, and whether its process is there."""
    state = workers.states[0]
    return state.incarnation, state.exit_code, workers.is_any_alive


def kill(workers: Workers) -> None:
    """Kill the process, and wait until it can be seen how it ends; it is not reaped."""
    pid = workers.states[0].pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: exit_status(pid) is not None, "exit status in /proc")


def reap(workers: Workers) -> None:
    """Reap the process: how it ends can be seen before it can be waited for."""
    wait_until(workers.reap, "a process that can be reaped")


def test_next_process_waits_until_the_one_before_is_reaped(tmp_path: Path) -> None:
    """Its exit code is told at once; what it holds may be all that there is."""
    workers = Workers(config(tmp_path), Console(1), Console(2))
    workers.spawn(Spawn(0, 0, {}), 0.0)
    workers.inspect(Inspect(0, 0))
    assert told(workers) == (0, None, True)
    kill(workers)
    workers.inspect(Inspect(0, 1))
    assert told(workers) == (0, None, True), "another incarnation was meant"
    workers.inspect(Inspect(0, 0))
    assert told(workers) == (0, -9, True)
    workers.spawn(Spawn(0, 1, {}), 0.0)
    workers.start_waiting(0.0)
    assert told(workers) == (0, -9, True)
    reap(workers)
    assert told(workers) == (0, -9, False)
    workers.start_waiting(0.0)
    assert told(workers) == (1, None, True)
    kill(workers)
    workers.inspect(Inspect(0, 1))
    workers.spawn(Spawn(0, 2, {}), 0.0)
    workers.end_all(0.0, time.monotonic())
    reap(workers)
    workers.start_waiting(0.0)
    assert told(workers) == (1, -9, False), "the pod ends: nothing is started any more"
    for place in workers._workers:
        place.port.release()


def config(folder: Path) -> LaunchConfig:
    """Return a launcher's configuration for a command that sleeps."""
    return read_config(["--", "sleep", "600"], {**os.environ, "UNBROKEN_DIR": str(folder)})


def test_a_page_that_a_trainer_truncates_costs_that_trainer_only(
    page: Path, watch: DeathWatch, deaths: "queue.Queue[tuple[int, int]]"
) -> None:
    """The agent looked at a mapping of it, and was killed by SIGBUS. Afterwards all is as before."""
    stamps = StampPage(page, 2)
    with worker(page, 0):
        watch.watch(0, 0)
        os.truncate(page, 0)
        watch.watch(0, 0)
        watch.watch(1, 0)
        assert [slot.pid for slot in stamps.read()] == [0, 0]
    assert page.stat().st_size == page_bytes(2)
    with worker(page, 1) as process:
        watch.watch(1, 1)
        assert [slot.pid for slot in stamps.read()] == [0, process.pid]
        process.kill()
        assert deaths.get(timeout=LIMIT_S) == (1, 1)
    stamps.close()
