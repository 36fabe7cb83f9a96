"""What this process has of its keeper's memory. One for all checkpointers, writers and readers of a process."""

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unbroken.memory.client import KeeperClient
from unbroken.memory.pacing import may_replace
from unbroken.memory.place import WorkerInfo
from unbroken.memory.recording import recorder
from unbroken.memory.shard import Shard
from unbroken.memory.slots import (
    Author,
    Populating,
    Slot,
    SlotChangedError,
    device_to_register,
    fits,
    needed_bytes,
    read_coming,
    read_pinned,
)
from unbroken.standstill import standstill
from unbroken_core.pod.memory_messages import (
    Done,
    Fetched,
    FetchShard,
    Find,
    Found,
    Loaded,
    Measure,
    Measured,
    NoRoom,
    NotFetched,
    Reserve,
    Reserved,
    Sealed,
    Written,
)
from unbroken_core.pod.memory_slots import Head, Moment, SlotState
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.vocabulary.checkpoints import Load, LoadSource, OnDisk

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long a keeper may take that only has to be asked; it may just be started again."""
_ALLOCATION_S = 120.0
_DIGESTION_S = 120.0
_BUSY_S = 30.0
_FETCH_S = 3600.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Saved:
    """The state is in memory."""

    step: int
    num_bytes: int


@dataclass(frozen=True)
class Skipped:
    """The state was not saved, and why; what was saved before stays."""

    step: int
    reason: str


@dataclass(frozen=True)
class LentSlot:
    """A slot that nobody overwrites while its descriptor is open, here or in another process."""

    path: str
    serial: int
    descriptor: int


@dataclass(eq=False)
class WorkerSlots:
    """Slots of one place in one pod."""

    folder: Path
    local_rank: int
    client: KeeperClient
    _slots: list[Slot] = field(default_factory=list)
    _job: bytes = b""
    _populating: Populating | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by who writes a slot."""
    _iteration: tuple[int, int] = (0, 0)
    _last_step: int = 0
    """Of the last save that was due."""
    _newest_step: int = -1
    """The newest that this iteration has saved since its load; -1: none."""
    _has_gone_back: bool = False
    """Whether it has come to an earlier one since: then it comes to the newest once more, with another state."""
    _looked_for: tuple[int, int] | None = (-1, -1)
    """Iteration and term in which it was asked last what can be restored; None once the log says that it was not."""
    _kept: int | None = None
    """Index of the slot with the checkpoint that was sealed or restored last."""

    def enter(self, place: WorkerInfo) -> None:
        """Begin an iteration of the job: writers of earlier ones end."""
        iteration = _epoch(place)
        if iteration > self._iteration:
            self._iteration, self._newest_step, self._has_gone_back = iteration, -1, False

    def reserve(self, shard: Shard) -> str:
        """Have slots in which a shard has room; return why there are none, "" when there are."""
        if self._slots and all(fits(slot, shard) for slot in self._slots):
            return ""
        answer = self.client.ask_any(Reserve(self.local_rank, needed_bytes(shard)), _ALLOCATION_S)
        if isinstance(answer, NoRoom):
            return answer.text
        if not isinstance(answer, Reserved):
            return f"no keeper answers at {self.folder}: its log is the agent's"
        try:
            self._map(answer, shard)
        except (OSError, ValueError) as error:
            return f"the slots that the keeper has made cannot be mapped: {error}"
        return ""

    def wait_until_populated(self) -> None:
        """Wait for the page tables; without it the first save pays for them."""
        if self._populating is not None:
            self._populating.wait()

    def write(self, place: WorkerInfo, step: int, shard: Shard, wait_s: float = 0.0) -> Saved | Skipped:
        """Copy a shard into the slot that is not kept.

        `wait_s`: how long it waits for one that is still read; not 0 where all ranks save this very step.
        """
        if self._looked_for not in (_epoch(place), None):
            self._looked_for = None
            logger.warning(
                "save without a load: call `load` at the beginning of each iteration, before the first step, or the "
                "training begins anew after each fault"
            )
        noting = recorder()
        if noting is None:
            return self._write_alone(place, step, shard, wait_s)
        noting.before(place, step)
        result = self._write_alone(place, step, shard, wait_s)
        noting.saved(place, step, shard, result.reason if isinstance(result, Skipped) else "")
        return result

    def _write_alone(self, place: WorkerInfo, step: int, shard: Shard, wait_s: float) -> Saved | Skipped:
        if not self._lock.acquire(timeout=_BUSY_S):
            reason = f"another save of this process has not ended within {_BUSY_S:g} s"
            return self._skipped(step, reason, "busy")
        try:
            began_s = time.monotonic()
            problem = self.reserve(shard)
            if problem:
                result: Saved | Skipped = self._skipped(step, problem, "no room")
            else:
                result = self._write(place, step, shard, began_s + wait_s, is_demanded=wait_s > 0)
            if isinstance(result, Saved):
                self.client.tell(Measured(Measure.SAVED, seconds=time.monotonic() - began_s))
            return result
        finally:
            self._lock.release()

    def _skipped(self, step: int, reason: str, word: str) -> Skipped:
        self.client.tell(Measured(Measure.SKIPPED, word))
        return Skipped(step, reason)

    def close(self) -> None:
        """Unmap the slots and leave the keeper; what was saved stays."""
        if self._populating is not None:
            self._populating.stop()
        for slot in self._slots:
            slot.close()
        self._slots = []
        self.client.close()

    def _write(
        self, place: WorkerInfo, step: int, shard: Shard, until_s: float, *, is_demanded: bool
    ) -> Saved | Skipped:
        iteration = (place.iteration, place.term)

        def may_go_on() -> bool:
            return self._iteration == iteration

        if not may_go_on():
            return self._skipped(step, "another iteration of the job has begun", "next iteration")
        if step < self._newest_step + self._has_gone_back:
            self._has_gone_back = True
            reason = f"step {self._newest_step} was saved before, in the same iteration: one step has one state"
            return self._skipped(step, f"{reason}, so number steps on, also where the training goes back", "other")
        before, self._last_step = self._last_step, step
        # All ranks come to have what is demanded: no rounder step has to stay until they have that one.
        distance = 0 if is_demanded else max(step - before, 1)
        moment = Moment(place.term, place.iteration, step)
        while (index := self._locked(moment, distance)) is None and time.monotonic() < until_s and may_go_on():
            time.sleep(_LOOK_S)
        if index is None:
            return self._skipped(
                step, "earlier checkpoints have to stay until they are copied, to other pods or to the disk", "busy"
            )
        slot = self._slots[index]
        self._kept = 1 - index
        try:
            author = Author(self._job, moment, place.rank, place.world_size)
            head = slot.begin(author, shard)
            try:
                samples = slot.copy(shard, may_go_on)
            except SlotChangedError as error:
                slot.void(head)
                return self._skipped(step, str(error), "tensors changed" if may_go_on() else "next iteration")
            if standstill.is_spoilt:
                # A device goes on when its collective is aborted, with what half of it has left.
                slot.void(head)
                return self._skipped(step, "the iteration is over, and its collectives were aborted", "next iteration")
            slot.seal(head, samples)
        finally:
            slot.unlock()
        self._kept, self._newest_step, self._has_gone_back = index, step, False
        self.client.tell(Sealed(self.local_rank, index))
        return Saved(step, head.content_bytes)

    def has(self, place: WorkerInfo, step: int) -> bool:
        """Return whether this iteration has sealed a step, and no later one."""
        head = None if self._kept is None or self._kept >= len(self._slots) else self._slots[self._kept].head
        return _holds(head, Moment(place.term, place.iteration, step))

    def has_part(self, place: WorkerInfo, moment: Moment) -> bool:
        """Return whether a checkpoint is here as this rank has sealed it, in a world of the same size."""
        heads = [head for slot in self._slots if (head := slot.head) is not None and _holds(head, moment)]
        return any((head.rank, head.world_size) == (place.rank, place.world_size) for head in heads)

    def lend(self, moment: Moment) -> LentSlot | None:
        """Return the slot with this checkpoint, locked against writers; None when there is none."""
        for slot in self._slots:
            head = slot.head
            if head is not None and _holds(head, moment):
                descriptor = slot.lend()
                # Who opens it looks whether it still has this serial.
                return None if descriptor is None else LentSlot(slot.path, head.serial, descriptor)
        return None

    def mapped(self, path: str) -> torch.Tensor | None:
        """Return the bytes of a slot that this process has mapped; None of another one."""
        return next((slot.bytes for slot in self._slots if slot.path == path), None)

    def find(self) -> Found | None:
        """Ask what can be read on this host; None without a keeper."""
        return self.client.ask(Find(), Found, _DIGESTION_S)

    def fetch(self, wanted: FetchShard) -> Fetched | NotFetched | None:
        """Have the keeper fetch parts of another pod's; None without a keeper. It gives up a peer that is too slow."""
        answer = self.client.ask_any(wanted, _FETCH_S)
        return answer if isinstance(answer, (Fetched, NotFetched)) else None

    def looks_for(self, place: WorkerInfo) -> None:
        """It is asked in this iteration what can be restored."""
        self._looked_for = _epoch(place)

    def loaded(self, load: Load) -> bool:
        """All ranks went back to this; return whether the keeper knows."""
        self._newest_step, self._has_gone_back = -1, False
        if load.source is LoadSource.MEMORY:
            moment = Moment(load.of_term, load.of_iteration, load.step)
            with self._lock:
                self._kept = next((i for i, slot in enumerate(self._slots) if _holds(slot.head, moment)), None)
        return self.client.ask(Loaded(load), Done, ANSWER_S) is not None

    def measured(self, source: str, seconds: float, steps_redone: int) -> None:
        """Tell the keeper of a load."""
        self.client.tell(Measured(Measure.LOADED, source, seconds, steps_redone))

    def differs(self) -> None:
        """Tell the keeper of a checkpoint whose content is not what it has digested."""
        self.client.tell(Measured(Measure.DIFFERS))

    def written(self, disk: OnDisk) -> None:
        """Tell the keeper what is on the disk."""
        self.client.tell(Written(disk))

    def _locked(self, moment: Moment, distance: int) -> int | None:
        """Return which slot the next save goes into, locked; None for none. `distance`: as in may_replace.

        Never the newest, unless the other one is pinned: that one all ranks can go back to. A step that is saved once
        more goes where it is: the one before it is what all ranks have until each of them has saved this one.
        """
        target = self._target()
        if self._kept is not None and _holds(self._slots[self._kept].head, moment):
            order: tuple[int, ...] = (self._kept,)
        else:
            order = (target, 1 - target)
        # A keeper that has gone keeps nothing by a lock, and all others keep this step.
        kept, coming = read_pinned(self._slots[0].path), read_coming(self._slots[0].path)
        held = [_order(slot.head) for slot in self._slots]
        is_new = kept is not None and kept not in held and max(held) >= (0, 0, 0)
        if is_new and not may_replace(max(held)[2], moment.step, distance):
            # Of a new pod, which has not what all others keep. With two slots for what comes it would be past each step
            # before they have it, and none would ever be that of all ranks.
            return None
        for index in order:
            slot = self._slots[index]
            if not slot.lock():
                break
            if slot.claim() and _order(slot.head) not in (kept, coming):
                return index
            slot.unlock()
            pinned, newest = _order(slot.head), _order(self._slots[1 - index].head)
            if pinned < (0, 0, 0) or not may_replace(newest[2], moment.step, distance):
                break  # Void, and the keeper is about to let it go; or the newest is to be copied.
        return None

    def _target(self) -> int:
        if self._kept is None:
            # A new process: the newest one is the one to keep.
            order = [(_order(slot.head), index) for index, slot in enumerate(self._slots)]
            return min(order)[1]
        return 1 - self._kept

    def _map(self, answer: Reserved, shard: Shard) -> None:
        if self._populating is not None:
            self._populating.stop()
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._slots = [Slot(path) for path in answer.paths]
        self._job = bytes.fromhex(answer.job)
        self._populating = Populating(list(self._slots), device_to_register(shard))


