"""What training loops use: load once an iteration, save after steps."""

import logging
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import StackSummary
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from unbroken.memory.agreement import AskedOptions, agreed_every, all_true
from unbroken.memory.arena import Saved, Skipped, WorkerSlots, arena_of, checked_step, checked_timeout
from unbroken.memory.background.epochs import read_mark
from unbroken.memory.background.handover import DiskSettings, Handover
from unbroken.memory.disk import DcpFolder, Disk, common_steps, in_short
from unbroken.memory.job_disk import KEEP, JobDisk, agreed_job_disk, checked_folder
from unbroken.memory.new_state.nested import UnlikeStateError
from unbroken.memory.place import WorkerInfo, read_every, read_place
from unbroken.memory.recording import recorder
from unbroken.memory.restoring import Restoration, apply, tell_of_loaders
from unbroken.memory.shard import Shard, ShardReader, refuse_no_state
from unbroken.standstill import standstill
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.vocabulary.checkpoints import Load, LoadSource, Restore
from unbroken_core.vocabulary.plurals import counted

logger = logging.getLogger(__name__)


class NoCheckpointError(CheckpointException, RuntimeError):
    """What is on the disk cannot be restored. torch's own type alone is no Exception: each process would end by it."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnlikeCheckpointError(NoCheckpointError):
    """All checkpoints on the disk are of another state than the one given to `load`: no restart mends that."""


class Checkpointer:
    """Checkpoints of this rank's part of a state, in memory that outlives the training process.

    `state` is a dictionary of tensors, DTensors and objects with `state_dict` and `load_state_dict`, the same on all
    ranks. Make one in each iteration, inside the wrapped function, and call it in the main thread.

    Args:
        every: `save` saves steps that this divides, and skips all others. None: as `spec.memory.every` says, else 1.
        disk: folder with ordinary checkpoints of torch.distributed.checkpoint named `step-N`, to fall back to, or
            what finds and loads checkpoints of another format (`unbroken.memory.disk.Disk`). None: as
            `spec.memory.disk` says, with how often and how many; else there is none.
        disk_every: so many steps after the last one, a checkpoint is written to `disk`, a folder then, in the
            background: an ordinary one of torch.distributed.checkpoint. None: you write them.
        disk_keep: so many of those that were written so stay, the newest ones. Others are never removed.

    Raises ValueError when a number is not from 1 on, `disk` is neither of these or no path, or `disk_every` has no
    folder.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        disk: str | Path | Disk | None = None,
        disk_every: int | None = None,
        disk_keep: int = KEEP,
    ) -> None:
        self._every = _from_one("every", read_every() if every is None else every)
        if disk is not None and not isinstance(disk, str | Path | Disk):
            raise ValueError(f"disk: want a folder, or an object with `steps` and `load`, got {disk!r}")
        folder = checked_folder("disk", disk) if isinstance(disk, str | Path) else None
        self._disk = disk if isinstance(disk, Disk) else None if folder is None else DcpFolder(folder)
        self._handover: Handover | None = None
        self._is_of_job = disk is None
        """Whether the job says where the disk is; all ranks agree on it in `load`."""
        self._job_disk: JobDisk | None = None
        keep = _from_one("disk_keep", disk_keep, "checkpoints")
        if disk_every is not None:
            if folder is None:
                raise ValueError(f"disk_every: want a folder in `disk` to write to, got {disk!r}")
            self._handover = Handover(DiskSettings(folder, _from_one("disk_every", disk_every), keep, self._every))
        self._asked = AskedOptions(
            2 if isinstance(disk, Disk) else int(disk is not None), zlib.crc32(str(folder or "").encode()),
            min(disk_every or 0, MAX_NUMBER), min(keep, MAX_NUMBER) if disk_every else 0,
            min(self._every, MAX_NUMBER), int(every is not None),
        )  # fmt: skip
        self._reader = ShardReader()
        self._place: WorkerInfo | None = None
        self._told: set[str] = set()
        self.num_skipped = 0
        """How many saves that were due were not made."""

    def reserve(self, state: MutableMapping[str, Any]) -> str:
        """Have memory for checkpoints of this state before the first save; return why there is none, "" if there is.

        It waits until the memory is mapped. Without it the first save does all this.
        """
        refuse_no_state("reserve", state)
        arena = self._enter()
        if arena is None:
            return _NO_JOB
        problem = arena.reserve(self._reader.read(state))
        if problem:
            self._tell(problem)
        else:
            arena.wait_until_populated()
        return problem

    def save(self, state: MutableMapping[str, Any], step: int) -> Saved | Skipped:
        """Copy this rank's part of the state into memory, after step number `step`. Waits for nobody.

        Raises TypeError for what could not be loaded again, ValueError for a step below 0, and for another state than
        that which another Checkpointer has saved in this iteration.
        """
        refuse_no_state("save", state)
        _progress.newest_step = checked_step(step)
        if (noting := recorder()) is not None:
            noting.before(read_place(), step)
        if step % self._every:
            return Skipped(step, f"not due: every {self._every} steps")
        with standstill.measured():
            return self._save(state, step)

    def _save(self, state: MutableMapping[str, Any], step: int) -> Saved | Skipped:
        is_for_disk = False
        if self._handover is not None:
            self._handover.catch_up()
            is_for_disk = self._handover.is_due(step)
        arena = self._enter()
        if arena is None or self._place is None:
            return self._skip(step, _NO_JOB)
        result = arena.write(self._place, step, self._read(arena, self._place, state))
        if isinstance(result, Skipped):
            if self._handover is not None and is_for_disk:
                self._handover.skipped()
            return self._skip(step, result.reason)
        if self._handover is not None and is_for_disk:
            self._offer(self._handover, self._place, arena, step)
        return result

    def flush(
        self, state: MutableMapping[str, Any] | None = None, step: int | None = None, timeout_s: float = 600.0
    ) -> bool:
        """Wait until the newest checkpoint that was due is whole on the disk; return whether it is.

        With a state and its step, write these now, whether they are due or not, and wait for them. If the step is in
        memory already, it is written as it is there.

        All ranks of the default group call it together, for the same step, at the end of the training or before its
        pods go: what is not whole when a rank's process ends may never be.

        Without `disk_every` nothing is ever due: then a state is not written, which the log says, and this returns
        False. An exception at the end of a training would only repeat its last steps.

        Raises ValueError for a step below 0, a state without a step, or no time to wait; TypeError for what could not
        be loaded again, once all ranks have ended their wait.
        """
        limit_s = checked_timeout(timeout_s)
        with standstill.measured():
            return self._flush(state, step, limit_s)

    def _flush(self, state: MutableMapping[str, Any] | None, step: int | None, timeout_s: float) -> bool:
        if state is None and step is None:
            return self._handover is None or self._handover.wait(timeout_s)
        if not isinstance(state, MutableMapping):
            raise ValueError(f"flush: want a state with its step, or neither, got {type(state).__name__}")
        wanted = checked_step(step)
        if self._handover is None:
            logger.error(
                "flush: step %d is not written to the disk: want `disk_every` in the Checkpointer, or in the job's "
                "spec.memory.disk, and a load",
                wanted,
            )
            return False
        until_s = time.monotonic() + timeout_s
        self._handover.demand(wanted)
        failure: Exception | None = None
        try:
            self._write_now(self._handover, state, wanted, until_s)
        except Exception as error:  # All others wait for this rank.
            failure = error
        is_whole = self._handover.wait(until_s - time.monotonic())
        if failure is not None:
            raise failure
        return is_whole

    def _write_now(self, handover: Handover, state: MutableMapping[str, Any], step: int, until_s: float) -> None:
        """Save a state in memory, unless it is there, and order that it is written."""
        _progress.newest_step = step
        arena = self._enter()
        if arena is None or self._place is None:
            self._skip(step, _NO_JOB)
            return
        shard = self._read(arena, self._place, state)
        if not arena.has(self._place, step):
            handover.let_go()
            result = arena.write(self._place, step, shard, until_s - time.monotonic())
            if isinstance(result, Skipped):
                self._skip(step, result.reason)
                return
        if not handover.is_ordered(step):
            self._offer(handover, self._place, arena, step)

    def _offer(self, handover: Handover, place: WorkerInfo, arena: WorkerSlots, step: int) -> None:
        """Have what this iteration has saved written to the disk."""
        problem = handover.offer(place, arena, Moment(place.term, place.iteration, step), self._reader.names)
        if problem:
            logger.warning("not written to the disk: %s", problem)

    def load(self, state: MutableMapping[str, Any]) -> int | None:
        """Bring the state back to the newest step that every rank can read; return it, None when there is none.

        All ranks of the default group call it together, with their state as it is in a new process. They agree on one
        step; if any rank cannot read it, all take an older one, in memory or on the disk. Raises NoCheckpointError, a
        CheckpointException and a RuntimeError, when none on the disk can be read or fits the state, or some rank does
        not see what others do, KeeperAwayError when memory has one and the pod's keeper does not answer: to begin anew
        would lose all of them.
        """
        began_s = time.monotonic()
        source, moment, on_disk = self._load(state)
        step = None if moment is None else moment.step
        if (arena := self._enter()) is not None:
            arena.measured(source, time.monotonic() - began_s, _steps_redone(step))
        if self._place is not None and (noting := recorder()) is not None:
            noting.loaded(self._place, source, step)
        _progress.newest_step = -1 if step is None else step
        if self._handover is not None:
            is_behind = self._handover.loaded(step, on_disk)
            told = self._handover.told()
            if is_behind and moment is not None:
                self._write_restored(self._handover, arena, state, moment)
            if arena is not None and told is not None:
                arena.written(told)
        return step

    def _write_restored(
        self, handover: Handover, arena: WorkerSlots | None, state: MutableMapping[str, Any], moment: Moment
    ) -> None:
        """Order that what all ranks went back to is written: a fault came before the disk had it. A collective of all.

        From the slots, and only if each rank has its own part there: a step has one content, and a save of it in this
        iteration would hide from the rendezvous how often the training fails after it.
        """
        place, shard = read_place(), self._reader.read(state)
        # A new process has not mapped them yet.
        has_part = arena is not None and not arena.reserve(shard) and arena.has_part(place, moment)
        if all_true(has_part) and arena is not None:
            problem = handover.offer(place, arena, moment, self._reader.names)
        elif place.rank == 0:
            problem = (
                f"step {moment.step}: not all ranks have their own parts of it in memory; a later save is, or `flush` "
                "with the state and its step"
            )
        else:
            problem = ""
        if problem:
            logger.warning("not written to the disk: %s", problem)

    def _load(self, state: MutableMapping[str, Any]) -> tuple[str, Moment | None, int]:
        """Return where the state came from, which one it is, and the newest step up to it on the disk, -1 for none."""
        refuse_no_state("load", state)
        arena = self._enter()
        place = self._place or read_place()
        self._every = agreed_every(self._asked)
        if self._is_of_job:
            self._take_job_disk()
        if self._handover is not None:
            self._handover.saved_every(self._every)
            try:
                self._handover.begin(place)
            except OSError as error:
                logger.error("no checkpoints are written to the disk: %s", error)
        seen = common_steps(self._disk, _given_up(self._disk, place.restore), self._is_foreign)
        # Without those that could not be read, also for `seen.oldest`.
        steps = seen.steps
        problems: list[tuple[int, CheckpointException]] = []
        refused: list[tuple[int, str]] = []
        while True:
            restoration = Restoration(arena, place)
            restored = self._from_memory(restoration, arena, state, seen.oldest, refused)
            if restored is not None:
                return "memory", restored, max((step for step in steps if step <= restored.step), default=-1)
            if problems and not steps:
                raise _none_left(problems, self._disk)  # The state may be half loaded.
            if seen.problem and not steps:
                raise _not_seen(f"{seen.problem}; to begin anew would lose what is there", place.rank)
            if self._disk is None or not steps:
                restoration.tell_anew(_progress.newest_step, is_disk=self._disk is not None)
                _tell_keeper(arena, restoration.load(LoadSource.NOTHING))
                return "nothing", None, -1
            step, problem = steps[0], self._from_disk(self._disk, state, steps.pop(0))
            if problem is None:
                moment = _moment(self._disk, step)
                _tell_keeper(arena, restoration.load(LoadSource.DISK, moment, refused))
                return "disk", moment, step
            problems.append((step, problem))
            refused.append((step, f"on the disk: {in_short(problem)}"))

    def _is_foreign(self, step: int) -> bool:
        """Return whether a step on the disk is that of a job which has begun in this one's folder."""
        intruder = "" if self._handover is None else self._handover.intruder
        mark = read_mark(self._disk.path(step)) if intruder and isinstance(self._disk, DcpFolder) else None
        return mark is not None and mark.get("job") == intruder

    def _from_memory(
        self,
        restoration: Restoration,
        arena: WorkerSlots | None,
        state: MutableMapping[str, Any],
        oldest: int | None,
        refused: Sequence[tuple[int, str]],
    ) -> Moment | None:
        """Take the newest in memory, unless its step is older than this one; return it, None when there is none.

        `refused`: what on the disk cannot be read, and why.
        """
        try:
            chosen = restoration.choose(state, oldest)
            if chosen is None:
                return None
            apply(chosen, state)
            for name, value in chosen.values.items():
                if not hasattr(state[name], "load_state_dict"):
                    state[name] = value
        finally:
            # First: who unmaps a file last that the keeper has given up waits until its pages are free.
            restoration.close()
        _tell_keeper(arena, restoration.load(LoadSource.MEMORY, chosen.moment, refused_on_disk=refused))
        return chosen.moment

    def _from_disk(self, disk: Disk, state: MutableMapping[str, Any], step: int) -> CheckpointException | None:
        """Load one on all ranks together; return why it cannot be read, None when all is well."""
        problem = None
        try:
            disk.load(state, step)
        except CheckpointException as error:
            problem = _without_frames(error)
        if all_true(problem is None):
            world_size = _mark(disk, step).get("world_size")
            if _is_count(world_size):
                tell_of_loaders(state, step, world_size, read_place())
            return None
        return problem or CheckpointException(f"step {step} cannot be read by another rank", {})

    def _take_job_disk(self) -> None:
        """Read and write where the job says. A collective of all ranks."""
        told = agreed_job_disk()
        if told == self._job_disk:
            return
        self._job_disk, self._disk, self._handover = told, None, None
        if told is not None:
            self._disk = DcpFolder(told.folder)
            if told.every is not None:
                self._handover = Handover(DiskSettings(told.folder, told.every, told.keep, self._every))

    def _enter(self) -> WorkerSlots | None:
        place = read_place()
        if place != self._place:
            # Offsets and meshes belong to one iteration.
            self._place, self._reader = place, ShardReader()
        return arena_of(place)

    def _read(self, arena: WorkerSlots, place: WorkerInfo, state: MutableMapping[str, Any]) -> Shard:
        """Return this rank's part. Raises TypeError, and ValueError where another one saves another state.

        A step has one state, so the other would be lost. One that is refused counts for none.
        """
        before = _saved.get(arena)
        if before is not None and before.place == place and before.by() is not self and before.differs(state):
            raise ValueError(
                f"save: want the state that another Checkpointer saves in this iteration, of "
                f"{_in_words(before.names)}, got another one, of {_in_words(state)}; "
                "checkpoints in memory are known by their step alone: put all of it into one state"
            )
        shard = self._reader.read(state)
        if before is None or before.place != place or before.names != set(state):
            kept = {name: weakref.ref(one) for name, one in state.items() if isinstance(one, nn.Module | Optimizer)}
            _saved[arena] = _SavedState(place, weakref.ref(self), frozenset(state), kept)
        return shard

    def _skip(self, step: int, reason: str) -> Skipped:
        self.num_skipped += 1
        self._tell(reason)
        return Skipped(step, reason)

    def _tell(self, problem: str) -> None:
        """Log each problem once: it may come back at every step."""
        if problem not in self._told and len(self._told) < 100:
            self._told.add(problem)
            logger.warning("not saved in memory: %s", problem)


