"""The condition NodesHealthy: what the watches of the pods have found, and what they could not look at."""

from collections.abc import Iterator

from unbroken_core.findings import Verdict
from unbroken_core.messages import HealthStatus, JobStatus, PodFinding
from unbroken_core.plurals import counted
from unbroken_core.reasons import Reason
from unbroken_core.recovery.health import finding_text
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.reporting.finding import Finding, cut, listed
from unbroken_operator.decisions.snapshot import Snapshot

_SHOWN = 3
_FAULTS = (Verdict.SUSPECT, Verdict.FATAL)


def nodes_healthy(snapshot: Snapshot, report: JobStatus) -> Iterator[Finding]:
    """Say what was found, once a watch has said anything. What was not checked is never part of what is well."""
    health = report.health
    if health is None:
        if any(item["type"] == ConditionType.NODES_HEALTHY.value for item in snapshot.status.get("conditions") or ()):
            text = "no watch of a pod says anything: health.mode is Off, or they have yet to start"
            yield Finding(ConditionType.NODES_HEALTHY, None, Reason.HEALTH_NOT_CHECKED, text)
        return
    faults = [item for item in health.findings if item.finding.verdict in _FAULTS]
    worn = [item for item in health.findings if item.finding.verdict is Verdict.DEGRADED]
    unchecked = _unchecked(health)
    if faults:
        parts = [_shown(faults), health.held, unchecked]
        message = cut("; ".join(filter(None, parts)))
        yield Finding(ConditionType.NODES_HEALTHY, False, Reason.DEVICES_FAULTY, message)
        return
    parts = ["nothing broken was found", f"worn: {_shown(worn)}" if worn else "", unchecked]
    message = cut("; ".join(filter(None, parts)))
    yield Finding(ConditionType.NODES_HEALTHY, True, Reason.NODES_HEALTHY, message)


def _shown(found: list[PodFinding]) -> str:
    texts = [f"{item.pod} on node {item.node}: {finding_text(item.finding)}" for item in found[:_SHOWN]]
    rest = len(found) - _SHOWN
    return "; ".join(texts) + (f"; and {counted(rest, 'more finding')}" if rest > 0 else "")


def _unchecked(health: HealthStatus) -> str:
    names = [check for check, num_pods in health.unchecked if num_pods > 0]
    return f"not checked everywhere: {listed(names)}" if names else ""
