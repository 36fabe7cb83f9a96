"""Makes a worker write its stack; see unbroken_core.pod.stacks."""

import os
from pathlib import Path


def request_stack(pid: int, number: int, path: Path) -> bool:
    """Empty the file and signal the process; return whether that was done.

    Not without a handler for the signal: for any other process it would be the end.
    """
    if number <= 0 or not _handles(pid, number):
        return False
    try:
        os.truncate(path, 0)
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _handles(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