def _without_frames(error: CheckpointException) -> CheckpointException:
    """Return it without the frames that it came through: while they are there, they hold the process group."""
    causes = {rank: (cause.with_traceback(None), words) for rank, (cause, words) in error.failures.items()}
    return CheckpointException(str(error.args[0]) if error.args else "load", causes)


def _moment(disk: Disk, step: int) -> Moment:
    """Return which checkpoint one on the disk is, as far as it says that."""
    mark = _mark(disk, step)
    term, iteration = mark.get("term"), mark.get("iteration")
    if _is_count(term) and _is_count(iteration):
        return Moment(term, iteration, step)
    return Moment(0, -1, step)


def _mark(disk: Disk, step: int) -> Mapping[str, Any]:
    """Return what one that was written in the background says of itself; nothing of others."""
    return (read_mark(disk.path(step)) if isinstance(disk, DcpFolder) else None) or {}


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


def _given_up(disk: Disk | None, restore: Restore | None) -> set[int]:
    """Return the steps on the disk that are those in memory after which the training has failed again and again."""
    found = set()
    for iteration, term, step, _world_size in () if restore is None else restore.given_up:
        mark = read_mark(disk.path(step)) if isinstance(disk, DcpFolder) else None
        # Who has written one without a mark is not known.
        if mark is None or (mark.get("iteration"), mark.get("term")) == (iteration, term):
            found.add(step)
    return found


