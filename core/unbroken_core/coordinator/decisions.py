"""What the deciders want done. The resolver does it, one decision at a time, and asks again until one waits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

from unbroken_core.coordinator.state.job import PreviousWorld, StatusText
from unbroken_core.coordinator.state.phases import AnyPhase, Consultation, Forming, Interrupted, Running
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.protocol.messages import Halt
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung


class Wait(NamedTuple):
    """Nothing is to be done before this time, or the next event. Each event ends in one: a tuple is made fastest."""

    until_s: float = math.inf
    report: StatusText | None = None
    """What the status says from now on; None: as before."""
    phase: AnyPhase | None = None
    """The same phase, with what was learned; None: as before."""
    rung: Rung | None = None
    """Rung that the wait belongs to, and that is paid for."""


@dataclass(frozen=True)
class Learn:
    """Something is known now that the next decision depends on."""

    phase: AnyPhase | None = None
    """None: as before, here and below."""
    previous: PreviousWorld | None = None
    report: StatusText | None = None


@dataclass(frozen=True)
class CutPlan:
    """Make the world that was asked for last the next iteration."""

    rung: Rung | None
    """None for the first plan of a job."""
    phase: AnyPhase
    order: Sequence[Worker] | None = None
    """Worker of each rank, where the script's code has said so; None: as the tree says."""


@dataclass(frozen=True)
class Ask:
    """Ask a worker which ranks its script gives, and wait for the answer."""

    question: Consultation
    phase: AnyPhase
    """With the question in it."""


@dataclass(frozen=True)
class Adopt:
    """Take the iteration over that the agents are in."""

    iteration: int
    world_size: int
    places: dict[int, Worker]
    """Worker of each rank that has come back."""
    is_ending: bool = False
    """Whether the training function had returned on all ranks: those that have not come back have ended well."""


@dataclass(frozen=True)
class BeginRunning:
    """All active workers have entered the iteration."""


@dataclass(frozen=True)
class NoteProgress:
    """All of them have made a step after the last recovery."""


@dataclass(frozen=True)
class TakeFaults:
    """End the iteration, or add to why it was ended."""

    faults: tuple[FaultRecord, ...]
    failed: tuple[tuple[Member, WorkerPlace], ...] = ()
    """Places whose processes are replaced, one for each fault; empty where none is."""


@dataclass(frozen=True)
class Replace:
    """Replace the processes of places."""

    places: tuple[tuple[Member, WorkerPlace], ...]
    phase: AnyPhase
    fault: FaultRecord | None = None
    """Belongs to the recovery that is under way."""
    is_renewal: bool = False
    """Whether it is because the same fault comes back."""


@dataclass(frozen=True)
class Name:
    """Name who hangs."""

    fault: FaultRecord
    phase: Interrupted
    places: tuple[tuple[Member, WorkerPlace], ...]
    """Those that are named, for which it counts as a fault."""


@dataclass(frozen=True)
class Believe:
    """These say that they are ready, and never were in the iteration."""

    places: tuple[tuple[Member, WorkerPlace], ...]
    phase: Interrupted


@dataclass(frozen=True)
class ReplaceAll:
    """Replace every process."""

    phase: Interrupted


@dataclass(frozen=True)
class Order:
    """Tell all active workers how far to go, and look again at who has done so."""

    halt: Halt
    phase: Running
    report: StatusText | None
    acquitted: tuple[str, ...] = ()
    """Pods that keep their ranks, although something was found of them."""


@dataclass(frozen=True)
class ReleaseAll:
    """Let the workers return from the wrapped function, and wait for the ends of their processes."""


@dataclass(frozen=True)
class EndJob:
    """End the job."""

    outcome: JobPhase
    reason: Reason
    message: str


Change = Union[CutPlan, Adopt, BeginRunning, TakeFaults, ReleaseAll, EndJob]
"""Ends the phase, or may."""
Deed = Union[Learn, Ask, NoteProgress, Replace, Name, Believe, ReplaceAll, Order]
"""Is done within the phase."""
Decision = Union[Wait, Change, Deed]
Consultable = Union[Forming, Interrupted]
"""Phases in which a script may be asked for ranks."""


def replace_late(places: Sequence[tuple[Member, WorkerPlace]], waited_s: float, now_s: float) -> TakeFaults:
    """Return what is done about workers that did not do in time what they were told."""
    detail = f"did not follow for {waited_s:.0f} s (timeouts.barrierSeconds); its process is replaced"
    faults = tuple(late_record(member, place, waited_s, now_s, detail) for member, place in places)
    return TakeFaults(faults, tuple(places))


def late_record(member: Member, place: WorkerPlace, waited_s: float, now_s: float, detail: str) -> FaultRecord:
    """Return the fault of a worker that did not do something in time."""
    state, began_s = place.state, now_s - waited_s
    return FaultRecord(
        Cause.HARD_TIMEOUT, member.uid, state.local_rank, began_s, waited_s, state.incarnation, detail=detail
    )


def at_latest(decision: Decision, until_s: float) -> Decision:
    """Return a decision that waits no longer than this, if it waits."""
    if not isinstance(decision, Wait) or decision.until_s <= until_s:
        return decision
    return Wait(until_s, decision.report, decision.phase, decision.rung)
