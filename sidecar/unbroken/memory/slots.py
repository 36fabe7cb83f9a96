"""The slots of this worker: mapped once a process, written in turn.

    FREE or older SEALED ──begin──> WRITING ──copy──> content whole ──seal──> SEALED

The slot with the checkpoint that was sealed or restored last is never written.
"""

import ctypes
import fcntl
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unbroken.memory.checksums import checksum
from unbroken.memory.device_copies import Cuda, DeviceCopies, Runtime, are_wanted
from unbroken.memory.shard import Shard, copy_bits
from unbroken_core.pod.memory_slots import (
    COMING_NAME,
    CONTENT_OFFSET,
    HEAD_BYTES,
    HOLD_S,
    PIN_LOCK,
    PINNED_NAME,
    Head,
    Moment,
    Sample,
    SlotState,
    pack_head,
    read_head,
)

_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_NUM_SAMPLES = 4
_SAMPLE_BYTES = 64 << 10
_MAX_PINNED_BYTES = 100
_libc = ctypes.CDLL(None, use_errno=True)
_left_mapped: list[mmap.mmap] = []


@dataclass(frozen=True)
class Author:
    """Who writes a checkpoint, and when."""

    job: bytes
    moment: Moment
    rank: int
    world_size: int


class SlotChangedError(Exception):
    """The tensors changed while they were copied, or another iteration has begun."""


class Slot:
    """One mapped slot. Written by one thread at a time."""

    def __init__(self, path: str, devices: Runtime | None = None) -> None:
        """Map it. `devices`: the ones that tensors may be on; None: those of CUDA. Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.num_bytes = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self.num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.device_copies = DeviceCopies(self.bytes, Cuda() if devices is None else devices)
        self._views: tuple[bytes, tuple[torch.Tensor, ...]] = (b"", ())

    @property
    def head(self) -> Head | None:
        """What it says about itself."""
        return read_head(self._map[:CONTENT_OFFSET], self.num_bytes)

    def populate(self, is_over: Callable[[], bool]) -> None:
        """Make this process' page tables ready, in pieces. Nothing is allocated: the keeper has done that."""
        for start in range(0, self.num_bytes, _POPULATE_BYTES):
            place = ctypes.c_void_p(self.bytes.data_ptr() + start)
            length = ctypes.c_size_t(min(_POPULATE_BYTES, self.num_bytes - start))
            # Through ctypes, which lets the other threads run meanwhile.
            if is_over() or _libc.madvise(place, length, _POPULATE_WRITE):
                return

    def lock(self) -> bool:
        """Keep others from reading it.

        Return False when the keeper reads it, to copy it to another pod, and when a device has not ended a copy that
        was given up. Raises RuntimeError when the device fails.
        """
        if self.device_copies.are_under_way:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let others read it, and pin it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._lock_first_byte(fcntl.F_UNLCK)

    def lend(self) -> int | None:
        """Return a descriptor of its own with a shared lock, which keeps it from being written; None without one."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def claim(self) -> bool:
        """Keep the keeper from pinning it; return False when it has: what it holds is needed until another is safe."""
        return self._lock_first_byte(fcntl.F_WRLCK)

    def _lock_first_byte(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(PIN_LOCK, kind, os.SEEK_SET, 0, 1, 0))
        except BlockingIOError:
            return False
        return True

    def begin(self, author: Author, shard: Shard) -> Head:
        """Declare that the content changes from now on."""
        present = self.head
        layout = shard.layout
        head = Head(
            SlotState.WRITING, 1 if present is None else present.serial + 1, author.job, author.moment, author.rank,
            author.world_size, layout.digest, len(layout.text), layout.objects_offset, len(shard.objects),
            layout.objects_offset + len(shard.objects),
        )  # fmt: skip
        self._write_head(head)
        return head

    def copy(self, shard: Shard, may_go_on: Callable[[], bool]) -> tuple[Sample, ...]:
        """Copy a shard in; return samples of its source. Raises SlotChangedError, RuntimeError when a device fails."""
        layout = shard.layout
        samples = _take_samples(shard)
        versions = _versions(shard.sources)
        self._map[CONTENT_OFFSET : CONTENT_OFFSET + len(layout.text)] = layout.text
        start = CONTENT_OFFSET + layout.objects_offset
        self._map[start : start + len(shard.objects)] = shard.objects
        of_devices = []
        with torch.no_grad():
            for target, source in zip(self._targets(shard), shard.sources, strict=True):
                if not may_go_on():
                    raise SlotChangedError("another iteration has begun")
                if self.device_copies.takes(source):
                    of_devices.append((target, source))
                else:
                    copy_bits(target, source)
            if not self.device_copies.copy(of_devices, may_go_on):
                raise SlotChangedError("another iteration has begun")
        if _versions(shard.sources) != versions:
            raise SlotChangedError("the tensors changed while they were copied")
        return samples

    def seal(self, head: Head, samples: tuple[Sample, ...]) -> None:
        """Declare the content whole: the last write of a save."""
        self._write_head(replace(head, state=SlotState.SEALED, samples=samples))

    def void(self, head: Head) -> None:
        """Declare that there is nothing here."""
        self._write_head(replace(head, state=SlotState.FREE))

    def close(self) -> None:
        """Let go of the mapping, which ends with the last tensor in it.

        Not closed: torch does not keep it from being unmapped, and a thread that compares may still read it.
        """
        is_ours = self.device_copies.close()
        self._views = (b"", ())
        if not is_ours:
            # A device may write to it still: it stays mapped until this process ends.
            _left_mapped.append(self._map)
        del self.bytes, self.device_copies, self._map
        os.close(self._descriptor)

    def _write_head(self, head: Head) -> None:
        packed = pack_head(head)
        self._map[:HEAD_BYTES] = packed
        self._map[HEAD_BYTES:CONTENT_OFFSET] = packed

    def _targets(self, shard: Shard) -> tuple[torch.Tensor, ...]:
        layout = shard.layout
        if self._views[0] != layout.digest:
            content = self.bytes[CONTENT_OFFSET:]
            views = [
                content[one.start : one.start + one.num_bytes].view(one.dtype).view(one.sizes) for one in layout.entries
            ]
            self._views = (layout.digest, tuple(views))
        return self._views[1]


class Populating:
    """A thread that populates slots in the background, and registers them with a device; it ends with them."""

    def __init__(self, slots: list[Slot], device: torch.device | None) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(slots, device), name="unbroken-populate", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is done."""
        self._thread.join()

    def stop(self) -> None:
        """Stop after the present piece."""
        self._is_over.set()
        self._thread.join()

    def _run(self, slots: list[Slot], device: torch.device | None) -> None:
        for slot in slots:
            slot.populate(self._is_over.is_set)
            if device is not None and not self._is_over.is_set():
                slot.device_copies.register(device)


