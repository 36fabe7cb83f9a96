"""Pure: the Events of a job. Each fact has one name, so that posting it again changes nothing."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api import layout
from unbroken_operator.decisions.reporting.condition_state import cut
from unbroken_operator.decisions.reporting.recovery_text import recovery_sentence
from unbroken_operator.decisions.snapshot import Snapshot

COMPONENT = "unbroken-operator"
MAX_MESSAGE = 1000

_WARNINGS = {
    ("Admitted", "False"),
    ("PodsReady", "False"),
    ("TopologyKnown", "False"),
    ("Degraded", "True"),
    ("SparesExhausted", "True"),
    ("NodesHealthy", "False"),
    ("Straggling", "True"),
    ("RestartStorm", "True"),
    ("NoProgress", "True"),
    ("Failed", "True"),
    ("Throttled", "True"),
}
_ADVICE = {("SparesSpread", "False")}
"""Nothing is wrong, and something could be better."""
_GOOD_NEWS = ("Complete", "Suspended")
_ORDINARY_WAITS = (
    Reason.WAITING_FOR_PODS.value,
    Reason.WAITING_FOR_RENDEZVOUS.value,
    Reason.PODS_GATED.value,
    Reason.SUSPENDED.value,
)


def events(snapshot: Snapshot, status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the Events that the step from the stored status to this one deserves."""
    yield from _recovery_events(snapshot)
    before = {item["type"]: item for item in snapshot.status.get("conditions") or ()}
    for condition in status["conditions"]:
        stored = before.get(condition["type"], {})
        is_new = (stored.get("status"), stored.get("reason")) != (condition["status"], condition["reason"])
        is_changed_spec = (
            condition["reason"] == Reason.INVALID_SPEC.value and stored.get("message") != condition["message"]
        )
        if (is_new or is_changed_spec) and _is_notable(condition, stored):
            sign = (condition["type"], condition["status"])
            kind = "Normal" if condition["type"] in _GOOD_NEWS or sign in _ADVICE else "Warning"
            key = (condition["type"], condition["reason"], condition["observedGeneration"], _moment(stored))
            yield event(snapshot, key, condition["reason"], kind, condition["message"])


def _is_notable(condition: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    sign = (condition["type"], condition["status"])
    if condition["type"] == "Suspended":
        return True
    if condition["type"] == "Running" and condition["reason"] == Reason.REPORT_REFUSED.value:
        return True
    if sign == ("Running", "False") and condition["reason"] == Reason.BELOW_MINIMUM.value:
        return True
    if condition["reason"] in _ORDINARY_WAITS:
        return False
    if condition["type"] == "SparesExhausted" and stored.get("reason") in (None, Reason.SUSPENDED.value):
        # Right after the start, or the next one, the spares are on their way: no Event for that.
        return False
    return sign in _WARNINGS or sign in _ADVICE or sign == ("Complete", "True")


def _moment(stored: Mapping[str, Any]) -> str:
    return f"{stored.get('lastTransitionTime', '')}/{stored.get('reason', '')}"


def _recovery_events(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    report = snapshot.report
    if report is None:
        return
    recorded = {(item["term"], item["number"]) for item in snapshot.status.get("history") or () if item.get("endedAt")}
    for recovery in report.recoveries:
        # Without its beginning it is never recorded, and would be news for ever.
        if recovery.started_at and recovery.ended_at and (report.term, recovery.number) not in recorded:
            key = ("recovery", report.term, recovery.number)
            manifest = event(snapshot, key, Reason.RECOVERED.value, "Normal", recovery_sentence(recovery))
            # One whose times are no times never gets into the history.
            if manifest["metadata"]["name"] not in snapshot.memory.posted:
                yield manifest


def event(snapshot: Snapshot, key: tuple[Any, ...], reason: str, kind: str, message: str) -> dict[str, Any]:
    """Return an Event of the job. `key` names the fact, `kind` is Normal or Warning."""
    metadata = snapshot.job["metadata"]
    digest = hashlib.sha256("/".join(map(str, (snapshot.uid, *key))).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{snapshot.name}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": layout.API_VERSION,
            "kind": layout.KIND,
            "name": snapshot.name,
            "namespace": metadata["namespace"],
            "uid": snapshot.uid,
        },
        "reason": reason,
        "message": cut(message, MAX_MESSAGE),
        "type": kind,
        "count": 1,
        "firstTimestamp": snapshot.now,
        "lastTimestamp": snapshot.now,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": "",
    }
