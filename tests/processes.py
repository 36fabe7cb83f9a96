"""What tests want to know of processes."""

import psutil


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaped has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
