"""What `unbroken inject` runs in a trainer's container: it finds the worker, and nobody else."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

from unbroken_cli.injection import SCRIPT

WORKER = """
import subprocess, sys
# As loaders of data do: a process of the worker's own, with the worker's environment.
with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def a_worker(pod: str, rank: int, incarnation: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A worker with a process of its own, which ends with it."""
    place = {"UNBROKEN_POD_UID": pod, "UNBROKEN_LOCAL_RANK": str(rank), "UNBROKEN_INCARNATION": str(incarnation)}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **place},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        yield process


def inject(pod: str, number: int, rank: int) -> subprocess.CompletedProcess[str]:
    """Run the script as kubectl would."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(number), str(rank)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "UNBROKEN_POD_UID": pod},
    )


def test_the_signal_reaches_the_newest_worker_of_that_rank_in_that_pod_and_nobody_else() -> None:
    pod, other = uuid.uuid4().hex, uuid.uuid4().hex
    with a_worker(pod, 0, 1) as earlier, a_worker(pod, 0, 2) as meant, a_worker(pod, 1), a_worker(other, 0) as foreign:
        done = inject(pod, signal.SIGKILL, 0)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(meant.pid), "")
        assert meant.wait(100) == -signal.SIGKILL
        assert [process.poll() for process in (earlier, foreign)] == [None, None]
        missing = inject(pod, signal.SIGKILL, 7)
        assert missing.returncode == 1
        assert missing.stderr == "no worker with local rank 7 runs; those that run have ['0', '1']\n"