def _epoch(place: WorkerInfo) -> tuple[int, int]:
    return place.iteration, place.term


def checked_step(step: object) -> int:
    """Return it. Raises ValueError for what no keeper could tell of."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_NUMBER:
        raise ValueError(f"step: want a number from 0 to {MAX_NUMBER}, got {step!r}")
    return step


def checked_timeout(seconds: object) -> float:
    """Return it. Raises ValueError for what is no time to wait."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s: want seconds, at least 0 and at most {threading.TIMEOUT_MAX:g}, got {seconds!r}")
    return seconds


_arena: WorkerSlots | None = None
_owner = 0


def arena_of(place: WorkerInfo) -> WorkerSlots | None:
    """Return this process' arena; None outside of a job."""
    global _arena, _owner
    if place.folder is None:
        return None
    is_other = _arena is None or (_arena.folder, _arena.local_rank) != (place.folder, place.local_rank)
    if is_other or _owner != os.getpid():
        if _arena is not None and _owner == os.getpid():
            _arena.close()
        _arena, _owner = WorkerSlots(place.folder, place.local_rank, KeeperClient(place.folder)), os.getpid()
    if _arena is not None:
        _arena.enter(place)
    return _arena


def _holds(head: Head | None, moment: Moment) -> bool:
    return head is not None and head.state is SlotState.SEALED and head.moment == moment


def _order(head: Head | None) -> tuple[int, int, int]:
    """Return how new what a slot holds is; nothing is older than a slot without a whole checkpoint."""
    return head.moment.order if head is not None and head.state is SlotState.SEALED else (-1, -1, -1)
