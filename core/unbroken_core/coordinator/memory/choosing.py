"""Which checkpoint a new world begins with. Pure: from what the table offers to one choice, the same for all ranks.

newest sealed step ──a shard has no reader──> lost: the next older, and the status says with whom
    │            ──failed twice at the same place──> given up: behind all others
    v
candidates, in order ──a rank cannot read the first──> all take the second ...
    └──none──> the disk, then a new beginning
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from unbroken_core.coordinator.memory.table import Checkpoints, StepKey
from unbroken_core.vocabulary.checkpoints import MAX_CANDIDATES, Load, LoadSource, MemoryStatus
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause

MAX_OFFERS = 16
ON_DISK = 0
"""In place of the size of its world, of which the disk says nothing."""
MAX_FAILURES = 32
BLAMED = frozenset(
    (
        Cause.EXCEPTION,
        Cause.BASE_EXCEPTION,
        Cause.LOG_RULE,
        Cause.SOFT_TIMEOUT,
        Cause.HARD_TIMEOUT,
        Cause.UNHEALTHY,
        Cause.PROCESS_EXIT,
        Cause.PROCESS_SIGNAL,
    )
)
"""Faults that a spoiled state explains. The loss of a pod is not among them."""


@dataclass(frozen=True)
class SavedStep:
    """One step that every rank had saved."""

    key: StepKey
    losses: str = ""
    """Which shards cannot be read by those who need them; "" when all can."""


@dataclass(frozen=True)
class Attempts:
    """How often the training failed after which step, before it had saved a newer one."""

    failures: tuple[tuple[StepKey, Cause], ...] = ()
    given_up: tuple[tuple[StepKey, str], ...] = ()

    def note(self, key: StepKey, cause: Cause | None, has_committed: bool) -> "Attempts":
        """Return what is known after another iteration that began with this step, and ended for this cause."""
        if has_committed:
            kept = tuple(failure for failure in self.failures if failure[0] != key)
            return replace(self, failures=kept)
        if cause not in BLAMED:
            return self
        times = [known for known in self.failures if known[0] == key]
        failures = (*self.failures, (key, cause))[-MAX_FAILURES:]
        if not times or times[-1][1] is not cause or any(key == known for known, _why in self.given_up):
            return replace(self, failures=failures)
        why = f"step {key.step} was restored twice and is given up: both times {cause}, and no newer step was saved"
        return replace(self, failures=failures, given_up=(*self.given_up, (key, why))[-MAX_FAILURES:])

    def why_given_up(self, key: StepKey) -> str:
        """Return why a step is to be avoided; "" when it is not."""
        return next((why for known, why in self.given_up if known == key), "")


@dataclass(frozen=True)
class Choice:
    """What all ranks go back to: the first that all can read."""

    keys: tuple[StepKey, ...] = ()
    given_up: tuple[StepKey, ...] = ()
    """Only where there is neither one of `keys` nor a disk."""
    reason: str = ""
    """Why it is not a newer one, or none."""
    floors: tuple[Load, ...] = ()
    avoided: tuple[StepKey, ...] = ()
    """All that was given up: ranks that find it shall not take it for something new."""


@dataclass(frozen=True)
class Recall:
    """What the iteration in force was told to begin with."""

    choice: Choice | None = None
    """None: not all agents tell what they hold, so that ranks find out among themselves."""
    attempts: Attempts = Attempts()
    max_step: int = -1
    """Highest step that any rank had told when the plan was cut."""
    is_known: bool = False
    """False: another rendezvous has cut the plan, and this one does not know what it said."""


def decide_restore(offers: Iterable[SavedStep], attempts: Attempts, floors: Iterable[Load] = ()) -> Choice:
    """Return the choice; `offers` are in any order."""
    keys: list[StepKey] = []
    given_up: list[StepKey] = []
    reason = ""
    for offer in sorted(offers, key=lambda one: one.key, reverse=True):
        why = f"step {offer.key.step}: {offer.losses}" if offer.losses else attempts.why_given_up(offer.key)
        if not why:
            keys.append(offer.key)
            continue
        if not keys:
            reason = reason or why
        if not offer.losses:
            given_up.append(offer.key)
    on_disk = [(key, why) for key, why in attempts.given_up if key.world_size == ON_DISK]
    if on_disk and not keys:
        reason = reason or max(on_disk)[1]
    # One place is kept for the last resort.
    num_last = min(len(given_up), 1)
    return Choice(
        tuple(keys[: MAX_CANDIDATES - num_last]),
        tuple(given_up[:num_last]),
        reason,
        tuple(replace(load, refused=()) for load in floors),
        tuple(key for key, _why in attempts.given_up),
    )


def offers_of(table: Checkpoints, seats: Mapping[int, str]) -> list[SavedStep]:
    """Return the newest steps that every rank had saved. `seats`: uid by rank of the new world."""
    keys = sorted(
        (key for key, step in table.steps.items() if step.was_sealed and not table.is_void(key)), reverse=True
    )
    found = []
    for key in keys[:MAX_OFFERS]:
        lacking = table.lacking(key, seats)
        found.append(SavedStep(key, table.losses(key, lacking) if lacking else ""))
    return found


@dataclass(frozen=True)
class Ended:
    """The iteration that a new world follows."""

    iteration: int
    cause: Cause | None
    """Why it ended; None: nothing had failed."""
    max_step: int


def recall(table: Checkpoints, before: Recall, ended: Ended, seats: Mapping[int, str]) -> Recall:
    """Return what a new world begins with. `seats`: uid by rank."""
    table.agree()
    attempts, load = before.attempts, table.loads.of(ended.iteration)
    if load is not None and load.source is LoadSource.DISK:
        tried_key = StepKey(load.of_iteration, load.of_term, load.step, ON_DISK)
        attempts = attempts.note(tried_key, ended.cause, table.has_committed(ended.iteration))
    elif load is not None and load.source is LoadSource.MEMORY:
        # Of worlds of two sizes with the same numbers only one can be.
        tried = () if before.choice is None else (*before.choice.keys, *before.choice.given_up)
        for key in tried:
            if key[:3] == load.of_order:
                attempts = attempts.note(key, ended.cause, table.has_committed(ended.iteration))
    if not all(map(table.tells, set(seats.values()))):
        return Recall(None, attempts, ended.max_step, is_known=True)
    choice = decide_restore(offers_of(table, seats), attempts, table.loads.floors)
    if not (choice.keys or choice.reason or before.is_known):
        choice = replace(choice, reason=_why_none(table))
    return Recall(choice, attempts, ended.max_step, is_known=True)


def _why_none(table: Checkpoints) -> str:
    """Return what the newest step lacks where a new rendezvous knows of none that was whole; "" where there is none."""
    key = max((key for key, step in table.steps.items() if step.holders and not table.is_void(key)), default=None)
    if key is None:
        return ""
    num_lacking = key.world_size - len(table.steps[key].holders)
    return f"step {key.step}: no pod that is heard has {num_lacking} of its {counted(key.world_size, 'shard')}"


def _is_later(load: Load | None, choice: Choice) -> bool:
    """Return whether ranks found something that was saved after all that the plan names: then nothing was lost."""
    named = [key[:3] for key in (*choice.keys, *choice.given_up)]
    return load is not None and load.source is LoadSource.MEMORY and load.of_order not in named


def memory_status(table: Checkpoints, recalled: Recall, iteration: int) -> MemoryStatus:
    """Return what the status says of the memory while this iteration is in force."""
    complete = table.newest_complete()
    load, refused = table.loads.of(iteration), table.loads.refusal_of(iteration)
    choice = recalled.choice
    reason = "" if choice is None or _is_later(load, choice) else choice.reason
    if choice is None and load is not None and recalled.is_known:
        reason = "not all agents tell what their keepers have: ranks agreed among themselves"
    if refused is not None:
        step, why, pod = refused
        reason = f"step {step} could not be read by {pod}: {why}"
    status = MemoryStatus(
        complete_step=-1 if complete is None else complete.step,
        reason=(reason or table.lack_of_room(iteration))[:1000],
    )
    disk = table.disk.known
    if disk is not None:
        status = replace(status, disk_step=disk.step, disk_every=disk.every, disk_problem=disk.problem[:1000])
    if load is None:
        return status
    # Reports of steps come behind the steps; workers that are still there know.
    reached = table.loads.reached_before(iteration)
    redone = max(recalled.max_step - load.step, reached - load.step, 0)
    status = replace(status, restored_step=load.step, steps_redone=redone, source=load.source.value)
    return replace(status, is_redone_least=reached < 0 < iteration)
