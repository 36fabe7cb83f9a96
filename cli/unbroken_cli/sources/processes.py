"""The parts of an `unbroken run` on this machine, found by their environment, and hit by a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from unbroken_cli.errors import CommandError
from unbroken_cli.injection import SCRIPT, FaultKind
from unbroken_core.protocol.messages import JobStatus, PodStatus
from unbroken_core.vocabulary.errors import InputError

_TIMEOUT_S = 60.0


def choose_pod(kind: FaultKind, status: JobStatus, wanted: str | None) -> PodStatus | None:
    """Return the pod that was named, or the last one with ranks; None for the rendezvous. Raises InputError."""
    if kind.component != "trainer":
        return None
    fitting = [pod for pod in status.pods if pod.is_connected and (pod.ranks if wanted is None else pod.pod == wanted)]
    if not fitting:
        names = ", ".join(sorted(pod.pod for pod in status.pods)[:20]) or "none"
        what = "a pod with ranks" if wanted is None else f"pod {wanted!r}"
        raise InputError(f"--fault {kind.name}: needs {what} that is connected; the job has {names}")
    return max(fitting, key=lambda pod: max(pod.ranks, default=-1))


def hit(kind: FaultKind, url: str, pod: PodStatus | None, local_rank: int) -> int:
    """Signal the worker, launcher or rendezvous, and return its pid. Raises CommandError."""
    if pod is not None and kind.signal:
        return _hit_worker(kind.signal, pod, local_rank)
    module = "unbroken.rendezvous" if pod is None else "unbroken.launch"
    mark = f"UNBROKEN_LISTEN={urlsplit(url).netloc}" if pod is None else f"UNBROKEN_POD_UID={pod.uid}"
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_part(path, module, mark)]
    if not found:
        part = f"rendezvous at {url}" if pod is None else f"launcher of pod {pod.pod}"
        raise CommandError(f"no {part} runs on this machine as you: of a job in a cluster leave --url out")
    # As a drain does, a pod is asked to leave; otherwise nobody is asked.
    _send(found[0], signal.SIGTERM if pod is not None and kind.grace_s is None else signal.SIGKILL)
    return found[0]


def _hit_worker(number: int, pod: PodStatus, local_rank: int) -> int:
    environment = {**os.environ, "UNBROKEN_POD_UID": pod.uid}
    command = [sys.executable, "-c", SCRIPT, str(int(number)), str(local_rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    if done.returncode or not done.stdout.strip().isdecimal():
        raise CommandError(f"pod {pod.pod}, on this machine: {done.stderr.strip()[-500:]}")
    return int(done.stdout)


def _is_part(process: Path, module: str, mark: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return module.encode() in words and mark.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise CommandError(f"process {pid}: {error.strerror}; the fault did not happen") from error
