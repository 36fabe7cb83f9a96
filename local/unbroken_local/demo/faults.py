"""The six faults: whom each one hits, and when the job has recovered from it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from unbroken_core.protocol.messages import Recovery
from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_core.vocabulary.reasons import Cause, Phase, Rung
from unbroken_local.demo.snapshot import Snapshot
from unbroken_local.kube import Json


class FaultKind(Enum):
    """What goes wrong, in the order in which the demonstration does it."""

    RAISE = "rank raises"
    KILL = "worker SIGKILLed"
    HANG = "rank hangs, GIL held"
    DELETE_POD = "pod deleted"
    NODE_DOWN = "node goes down"
    NO_OPERATOR = "SIGKILL, operator down"


@dataclass(frozen=True)
class Victim:
    """Whom a fault hits."""

    pod: str
    pod_uid: str
    node: str
    rank: int
    local_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.pod} on {self.node}"


@dataclass(frozen=True)
class Expectation:
    """What a recovery must look like to count as the answer to a fault."""

    causes: frozenset[Cause]
    rungs: frozenset[Rung]


class NoVictimError(UnbrokenError):
    """No pod fits the fault at this moment."""


_POD_LOST = frozenset({Cause.POD_LEAVING, Cause.POD_LOST, Cause.HEARTBEAT_LOST, Cause.NODE_LOST})
EXPECTED: Mapping[FaultKind, Expectation] = {
    FaultKind.RAISE: Expectation(frozenset({Cause.EXCEPTION}), frozenset({Rung.IN_PROCESS})),
    FaultKind.KILL: Expectation(frozenset({Cause.PROCESS_SIGNAL}), frozenset({Rung.POD})),
    FaultKind.HANG: Expectation(
        frozenset({Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT, Cause.PROCESS_SIGNAL}), frozenset({Rung.POD})
    ),
    FaultKind.DELETE_POD: Expectation(_POD_LOST, frozenset({Rung.POD})),
    # Its processes end one after the other: an agent may still report its launcher's end, and that repairs it as well.
    FaultKind.NODE_DOWN: Expectation(_POD_LOST | {Cause.PROCESS_SIGNAL}, frozenset({Rung.POD})),
    FaultKind.NO_OPERATOR: Expectation(frozenset({Cause.PROCESS_SIGNAL}), frozenset({Rung.POD})),
}

_POSITION: Mapping[FaultKind, int] = {
    FaultKind.RAISE: 1,
    FaultKind.KILL: 2,
    FaultKind.HANG: 3,
    FaultKind.DELETE_POD: 0,
    FaultKind.NODE_DOWN: -1,
    FaultKind.NO_OPERATOR: 1,
}
"""Which of the active pods each fault hits; different ones, rank 0's pod among them."""


def choose_victim(kind: FaultKind, snapshot: Snapshot) -> Victim:
    """Return whom to hit. Raises NoVictimError."""
    pods = list(snapshot.active_pods)
    if kind is FaultKind.NODE_DOWN:
        # The fault is a training pod's loss; a rendezvous on the same node would make it two faults.
        busy = {pod.node for pod in snapshot.pods if not pod.is_trainer}
        pods = [pod for pod in pods if pod.node not in busy]
    if not pods:
        raise NoVictimError(f"{kind.value}: want an active pod to hit, got none of {len(snapshot.pods)} pods")
    pod = pods[_POSITION[kind] % len(pods)]
    local_rank = len(pod.ranks) - 1
    return Victim(pod.name, pod.uid, pod.node, pod.ranks[local_rank], local_rank)


def newest_recovery(snapshot: Snapshot) -> tuple[int, int]:
    """Return term and number of the last recovery, running ones included; number 0 when there was none."""
    status = snapshot.status
    if status is None:
        return (0, 0)
    return (status.term, max((recovery.number for recovery in status.recoveries), default=0))


def recoveries_after(snapshot: Snapshot, mark: tuple[int, int]) -> tuple[Recovery, ...]:
    """Return the finished recoveries that began after `mark`, which newest_recovery gave."""
    status = snapshot.status
    if status is None:
        return ()
    first = mark[1] if status.term == mark[0] else 0
    return tuple(recovery for recovery in snapshot.finished_recoveries if recovery.number > first)


def has_recovered(snapshot: Snapshot, mark: tuple[int, int]) -> bool:
    """Whether a recovery that began after `mark` is over: the job trains, and every rank has made a step."""
    recoveries = recoveries_after(snapshot, mark)
    return snapshot.is_training and bool(recoveries) and Phase.FIRST_PROGRESS.value in recoveries[-1].phase_s


def steps_lost(snapshot: Snapshot) -> int | None:
    """Return how many steps the job has made again since the last fault: the rendezvous' word.

    None before the ranks of the iteration in force have told what they went back to, and in a job without checkpoints
    in memory.
    """
    memory = None if snapshot.status is None else snapshot.status.memory
    return None if memory is None or not memory.source else memory.steps_redone


def deviations(kind: FaultKind, recoveries: tuple[Recovery, ...]) -> list[str]:
    """Return in which way the recoveries of one fault are not what it should lead to; empty when they are."""
    expected = EXPECTED[kind]
    found = []
    if len(recoveries) != 1:
        shown = ", ".join(f"{recovery.cause}/{recovery.rung}" for recovery in recoveries) or "none"
        found.append(f"{kind.value}: want one recovery, got {len(recoveries)} ({shown})")
    for recovery in recoveries[:1]:
        if recovery.cause not in expected.causes:
            found.append(f"{kind.value}: cause: want one of {_words(expected.causes)}, got {recovery.cause}")
        if recovery.rung not in expected.rungs:
            found.append(f"{kind.value}: rung: want {_words(expected.rungs)}, got {recovery.rung}")
    return found


def record_after(snapshot: Snapshot, mark: tuple[int, int]) -> Json | None:
    """Return the first finished recovery after `mark` in the job's status, as the operator wrote it, or None."""
    for record in snapshot.history:
        if (record.get("term", 0), record.get("number", 0)) > mark and record.get("endedAt"):
            return record
    return None


def _words(words: frozenset[Cause] | frozenset[Rung]) -> str:
    return ", ".join(sorted(word.value for word in words))
