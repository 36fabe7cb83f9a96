"""What tests want to know of processes, each of which may end, or just begin, while it is looked at."""

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaped has."""
    try:
        return psutil.Process(pid).status() in _ENDED
    except psutil.NoSuchProcess:
        return True


def words_of(process: psutil.Process) -> list[str]:
    """Return its command line; nothing when it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that it was started with; nothing when it has ended, or is still being started."""
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}
