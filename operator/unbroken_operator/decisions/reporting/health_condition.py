"""Two conditions: what the watches of the pods have found and could not look at, and which ranks hold all others up."""

from collections.abc import Iterator

from unbroken_core.protocol.messages import HealthStatus, JobStatus, PodFinding
from unbroken_core.recovery.health import finding_text
from unbroken_core.vocabulary.findings import LOG_LINES, STRAGGLERS, Verdict
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut, listed
from unbroken_operator.decisions.snapshot import Snapshot

_SHOWN = 3
_SLOW = (STRAGGLERS, LOG_LINES)
_FAULTS = (Verdict.SUSPECT, Verdict.FATAL)


def nodes_healthy(snapshot: Snapshot, report: JobStatus) -> Iterator[ConditionState]:
    """Say what was found, once a watch has said anything. What was not checked is never part of what is well."""
    health = report.health
    if health is None or not health.num_pods:
        if _is_stored(snapshot, ConditionType.NODES_HEALTHY):
            text = "no watch of a pod says anything: health.mode is Off, or they have yet to start"
            yield ConditionState(ConditionType.NODES_HEALTHY, None, Reason.HEALTH_NOT_CHECKED, text)
        return
    found = [item for item in health.findings if item.finding.check not in _SLOW]
    faults = [item for item in found if item.finding.verdict in _FAULTS]
    worn = [item for item in found if item.finding.verdict is Verdict.DEGRADED]
    unchecked = _unchecked(health)
    if faults:
        parts = [_shown(faults), health.held, unchecked]
        message = cut("; ".join(filter(None, parts)))
        yield ConditionState(ConditionType.NODES_HEALTHY, False, Reason.DEVICES_FAULTY, message)
        return
    parts = ["nothing broken was found", f"worn: {_shown(worn)}" if worn else "", unchecked]
    message = cut("; ".join(filter(None, parts)))
    yield ConditionState(ConditionType.NODES_HEALTHY, True, Reason.NODES_HEALTHY, message)


def straggling(snapshot: Snapshot, report: JobStatus) -> Iterator[ConditionState]:
    """Say which ranks hold all others up, once workers have said how busy they are, or log rules what is slow."""
    kind, health = ConditionType.STRAGGLING, report.health
    slow = [] if health is None else [item for item in health.findings if item.finding.check in _SLOW]
    if health is not None and slow:
        is_held = any(item.finding.verdict in _FAULTS for item in slow)
        message = "; ".join(filter(None, (_shown(slow), health.held if is_held else "")))
        yield ConditionState(kind, True, Reason.RANKS_SLOW, cut(message))
    elif health is not None and health.num_paced:
        message = f"no rank was busy longer than usual in its stage, of {counted(health.num_paced, 'rank')} in a window"
        yield ConditionState(kind, False, Reason.PACE_EVEN, message)
    elif _is_stored(snapshot, kind):
        text = (
            "no worker says how busy it is: the iteration is young, or the script cannot be measured (docs/health.md)"
        )
        yield ConditionState(kind, None, Reason.PACE_NOT_MEASURED, text)


def _is_stored(snapshot: Snapshot, kind: ConditionType) -> bool:
    return any(item["type"] == kind.value for item in snapshot.status.get("conditions") or ())


def _shown(found: list[PodFinding]) -> str:
    texts = [f"{item.pod} on node {item.node}: {finding_text(item.finding)}" for item in found[:_SHOWN]]
    rest = len(found) - _SHOWN
    return "; ".join(texts) + (f"; and {counted(rest, 'more finding')}" if rest > 0 else "")


def _unchecked(health: HealthStatus) -> str:
    names = [check for check, num_pods in health.unchecked if num_pods > 0]
    return f"not checked everywhere: {listed(names)}" if names else ""
