"""Digests of a sealed slot, in a small file beside it: what is restored later is what was sealed.

`{"serial": N, "problem": "", "checksums": [...]}`: one CRC-32 for each block of the content.
"""

import json
import mmap
import os
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, Head, SlotState, num_blocks, read_head

MAX_DIGESTS_BYTES = 64 << 20


@dataclass(frozen=True)
class Digests:
    """What the keeper found when it read a sealed slot."""

    serial: int
    problem: str
    """Why nobody may read it; "" when all is well."""
    checksums: list[int]


def open_slot(path: Path, mode: int) -> int:
    """Return a descriptor. The trainer may write into the folder: a link or a pipe in a slot's place is refused."""
    return os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


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
    try:
        if path.stat().st_size > MAX_DIGESTS_BYTES:
            return None
        data = json.loads(path.read_bytes())
        found = Digests(int(data["serial"]), str(data["problem"]), [int(one) for one in data["checksums"]])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if found.serial != head.serial or (not found.problem and len(found.checksums) != num_blocks(head.content_bytes)):
        return None
    return found


def write_digests(path: Path, digests: Digests) -> None:
    """Put the file there whole. Raises OSError."""
    # Two threads may write the same at once.
    part = path.with_name(f".{path.name}.{threading.get_native_id()}")
    part.write_text(json.dumps(asdict(digests)))
    part.chmod(0o644)
    part.replace(path)


def digest_slot(path: Path) -> Digests | None:
    """Read a sealed slot; None when it is not sealed, or was overwritten meanwhile."""
    head = read_slot_head(path)
    if head is None or head.state is not SlotState.SEALED:
        return None
    checksums = []
    descriptor = open_slot(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with mapped, memoryview(mapped) as whole, whole[CONTENT_OFFSET : CONTENT_OFFSET + head.content_bytes] as content:
        for start in range(0, head.content_bytes, BLOCK_BYTES):
            with content[start : start + BLOCK_BYTES] as block:
                checksums.append(zlib.crc32(block))
        samples = [zlib.crc32(bytes(content[one.offset : one.offset + one.num_bytes])) for one in head.samples]
    if read_slot_head(path) != head:
        return None
    if samples != [one.checksum for one in head.samples]:
        return Digests(head.serial, "the copy differs from its source: the tensors changed while they were copied", [])
    return Digests(head.serial, "", checksums)