def _none_left(problems: Sequence[tuple[int, CheckpointException]], disk: object) -> NoCheckpointError:
    """Return what to raise where none of these steps on the disk, the newest first, can be read."""
    where = f" in {disk.folder}" if isinstance(disk, DcpFolder) else ""
    (newest, problem), *older = problems
    more = f"; nor can {counted(len(older), 'older one')}" if older else ""
    causes = [cause for _, one in problems for cause, _frames in one.failures.values()]
    is_unlike = all(one.failures for _, one in problems) and all(isinstance(one, UnlikeStateError) for one in causes)
    which, why = f"the checkpoint of step {newest}{where}", f"{in_short(problem)}{more}"
    if is_unlike:
        return UnlikeCheckpointError(f"{which} is of another state: {why}; {_WANT_SAVED_STATE}", problem.failures)
    return NoCheckpointError(f"{which} cannot be read: {why}; to begin anew would lose what is there", problem.failures)


def _not_seen(why: str, rank: int) -> NoCheckpointError:
    return NoCheckpointError(why, {rank: (OSError(why), StackSummary())})


def _in_words(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))[:200] or "nothing"


def _from_one(name: str, value: int, what: str = "steps") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: want a number of {what} from 1 on, got {value!r}")
    return value


def _tell_keeper(arena: WorkerSlots | None, load: Load) -> None:
    if arena is not None and not arena.loaded(replace(load, reached=_progress.newest_step)):
        logger.warning("the keeper does not know what was restored: %s, step %d", load.source, load.step)


