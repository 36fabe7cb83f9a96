"""A file system that is full for a while: a process of its own holds a file that has no name.

However that process ends, with its time, with the pod or by a signal, the kernel frees the space: nothing is left to
clean up. It holds a lock meanwhile, so that one file system of a pod is full at a time.
"""

import errno
import fcntl
import os
import select
import signal
import time
from pathlib import Path

from unbroken_core.pod.fault_orders import FaultOrder
from unbroken_core.vocabulary.errors import InputError

_LOCK = "fault-disk.lock"
_BLOCK_BYTES = 1 << 20
_FILL_S = 40.0
"""Who ordered it is answered after this long, however much is still to be written."""
_LOOK_S = 1.0
"""Between two looks at whether the pod is still there."""
_ROOT = Path("/")
_ENDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "a quota is used up, and the file system has room for who is not under it",
    errno.EFBIG: "not full: a file may not be larger here",
}
"""By what the kernel refused, what there is now."""


def fill_disk(folder: Path, order: FaultOrder) -> str:
    """Fill the file system of a path until the order's seconds are over; return what is done. Raises InputError."""
    path = Path(order.path)
    free_bytes = _free(path)
    if free_bytes > order.max_bytes:
        raise InputError(
            f"disk-full: {path} has {free_bytes} bytes free, want at most --max-bytes {order.max_bytes}; nothing was "
            "done"
        )
    lock = _lock(folder, order)
    if lock is None:
        return "this order was carried out before; nothing was done again"
    reader, writer = os.pipe()
    if os.fork() == 0:
        # Whatever happens in here: this process must not go on as the one that was forked.
        try:
            os.close(reader)
            _hold(folder, path, order, writer)
        finally:
            os._exit(0)
    os.close(writer)
    os.close(lock)
    ready, _, _ = select.select([reader], [], [], _FILL_S)
    said = os.read(reader, 200).decode(errors="replace") if ready else f"more than {_FILL_S:.0f} s of writing so far"
    os.close(reader)
    if said.startswith("!"):
        raise InputError(f"disk-full: {path}: {said[1:]}")
    return f"disk-full: {path}: {said or 'the file was lost'}; free again in {order.seconds:g} s"


def _free(path: Path) -> int:
    try:
        room = os.statvfs(path)
        if not path.is_dir():
            raise InputError(f"disk-full: {path}: want a folder; nothing was done")
        is_root = path.stat().st_dev == _ROOT.stat().st_dev
    except OSError as error:
        raise InputError(f"disk-full: {path}: {error.strerror}; nothing was done") from error
    if is_root:
        raise InputError(
            f"disk-full: {path} is on the container's own file system, which is the node's; want a volume of the job; "
            "nothing was done"
        )
    return room.f_bavail * room.f_frsize


def _lock(folder: Path, order: FaultOrder) -> int | None:
    """Return a descriptor that holds the lock; None if the same order holds it. Raises InputError."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; nothing was done") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held = os.pread(descriptor, 64, 0).decode(errors="replace")
        os.close(descriptor)
        if held == order.id:
            return None
        raise InputError(f"disk-full: order {held} still fills a disk of this pod; nothing was done") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, order.id.encode(), 0)
    return descriptor


def _hold(folder: Path, path: Path, order: FaultOrder, writer: int) -> None:
    """Fill, say so, and stay until it is over: in the child, which kubectl does not wait for."""
    until_s = time.monotonic() + order.seconds
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    try:
        file = os.open(path, os.O_TMPFILE | os.O_WRONLY, 0o600)
        os.write(writer, _fill(file, order.max_bytes, until_s).encode())
    except OSError as error:
        os.write(writer, f"!{error.strerror}; nothing was done".encode())
        return
    os.close(writer)
    while time.monotonic() < until_s and folder.is_dir():
        time.sleep(_LOOK_S)


def _fill(file: int, max_bytes: int, until_s: float) -> str:
    """Write until there is no room, or as much as is allowed; return what ended it, and how much that was."""
    block, written, end = bytes(_BLOCK_BYTES), 0, "not full yet"
    while time.monotonic() < until_s:
        if written >= max_bytes:
            room = os.fstatvfs(file)
            left = room.f_bavail * room.f_frsize
            end = f"not full: --max-bytes are written, {left} bytes are free" if left else _ENDS[errno.ENOSPC]
            break
        try:
            written += os.write(file, block[: max_bytes - written])
        except OSError as error:
            if len(block) == 1:
                end = _ENDS.get(error.errno or 0, f"not full: {error.strerror}")
                break
            # The last corner of it is smaller than a block.
            block = block[: len(block) // 16 or 1]
    return f"{end}, {written} bytes were written"
