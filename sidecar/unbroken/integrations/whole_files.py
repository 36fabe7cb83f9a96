"""Writes a file that is either there, on the disk and as it was meant, or not there at all.

    .NAME.<random>.part, locked ──all bytes, fsync, read again──> renamed to NAME ──fsync of the folder──> written

A process that is killed leaves such a part; the next write in the folder removes it, once nobody has it locked.
"""

import contextlib
import errno
import fcntl
import os
import uuid
import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 24


def write(path: Path, content: "bytes | memoryview") -> None:
    """Write a file, or replace one. Raises OSError; what was there before is as it was then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_parts(path.parent)
    part, descriptor = _new_part(path)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
        _compare(descriptor, content, path)
        part.replace(path)
    except BaseException:
        # An interruption, too.
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def _new_part(path: Path) -> tuple[Path, int]:
    """Return a part that no other writer in the folder takes for one that is left over."""
    while True:
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Before the first byte: who looks for parts that are left over locks them first.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # by another writer, which removes it
            os.close(descriptor)
            continue
        except OSError:  # without locks, as on some file systems, none are removed
            return part, descriptor
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)


def _write_all(descriptor: int, content: "bytes | memoryview") -> None:
    with memoryview(content) as left:
        done = 0
        while done < len(left):
            done += os.write(descriptor, left[done : done + _CHUNK_BYTES])


def _compare(descriptor: int, content: "bytes | memoryview", path: Path) -> None:
    """Read all of it again, from the disk where the system allows. Raises OSError when it is not what was written."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found, at = 0, 0
    while part := os.pread(descriptor, _CHUNK_BYTES, at):
        found, at = zlib.crc32(part, found), at + len(part)
    if (at, found) != (len(content), zlib.crc32(content)):
        raise OSError(errno.EIO, "what was written is not what is read again", str(path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_left_parts(folder: Path) -> None:
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            # Not ours to judge: it may be gone, of another user, or being written by another process.
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)
