"""Real-time signals for the library's own use: those without a handler in this process."""

import os
import signal
from pathlib import Path

from unbroken.inprocess.exception import InternalError


def unused_signal() -> int:
    """Return a signal that is neither handled nor ignored. Raises InternalError when all are."""
    taken = _taken()
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL and not taken >> (number - 1) & 1:
            return number
    raise InternalError("real-time signals: want one without a handler, all are taken")


def give_back(number: int) -> None:
    """Handle a signal no more; in the main thread.

    To ignore it first drops what waits for a main thread that blocks it: by default it would end the process.
    """
    signal.signal(number, signal.SIG_IGN)
    signal.signal(number, signal.SIG_DFL)


def is_blocked(number: int) -> bool:
    """Return whether the main thread blocks a signal; from any thread. False if the kernel does not show it."""
    try:
        lines = Path(f"/proc/self/task/{os.getpid()}/status").read_text().splitlines()
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigBlk:"))


def _taken() -> int:
    """Return the mask of signals that are handled or ignored, by C code as well; 0 if the kernel does not show it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    taken = 0
    for line in lines:
        if line.startswith(("SigCgt:", "SigIgn:")):
            taken |= int(line.split()[1], 16)
    return taken
