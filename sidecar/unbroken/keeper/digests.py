"""Digests of a sealed slot, in a small file beside it: what is restored later is what was sealed.

`{"serial": N, "problem": "", "checksums": [...]}`: one CRC-32 for each block of the content.
"""

import errno
import json
import os
import stat
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, Head, SlotState, num_blocks, read_head

_MAX_CHECKSUM_CHARACTERS = 12
_MAX_REST_CHARACTERS = 1000
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Digests:
    """What the keeper found when it read a sealed slot."""

    serial: int
    problem: str
    """Why nobody may read it; "" when all is well."""
    checksums: list[int]


class SlotCutError(OSError):
    """A slot is shorter than its head says: somebody has truncated it."""


def open_slot(path: Path, mode: int) -> int:
    """Return a descriptor. The trainer may write into the folder: whatever is no plain file there is refused."""
    descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "want a plain file")
    return descriptor


def read_slot_head(path: Path) -> Head | None:
    """Return what a slot says about itself; None when it is gone or says nothing whole."""
    try:
        descriptor = open_slot(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read_head(os.pread(descriptor, CONTENT_OFFSET, 0), os.fstat(descriptor).st_size)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_digests(path: Path, head: Head) -> Digests | None:
    """Return the digests of this very checkpoint; None when there are none yet, or they cannot be read."""
    limit = _MAX_REST_CHARACTERS + _MAX_CHECKSUM_CHARACTERS * num_blocks(head.content_bytes)
    try:
        descriptor = open_slot(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(limit + 1)
        if len(text) > limit:
            return None
        data = json.loads(text)
        found = Digests(int(data["serial"]), str(data["problem"]), [int(one) for one in data["checksums"]])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if found.serial != head.serial or (not found.problem and len(found.checksums) != num_blocks(head.content_bytes)):
        return None
    return found


def write_digests(path: Path, digests: Digests) -> None:
    """Put the file there whole. Raises OSError."""
    write_whole(path, json.dumps(asdict(digests)))


def write_whole(path: Path, text: str) -> None:
    """Put a file there that workers may read. Raises OSError."""
    # Two threads may write the same at once.
    part = path.with_name(f".{path.name}.{threading.get_native_id()}")
    part.unlink(missing_ok=True)
    # Made anew: what a trainer has put in its place is never written through.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o644)
        file.write(text)
    part.replace(path)


def digest_slot(path: Path) -> Digests | None:
    """Read a sealed slot; None when it is not sealed, or was overwritten meanwhile. Raises OSError.

    It is read, never mapped: who truncates a mapped file kills the process that touches it.
    """
    head = read_slot_head(path)
    if head is None or head.state is not SlotState.SEALED:
        return None
    buffer = memoryview(bytearray(min(_READ_BYTES, head.content_bytes)))
    descriptor = open_slot(path, os.O_RDONLY)
    try:
        checksums = [
            _checksum(descriptor, start, min(BLOCK_BYTES, head.content_bytes - start), buffer)
            for start in range(0, head.content_bytes, BLOCK_BYTES)
        ]
        samples = [_checksum(descriptor, one.offset, one.num_bytes, buffer) for one in head.samples]
    finally:
        os.close(descriptor)
    if read_slot_head(path) != head:
        return None
    if samples != [one.checksum for one in head.samples]:
        return Digests(head.serial, "the copy differs from its source: the tensors changed while they were copied", [])
    return Digests(head.serial, "", checksums)


def _checksum(descriptor: int, start: int, num_bytes: int, buffer: memoryview) -> int:
    """Return the CRC-32 of a part of the content. Raises SlotCutError."""
    found = 0
    for part in _parts(descriptor, CONTENT_OFFSET + start, num_bytes, buffer):
        found = zlib.crc32(part, found)
    return found


def _parts(descriptor: int, start: int, num_bytes: int, buffer: memoryview) -> Iterator[memoryview]:
    end = start + num_bytes
    while start < end:
        num_read = os.preadv(descriptor, [buffer[: min(len(buffer), end - start)]], start)
        if num_read == 0:
            raise SlotCutError(errno.EIO, "was truncated")
        yield buffer[:num_read]
        start += num_read
