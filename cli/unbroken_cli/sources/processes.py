"""The parts of an `unbroken run` on this machine, found by their environment, and hit by a signal or an order."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from unbroken_cli.errors import CommandError
from unbroken_cli.injection import SCRIPT, FaultKind
from unbroken_core.pod.fault_orders import FaultOrder, write_order
from unbroken_core.protocol.messages import PodStatus

_TIMEOUT_S = 60.0


def hit(kind: FaultKind, url: str, pod: PodStatus | None, local_rank: int) -> int:
    """Signal the worker, launcher or rendezvous, and return its pid. Raises CommandError."""
    if pod is not None and kind.signal:
        return _hit_worker(kind.signal, pod, local_rank)
    process = _find(url, pod)
    # As a drain does, a pod is asked to leave; otherwise nobody is asked.
    _send(int(process.name), signal.SIGTERM if pod is not None and kind.grace_s is None else signal.SIGKILL)
    return int(process.name)


def order_in(url: str, pod: PodStatus, local_rank: int, order: FaultOrder) -> str:
    """Let a pod carry out an order, in the environment of its launcher; return what it says. Raises CommandError."""
    try:
        pairs = (_find(url, pod) / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError as error:
        raise CommandError(f"pod {pod.pod}, on this machine: {error.strerror}; the fault did not happen") from error
    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "unbroken.faults", write_order(order), str(local_rank)]
    done = _run(command, environment)
    if done.returncode:
        raise CommandError(f"pod {pod.pod}, on this machine: {done.stderr.strip()[-800:]}")
    return done.stdout.strip()


def _find(url: str, pod: PodStatus | None) -> Path:
    """Return the folder in /proc of a pod's launcher, or of the rendezvous. Raises CommandError."""
    module = "unbroken.rendezvous" if pod is None else "unbroken.launch"
    mark = f"UNBROKEN_LISTEN={urlsplit(url).netloc}" if pod is None else f"UNBROKEN_POD_UID={pod.uid}"
    found = [path for path in Path("/proc").glob("[0-9]*") if _is_part(path, module, mark)]
    if not found:
        part = f"rendezvous at {url}" if pod is None else f"launcher of pod {pod.pod}"
        raise CommandError(f"no {part} runs on this machine as you: of a job in a cluster leave --url out")
    return found[0]


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"no answer in {_TIMEOUT_S:.0f} s; the fault may have happened") from error


def _hit_worker(number: int, pod: PodStatus, local_rank: int) -> int:
    environment = {**os.environ, "UNBROKEN_POD_UID": pod.uid}
    command = [sys.executable, "-c", SCRIPT, str(int(number)), str(local_rank)]
    done = _run(command, environment)
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