def device_to_register(shard: Shard) -> torch.device | None:
    """Return the device that slots for a shard are to be registered with; None when the user wants none of it."""
    if not are_wanted():
        return None
    return next((source.device for source in shard.sources if source.is_cuda), None)


def read_pinned(path: str) -> tuple[int, int, int] | None:
    """Return (iteration, term, step) of what the keeper of the slot at `path` has said is to stay; None of none."""
    match _read_numbers(Path(path).with_name(PINNED_NAME)):
        case (iteration, term, step):
            return iteration, term, step
    return None


def read_coming(path: str) -> tuple[int, int, int] | None:
    """Return the same of what is to stay next, as long as that holds."""
    match _read_numbers(Path(path).with_name(COMING_NAME)):
        case (iteration, term, step, until_s) if 0 < until_s - time.monotonic() <= HOLD_S:
            return iteration, term, step
    return None


def _read_numbers(path: Path) -> tuple[int, ...]:
    """Return the numbers in a file, none where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return tuple(map(int, os.read(descriptor, _MAX_PINNED_BYTES).split()))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return ()


def needed_bytes(shard: Shard) -> int:
    """Return the size of a slot for a shard, with room for objects that grow."""
    return CONTENT_OFFSET + shard.layout.objects_offset + 2 * len(shard.objects) + (64 << 10)


def fits(slot: Slot, shard: Shard) -> bool:
    """Return whether a shard has room in a slot."""
    return CONTENT_OFFSET + shard.layout.objects_offset + len(shard.objects) <= slot.num_bytes


def _take_samples(shard: Shard) -> tuple[Sample, ...]:
    """Digest a few parts of the source, chosen at random: the keeper looks for the same in the copy."""
    weights = [
        one.num_bytes if source.is_contiguous() and not (source.is_conj() or source.is_neg()) else 0
        for one, source in zip(shard.layout.entries, shard.sources, strict=True)
    ]
    if not any(weights):
        return ()
    samples = []
    # Not the user's random numbers: a save must not change what is trained.
    chance = random.Random(os.urandom(8))
    for index in chance.choices(range(len(weights)), weights, k=_NUM_SAMPLES):
        entry = shard.layout.entries[index]
        length = min(_SAMPLE_BYTES, entry.num_bytes)
        at = chance.randrange(entry.num_bytes - length + 1)
        part = shard.sources[index].reshape(-1).view(torch.uint8)[at : at + length].cpu()
        samples.append(Sample(entry.start + at, length, checksum(part)))
    return tuple(samples)


def _versions(tensors: tuple[torch.Tensor, ...]) -> list[int]:
    """Return how often each was changed in place."""
    return [0 if one.is_inference() else one._version for one in tensors]
