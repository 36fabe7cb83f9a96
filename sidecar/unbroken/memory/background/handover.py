"""The worker's side: orders its process to write a slot, and waits for nothing."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.memory.agreement import gather
from unbroken.memory.arena import LentSlot, WorkerSlots
from unbroken.memory.background.epochs import Epoch, Failure
from unbroken.memory.background.news import on_disk
from unbroken.memory.background.orders import WriteOrder
from unbroken.memory.background.writer_process import WriterProcess
from unbroken.memory.place import WorkerInfo
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.vocabulary.checkpoints import OnDisk
from unbroken_core.vocabulary.plurals import counted

logger = logging.getLogger(__name__)

Names = Mapping[str, Sequence[Any]]
_LOOK_S = 0.1
_MOST_ORDERED = 64
_QUICK_S, _MOST_QUICK = 60.0, 3
_KEEP_S = 5.0
"""How long a slot is not written that waits for its process, as one whose process waits for other ranks: those that are
quicker skip their saves meanwhile."""
_APART_S = _KEEP_S + 1.0
"""Longer than a slot is kept for ranks that write another step, with what they differ by."""
_MOST_APART = 1024
_LATE = "is not whole after"
_MOST_NAMED = 10
INTRUDED = "another job has begun in this folder since this one did; give each a folder of its own"


@dataclass(frozen=True)
class DiskSettings:
    """Where, how often and how many."""

    folder: Path
    every: int
    """Steps from one checkpoint to the next."""
    keep: int
    """Whole checkpoints that stay."""
    saved_every: int = 1
    """Only steps that this divides are saved."""

    @property
    def interval(self) -> int:
        """At most so many steps lie between two checkpoints."""
        return -(-self.every // self.saved_every) * self.saved_every


@dataclass(frozen=True)
class _Due:
    """A step that belongs on the disk."""

    place: WorkerInfo
    arena: WorkerSlots
    moment: Moment
    names: Names

    @property
    def step(self) -> int:
        return self.moment.step


class Handover:
    """Of one checkpointer, in one iteration."""

    def __init__(self, settings: DiskSettings) -> None:
        self._settings = settings
        self._epoch: Epoch | None = None
        self._begun: Epoch | None = None
        """The same, also where it could not begin, for this reason."""
        self._problem = ""
        self._newest = 0
        """The last step that was ordered; before that, the newest on the disk up to the one that was restored."""
        self._loaded: int | None = None
        """The step that all ranks went back to, -1 for none; None before they have."""
        self._newest_due = -1
        self._attempted = 0
        """The last step of which it was asked whether it is due."""
        self._num_attempts = 0
        self._began_s = 0.0
        """When that was first asked, on the monotonic clock."""
        self._skipped: int | None = None
        """The last step that was due and was not saved; None once one was."""
        self._due: _Due | None = None
        """What has not been ordered yet."""
        self._ordered: dict[int, WriterProcess] = {}
        """By step, who was ordered to write it."""
        self._reading: tuple[WriterProcess, _Due] | None = None
        """The last order, until this rank's part is on the disk."""
        self._rank = 0
        self.intruder = ""
        """Another job that has begun in the folder since this one did, as this rank sees it."""

    def saved_every(self, steps: int) -> None:
        """Only steps that this divides are saved."""
        self._settings = replace(self._settings, saved_every=steps)

    def begin(self, place: WorkerInfo) -> None:
        """Void what earlier iterations have not made whole, before anybody looks for it. A collective of all ranks.

        Raises OSError, on all ranks where one cannot.
        """
        self._epoch, self._due, self._ordered, self._reading = None, None, {}, None
        _Process.let_go()
        self._rank = place.rank
        self._newest, self._newest_due, self._loaded = 0, -1, None
        self._attempted, self._num_attempts, self._skipped = 0, 0, None
        job = hashlib.sha256(os.environ.get("TORCHELASTIC_RUN_ID", "").encode()).hexdigest()[:32]
        epoch = Epoch(self._settings.folder.absolute(), job, place.iteration, place.term, secrets.randbits(62))
        self.intruder = ""
        # A run that begins anew takes what is there, whoever has made it.
        if place.iteration > 0:
            with contextlib.suppress(OSError):
                self.intruder = epoch.intruder()
        rows = gather([[epoch.nonce, int(bool(self.intruder))]], 2)
        epoch = replace(epoch, nonce=rows[0][0][0])
        self._begun, self._problem = epoch, ""
        failure: OSError | None = None
        try:
            if any(is_seen for ((_nonce, is_seen),) in rows):
                raise OSError(INTRUDED)
            epoch.begin()
        except OSError as error:
            failure = error
        # Without one rank no step becomes whole: no other one keeps its slots for what that one never writes.
        numbers = gather([[-1 if failure is None else failure.errno or 0]], 1)
        failed = {rank: number for rank, ((number,),) in enumerate(numbers) if number >= 0}
        if failure is None and failed:
            rank, number = next(iter(failed.items()))
            failure = OSError(f"rank {rank} cannot write there: {os.strerror(number) if number else 'see its log'}")
            self._problem = str(failure)
        elif failure is not None:
            self._problem = f"rank {place.rank}: {failure}"
        if failure is not None:
            raise failure
        self._epoch = epoch
        # It takes a while to start, and a slot waits for it for a few seconds at most.
        _child()

    def loaded(self, step: int | None, on_disk: int) -> bool:
        """All ranks went back to this step; return whether it belongs on the disk, since one before it never got there.

        `on_disk`: the newest that all of them see there, up to this one; -1 for none.
        """
        self._loaded = -1 if step is None else step
        # What an earlier iteration was about to write is void now.
        self._newest = max(on_disk, 0)
        if step is None or step // self._settings.every <= self._newest // self._settings.every:
            return False
        self._newest_due = step
        return True

    def told(self) -> OnDisk | None:
        """Return what rank 0 tells of the disk at the beginning of an iteration; None on other ranks."""
        if self._begun is None or self._rank != 0:
            return None
        return on_disk(self._begun, self._settings.interval, problem=self._problem, at_most=self._loaded)

    def is_due(self, step: int) -> bool:
        """Return whether a step that is saved belongs on the disk: the first one in each interval that was saved.

        After one that was not saved, the first of so many saves that no rank is busy with one of its own any more:
        ranks that each took their next one would write different steps, and none would be whole, again and again.
        """
        before, self._attempted = self._attempted, step
        if not self._num_attempts:
            # What comes before the first save, such as a compilation, is not the pace of the others.
            self._began_s = time.monotonic()
        self._num_attempts += 1
        is_due = step // self._settings.every > self._newest // self._settings.every
        if is_due and step // self._settings.every > self._newest_due // self._settings.every:
            # Whether it can be tried or not: the one before it, which was skipped, is not what `wait` is to name.
            self._newest_due = step
        # Tried once more: all others write this one.
        if is_due and self._skipped not in (None, step):
            stretch = self._saves_apart() * self._settings.saved_every
            is_due = step // stretch > before // stretch
        if is_due:
            self._newest_due = step
        return is_due

    def skipped(self) -> None:
        """A step that was due is not in memory."""
        self._skipped = self._attempted

    def _saves_apart(self) -> int:
        """Return how many saves take longer than a slot is kept for other ranks: a power of two, so alike on most."""
        seconds = max(time.monotonic() - self._began_s, 0.0) / max(self._num_attempts - 1, 1)
        number = 1
        while number * seconds < _APART_S and number < _MOST_APART:
            number *= 2
        return number

    def offer(self, place: WorkerInfo, arena: WorkerSlots, moment: Moment, names: Names) -> str:
        """Order that a step which is in memory is written; return why it is not, "" if all is well.

        While the disk still takes the one before, the newest that is due waits for its turn: see `catch_up`.
        `moment`: the iteration that has saved it, and its step. `names`: where each name lies in the state's
        dictionaries.
        """
        epoch, step = self._epoch, moment.step
        self._newest, self._skipped = step, None
        if epoch is None and self._problem and _is_of(self._begun, place):
            return ""  # The log says why since the load.
        if epoch is None or not _is_of(epoch, place):
            return f"step {step}: `load` was not called at the beginning of this iteration"
        before, problem = self._due, ""
        if before is not None:
            problem = self._give_up(epoch, before, _why_late(step))
            child = _Process.child
            if child is not None and not child.has_started:
                # Once for all steps that come to be due before it has.
                problem, child.is_told = ("" if child.is_told else problem), True
        _Process.let_go()
        self._due = _Due(place, arena, moment, names)
        self.catch_up()
        if self._due is not None:
            _Process.keep(self._due)
        return problem

    def let_go(self) -> None:
        """Keep no slot that waits for its turn: a save is about to wait for one."""
        _Process.let_go()

    def demand(self, step: int) -> None:
        """A step belongs on the disk, whether it is due or not: `wait` waits for it."""
        self._newest_due = step

    def is_ordered(self, step: int) -> bool:
        """Return whether this iteration has ordered a step, or waits for its turn."""
        return step in self._ordered or (self._due is not None and self._due.step == step)

    def catch_up(self) -> None:
        """Order what could not be ordered before, if it is still in memory."""
        due, epoch = self._due, self._epoch
        if time.monotonic() > _Process.kept_until_s:
            _Process.let_go()
        if epoch is not None:
            self._tell_of_ended(epoch)
        if due is None or epoch is None:
            return
        descriptors: list[int] = []
        try:
            if not _child().is_free():
                return
            self._due = None
            lent = _Process.take(due) or due.arena.lend(due.moment)
            if lent is None:
                why = self._give_up(epoch, due, "it was not in memory any more when it could be written")
                logger.warning("not written to the disk: %s", why)
                return
            descriptors.append(lent.descriptor)
            descriptors.append(_file_of(due.names))
            child = _child()
            child.order(replace(self._order(epoch, due), path=str(lent.path), serial=lent.serial), descriptors)
            self._ordered[due.step], self._reading = child, (child, due)
            while len(self._ordered) > _MOST_ORDERED:
                del self._ordered[next(iter(self._ordered))]
        except OSError as error:
            logger.warning("not written to the disk: step %d: its process cannot be reached: %s", due.step, error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _tell_of_ended(self, epoch: Epoch) -> None:
        """Have the other ranks told if this one's process has ended while it read: they keep their slots until it has.

        They would skip their saves and this one not: soon no step in memory would be that of all.
        """
        if self._reading is None:
            return
        child, due = self._reading
        has_ended = not child.is_alive
        if child.has_taken():
            self._reading = None
        elif has_ended:
            self._reading = None
            why = self._give_up(epoch, due, "its process that writes to the disk has ended")
            logger.warning("not written to the disk: %s", why)

    def _order(self, epoch: Epoch, due: _Due) -> WriteOrder:
        """Return the order to write a step, without its slot."""
        settings, place = self._settings, due.place
        return WriteOrder(
            str(epoch.folder), epoch.job, epoch.term, epoch.iteration, epoch.nonce, due.step, place.rank,
            place.world_size, "", 0, settings.keep, settings.interval, self._loaded,
        )  # fmt: skip

    def _give_up(self, epoch: Epoch, due: _Due, reason: str) -> str:
        """Have the other ranks told that a step never becomes whole: they would keep their slots for it.

        Return what is to be logged here: the process that tells them says nothing of it.
        """
        try:
            _child().give_up(replace(self._order(epoch, due), given_up=reason))
        except OSError as error:
            logger.warning("other ranks are not told that step %d is given up: %s", due.step, error)
        return f"step {due.step}: {reason}"

    def wait(self, seconds: float) -> bool:
        """Wait until the newest step that was due is whole on the disk; return whether it is.

        A collective of all ranks, which return the same. If one could not order it to be written, they wait for the
        newest that all have ordered.
        """
        began_s = time.monotonic()
        until_s = began_s + seconds
        while self._due is not None and time.monotonic() < until_s:
            self.catch_up()
            time.sleep(_LOOK_S)
        rows = gather([[step] for step in (self._newest_due, *self._ordered)], 1)
        common = set.intersection(*({step for (step,) in row[1:]} for row in rows))
        all_due = [step for ((step,), *_) in rows]
        newest_due = max(all_due)
        if newest_due < 0:
            return True
        step = max(common, default=-1)
        problem = ""
        if min(all_due) != newest_due:
            last = min(all_due)
            where = f"is at step {last}" if last >= 0 else "has saved none that was due"
            problem = f"rank {all_due.index(last)} {where}"
        elif step != newest_due:
            lacking = [rank for rank, row in enumerate(rows) if [newest_due] not in row[1:]]
            problem = (
                f"rank {lacking[0]} did not save it in memory, or no longer had it when it could be written, or had "
                "skipped the one before, or has it from other pods alone"
            )
        if self._epoch is None:
            problem = self._problem or "`load` was not called at the beginning of this iteration"
        elif step >= 0:
            problem = self._wait_for(self._epoch, step, began_s, until_s) or problem
        # Their clocks and views of the folder differ; what one of them has seen whole is whole.
        is_whole = any(row == [[1]] for row in gather([[int(not problem)]], 1))
        if not is_whole:
            missing = "" if self._epoch is None or step < 0 else self._missing(self._epoch, step)
            logger.warning("step %d is not on the disk: %s%s", newest_due, problem, missing * (_LATE in problem))
        return is_whole

    def _missing(self, epoch: Epoch, step: int) -> str:
        """Return whose part of a step is not on the disk yet, in words. A collective of all ranks."""
        rows = gather([[int(epoch.has_part(step, self._rank))]], 1)
        lacking = [rank for rank, row in enumerate(rows) if row != [[1]]]
        if not lacking:
            return ", though all parts are on the disk: the process of rank 0 has to put them together"
        more = f" and {counted(len(lacking) - _MOST_NAMED, 'more rank')}" if len(lacking) > _MOST_NAMED else ""
        return f": want the part of rank {', '.join(map(str, lacking[:_MOST_NAMED]))}{more}"

    def _wait_for(self, epoch: Epoch, step: int, began_s: float, until_s: float) -> str:
        """Wait until a step is whole; return why it is not, "" if it is."""
        while not epoch.is_whole(step):
            failure = epoch.failure(step)
            if why_void := epoch.why_void():
                return why_void
            if failure is not None:
                return f"step {step} was given up by {failure}"
            if self._is_left(epoch, step):
                failure = Failure(self._rank, "its process that writes to the disk has ended")
                with contextlib.suppress(OSError):
                    epoch.fail(step, failure)
                return f"step {step} was given up by {failure}"
            if time.monotonic() > until_s:
                return f"step {step} {_LATE} {time.monotonic() - began_s:.0f} s"
            time.sleep(_LOOK_S)
        return ""

    def _is_left(self, epoch: Epoch, step: int) -> bool:
        """Whether this rank's process has ended, and left something of a step undone."""
        child = _Process.child
        if self._rank == 0 and (child is None or not child.is_alive):
            return not epoch.is_whole(step)
        return not self._ordered[step].is_alive and not epoch.has_part(step, self._rank)


class _Process:
    """What this process has started."""

    child: WriterProcess | None = None
    num_quick = 0
    """Children in a row that ended soon after their start."""
    kept: tuple[_Due, LentSlot] | None = None
    """The slot that waits for its turn, locked."""
    kept_until_s = 0.0

    @classmethod
    def keep(cls, due: _Due) -> None:
        """Have a slot stay as it is for a while."""
        cls.let_go()
        with contextlib.suppress(OSError):
            lent = due.arena.lend(due.moment)
            cls.kept, cls.kept_until_s = None if lent is None else (due, lent), time.monotonic() + _KEEP_S

    @classmethod
    def take(cls, due: _Due) -> LentSlot | None:
        """Return the slot if it is kept: it is the caller's now."""
        if cls.kept is None or cls.kept[0] is not due:
            return None
        _, lent = cls.kept
        cls.kept = None
        return lent

    @classmethod
    def let_go(cls) -> None:
        """Let what is kept be written again."""
        if cls.kept is not None:
            # Who was forked by other means meanwhile has the same lock.
            fcntl.flock(cls.kept[1].descriptor, fcntl.LOCK_UN)
            cls.forget()

    @classmethod
    def forget(cls) -> None:
        """Close what is kept; a process that was forked does so at once, or it would have the lock for as long."""
        if cls.kept is not None:
            os.close(cls.kept[1].descriptor)
            cls.kept = None


os.register_at_fork(after_in_child=_Process.forget)


def _child() -> WriterProcess:
    """Return this process' child; start one where there is none. Raises OSError.

    Where it ends again and again, that is not tried at each save: one that has ended is returned.
    """
    child = _Process.child
    if child is None or not child.is_alive:
        age_s = _QUICK_S if child is None or child.owner != os.getpid() else time.monotonic() - child.started_s
        _Process.num_quick = _Process.num_quick + 1 if age_s < _QUICK_S else 0
        if child is not None and _Process.num_quick > _MOST_QUICK and age_s < _QUICK_S:
            return child
        if child is not None and child.owner == os.getpid():
            child.close()
        child = _Process.child = WriterProcess()
    return child


def _why_late(step: int) -> str:
    """Return why the process of this rank has not taken what was due before this step."""
    child = _Process.child
    if child is not None and not child.has_started:
        return f"the process that writes to the disk had not started yet when step {step} was due"
    return "the disk, or another rank, takes longer than `disk_every`"


def _is_of(epoch: Epoch | None, place: WorkerInfo) -> bool:
    return epoch is not None and (epoch.iteration, epoch.term) == (place.iteration, place.term)


def _file_of(names: Mapping[str, Sequence[Any]]) -> int:
    """Return a file in memory with the names. Raises OSError."""
    descriptor = os.memfd_create("unbroken-names", os.MFD_CLOEXEC)
    try:
        content = memoryview(json.dumps(names, default=str).encode())
        while content:
            content = content[os.write(descriptor, content) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
