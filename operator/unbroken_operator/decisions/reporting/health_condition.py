"""Two conditions: what the watches of the pods have found and could not look at, and which ranks hold all others up."""

from collections.abc import Iterator

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.recovery.health_words import Saying
from unbroken_core.recovery.health_words import nodes_healthy as say_nodes_healthy
from unbroken_core.recovery.health_words import straggling as say_straggling
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut
from unbroken_operator.decisions.snapshot import Snapshot


def nodes_healthy(snapshot: Snapshot, report: JobStatus) -> Iterator[ConditionState]:
    """Say what was found, once a watch has said anything."""
    yield from _condition(snapshot, ConditionType.NODES_HEALTHY, say_nodes_healthy(report.health))


def straggling(snapshot: Snapshot, report: JobStatus) -> Iterator[ConditionState]:
    """Say which ranks hold all others up, once workers have said how busy they are, or log rules what is slow."""
    yield from _condition(snapshot, ConditionType.STRAGGLING, say_straggling(report.health))


def _condition(snapshot: Snapshot, kind: ConditionType, said: Saying) -> Iterator[ConditionState]:
    # That nobody tells is news only of a job of which somebody told before.
    if said.is_true is not None or _is_stored(snapshot, kind):
        yield ConditionState(kind, said.is_true, said.reason, cut(said.message))


def _is_stored(snapshot: Snapshot, kind: ConditionType) -> bool:
    return any(item["type"] == kind.value for item in snapshot.status.get("conditions") or ())
