"""Layout of a slot: one file that a pod's keeper allocates, and one worker writes a checkpoint of its shard into.

    0         4096      8192
    | head A  | head B  | content: layout (JSON), objects, tensors ...                          | unused |

The head is written twice, one copy after the other, so that a process that is killed at any instant leaves one whole
copy. A slot is WRITING before its first byte changes, and SEALED by the last write. The keeper reads what was sealed,
compares the samples that the worker took of the *source*, and writes the digests of all blocks beside it.
"""

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

from unbroken_core.protocol.bounds import MAX_NUMBER, MAX_RANKS

HEAD_BYTES = 4096
CONTENT_OFFSET = 2 * HEAD_BYTES
BLOCK_BYTES = 64 * 16381
"""Unit of digests, counted from CONTENT_OFFSET: 1 MiB less 192 bytes. Trainers compare the XOR of up to 64 blocks
(unbroken.memory.checksums). 16381 is a prime, so that what repeats at the same place of pages, as errors of memory and
of programs do, lies at different places of the blocks, and does not cancel."""
PIN_LOCK = "hhqqi4x"
"""Linux' struct flock: type, whence, start, length, process. A lock of an open file on the first byte of a slot."""
PINNED_NAME = "pinned"
"""A file beside the slots, for the time in which no keeper has locks: "ITERATION TERM STEP" of the step to be kept."""
COMING_NAME = "pinned-next"
"""Another one, of the step that is to be kept next: whether all others keep that one or the one before by now, nobody
knows here. A fourth number says until when, in seconds of the host's monotonic clock, HOLD_S at most."""
HOLD_S = 30.0
"""So long a step that is not protected may cost saves, if nothing else is said meanwhile."""
NUM_SLOTS = 2
"""Slots of each worker: one may always hold a whole checkpoint while the other is written."""
MAX_SAMPLES = 8
DIGEST_BYTES = 16
_MAGIC = b"UNBROKEN"
_VERSION = 1
_FORMAT = struct.Struct("<8sII Q16s qqq II 16s QQQQ I")
_SAMPLE = struct.Struct("<QII")
_CHECKSUM = struct.Struct("<I")


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    """Nothing, or what must not be restored any more."""
    WRITING = 1
    """Half of a checkpoint."""
    SEALED = 2
    """A whole checkpoint."""


@dataclass(frozen=True)
class Sample:
    """Digest that the worker took of a part of the source, to be found again in the content."""

    offset: int
    """Bytes from CONTENT_OFFSET."""
    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class Moment:
    """When a checkpoint was saved: in which iteration of the job, and after which step. Later ones are greater."""

    term: int
    iteration: int
    step: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key. The iteration comes first: a later one went on from what was restored, whatever the step."""
        return (self.iteration, self.term, self.step)


@dataclass(frozen=True)
class Head:
    """What a slot says about itself."""

    state: SlotState
    serial: int
    """Counts all checkpoints of this slot; digests name it, so that they are never taken for another one's."""
    job: bytes
    """Digest of the job's uid, DIGEST_BYTES."""
    moment: Moment
    rank: int
    world_size: int
    layout_digest: bytes
    layout_bytes: int
    objects_offset: int
    objects_bytes: int
    content_bytes: int
    """All of it: layout, objects and tensors."""
    samples: tuple[Sample, ...] = ()


EMPTY = Head(SlotState.FREE, 0, bytes(16), Moment(0, 0, 0), 0, 1, bytes(16), 0, 0, 0, 0)


def pack_head(head: Head) -> bytes:
    """Return one copy of the head, HEAD_BYTES long."""
    moment = head.moment
    body = _FORMAT.pack(
        _MAGIC, _VERSION, head.state, head.serial, head.job, moment.term, moment.iteration, moment.step, head.rank,
        head.world_size, head.layout_digest, head.layout_bytes, head.objects_offset, head.objects_bytes,
        head.content_bytes, len(head.samples),
    )  # fmt: skip
    body += b"".join(_SAMPLE.pack(one.offset, one.num_bytes, one.checksum) for one in head.samples[:MAX_SAMPLES])
    return (_CHECKSUM.pack(zlib.crc32(body)) + _CHECKSUM.pack(len(body)) + body).ljust(HEAD_BYTES, b"\0")


def read_head(both: bytes | memoryview, file_bytes: int) -> Head | None:
    """Return the newer whole copy of a slot's first CONTENT_OFFSET bytes; None when there is none, or it is absurd."""
    found = [_unpack(bytes(both[start : start + HEAD_BYTES])) for start in (0, HEAD_BYTES)]
    # Head A is written first: of two whole copies with the same serial it is the newer one.
    whole = [head for head in found if head is not None]
    newest = max(whole, key=lambda head: head.serial, default=None)
    if newest is None or not _is_plausible(newest, file_bytes):
        return None
    return newest


def voided(head: Head) -> Head:
    """Return the head of the same slot once nobody may restore it any more."""
    return replace(head, state=SlotState.FREE)


def num_blocks(content_bytes: int) -> int:
    """Return the number of blocks with a digest."""
    return -(-content_bytes // BLOCK_BYTES)


def slot_name(local_rank: int, index: int) -> str:
    """Return the file name of a worker's slot."""
    return f"{local_rank}-{index}.slot"


def digests_name(slot: str) -> str:
    """Return the name of the file with a slot's digests."""
    return f"{slot}.digests"


def _unpack(copy: bytes) -> Head | None:
    if len(copy) < HEAD_BYTES:
        return None
    (checksum,), (length,) = _CHECKSUM.unpack_from(copy), _CHECKSUM.unpack_from(copy, 4)
    body = copy[8 : 8 + length]
    if length < _FORMAT.size or len(body) != length or zlib.crc32(body) != checksum:
        return None
    magic, version, state, serial, job, term, iteration, step, rank, world_size, *rest = _FORMAT.unpack_from(body)
    layout_digest, layout_bytes, objects_offset, objects_bytes, content_bytes, num_samples = rest
    if magic != _MAGIC or version != _VERSION or state not in tuple(SlotState):
        return None
    if num_samples > MAX_SAMPLES or length != _FORMAT.size + num_samples * _SAMPLE.size:
        return None
    places = (_FORMAT.size + number * _SAMPLE.size for number in range(num_samples))
    return Head(
        SlotState(state), serial, job, Moment(term, iteration, step), rank, world_size, layout_digest, layout_bytes,
        objects_offset, objects_bytes, content_bytes, tuple(Sample(*_SAMPLE.unpack_from(body, at)) for at in places),
    )  # fmt: skip


def _is_plausible(head: Head, file_bytes: int) -> bool:
    """Return whether everything that the head names lies in the file, and its numbers can be told of."""
    if head.content_bytes > file_bytes - CONTENT_OFFSET or not 0 <= head.rank < head.world_size <= MAX_RANKS:
        return False
    # A trainer writes heads, and other pods' keepers copy them: no agent would read on what tells of larger ones.
    if not all(0 <= number <= MAX_NUMBER for number in head.moment.order) or head.layout_bytes > head.content_bytes:
        return False
    ends = [head.objects_offset + head.objects_bytes, *(one.offset + one.num_bytes for one in head.samples)]
    return max(ends) <= head.content_bytes