class _Progress:
    """What this process knows of its training, over all iterations."""

    newest_step = -1


_progress = _Progress()


@dataclass(frozen=True)
class _SavedState:
    """What was saved first in an iteration."""

    place: WorkerInfo
    by: "weakref.ref[Checkpointer]"
    names: frozenset[str]
    objects: Mapping[str, "weakref.ref[nn.Module | Optimizer]"]

    def differs(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has other names, or other modules or optimizers by the same names."""
        kept = {name: one() for name, one in self.objects.items()}
        return self.names != set(state) or any(
            one is not None and isinstance(state[name], nn.Module | Optimizer) and state[name] is not one
            for name, one in kept.items()
        )


_saved: weakref.WeakKeyDictionary[WorkerSlots, _SavedState] = weakref.WeakKeyDictionary()


def _steps_redone(step: int | None) -> int:
    """Return how many steps this process makes again after a load; -1 when it has made none."""
    return -1 if _progress.newest_step < 0 else max(_progress.newest_step - (-1 if step is None else step), 0)


_WANT_SAVED_STATE = (
    "want a state with the names and sizes that were saved, or another folder; to add something to a trained state, "
    "load it once without that, and write all of it to the disk"
)
_NO_JOB = (
    "this process belongs to no job with memory for checkpoints: start it with `unbroken run --memory SIZE`, in "
    "standalone mode with UNBROKEN_MEMORY=SIZE, or give a ResilientTrainingJob a spec.memory.sizeLimit"
)
