"""The faults themselves. Each runs in the main thread, inside the script's function, unless it says otherwise."""

import ctypes
import hashlib
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from unbroken_core.vocabulary.errors import InputError

_CGROUPS: Final = Path("/sys/fs/cgroup")
_CONTROLLER: Final = "memory"
_CHUNK_BYTES: Final = 16 << 20
_BEYOND_BYTES: Final = 64 << 20
"""So much more than the limit is asked for at most: the kernel ends this process before."""
_CLOCK_MONOTONIC: Final = 1


class InjectedFault(RuntimeError):
    """Raised by `unbroken inject --fault exception`, and by nothing else."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_gil(seconds: float) -> None:
    """Let no thread of this interpreter run, as C code does that forgets to let go; signals do not shorten it."""
    # PyDLL keeps the GIL for the time of a call.
    libc = ctypes.PyDLL(None)
    mutex, condition, attributes = (ctypes.create_string_buffer(128) for _ in range(3))
    libc.pthread_condattr_init(attributes)
    libc.pthread_condattr_setclock(attributes, _CLOCK_MONOTONIC)
    libc.pthread_cond_init(condition, attributes)
    libc.pthread_mutex_lock(mutex)
    until_s = time.monotonic() + seconds
    until = _Timespec(int(until_s), int(until_s % 1.0 * 1e9))
    while time.monotonic() < until_s:
        libc.pthread_cond_timedwait(condition, mutex, ctypes.byref(until))
    libc.pthread_mutex_unlock(mutex)


def work(seconds: float) -> None:
    """Use a core for so long, and let other threads run."""
    block, until_s = bytes(1 << 20), time.monotonic() + seconds
    while time.monotonic() < until_s:
        hashlib.sha256(block)


def group_of_many() -> Any:
    """Return torch.distributed, if the script has a process group with others. Raises InputError."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise InputError("mismatch: want a process group of torch.distributed, got none in this process")
    if dist.get_world_size() < 2:
        raise InputError("mismatch: want a process group of at least 2 ranks, got 1")
    return dist


def memory_limit(own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int:
    """Return how much this container may have. Raises InputError where its own control group has no limit."""
    file = _limit_file(own, root)
    try:
        text = file.read_text().strip()
    except OSError:
        text = "no such file"
    if not text.isdecimal() or int(text) >= _all_memory():
        raise InputError(
            f"oom: want a limit of memory on this container (resources.limits.memory), got {text!r} in {file}: the "
            "kernel would look for a victim on the whole node"
        )
    return int(text)


def _limit_file(own: Path, root: Path) -> Path:
    """Return the file with the limit of this process' own control group, of version 1 where memory is there."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())
    except (OSError, ValueError):
        groups = {}
    for controllers, path in groups.items():
        if _CONTROLLER in controllers.split(","):
            return _own_or_root(root / _CONTROLLER, path) / f"{_CONTROLLER}.limit_in_bytes"
    return _own_or_root(root, groups.get("", "/")) / f"{_CONTROLLER}.max"


def _own_or_root(mount: Path, path: str) -> Path:
    # A container may be told the node's path of its group, and see the group itself as the root.
    found = mount / path.lstrip("/")
    return found if found.is_dir() else mount


def _all_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def take_memory(limit_bytes: int, seconds: float) -> None:
    """Take memory until the kernel ends this process; in a thread of its own. It is given back if that does not come.

    The kernel is to choose this process, and no neighbour in its container.
    """
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    score.write_text("1000")
    taken: list[mmap.mmap] = []
    until_s = time.monotonic() + seconds
    try:
        while len(taken) * _CHUNK_BYTES < limit_bytes + _BEYOND_BYTES and time.monotonic() < until_s:
            chunk = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            taken.append(chunk)
            for page in range(0, _CHUNK_BYTES, mmap.PAGESIZE):
                chunk[page] = 1
    finally:
        for chunk in taken:
            chunk.close()
        score.write_text(before)
