"""Pure: the memory of nodes on which pods of the job failed, and where new pods are not to run because of it.

It decays, so that a repaired node is used again. It is kept in the status, so that it outlives the operator.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from unbroken_core.protocol.messages import JobStatus, Recovery
from unbroken_core.vocabulary.reasons import Cause, Reason
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_SUSPECTS
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.objects.affinity import AvoidedNodes
from unbroken_operator.decisions.snapshot import PodView, Snapshot

HALF_LIFE_S = 1800.0
AVOIDED = 0.25
FORBIDDEN = 1.5
_PARDONED = 1.0
_FORGOTTEN = 0.05
_WEIGHTS = {
    Cause.NODE_LOST: 1.0,
    Cause.POD_LOST: 1.0,
    Cause.HEARTBEAT_LOST: 1.0,
    Cause.UNHEALTHY: 1.0,
    Cause.DEVICE_FAULT: 1.0,
    # Slow, out of memory, a crash in native code, a hang: the node as likely as the script.
    Cause.STRAGGLER: 0.5,
    Cause.PROCESS_SIGNAL: 0.5,
    Cause.HARD_TIMEOUT: 0.5,
}
"""Exceptions and exit codes come from the script, deletions from a person."""


def next_suspects(
    status: Mapping[str, Any], report: JobStatus, now: str, hosts: Container[str]
) -> list[dict[str, Any]]:
    """Return status.suspectNodes with the recoveries that have ended since the stored history was written.

    `hosts`: nodes on which the operator saw pods of the job run. Others count for nothing: a report comes from
    a tenant.
    """
    stored = {item["name"]: dict(item) for item in status.get("suspectNodes") or ()}
    recorded = {(item["term"], item["number"]) for item in status.get("history") or () if item.get("endedAt")}
    told = [item for item in report.recoveries if item.started_at and item.ended_at]
    fresh = [item for item in told if (report.term, item.number) not in recorded]
    blamed = [item for item in fresh if item.node in hosts and item.cause in _WEIGHTS]
    if not blamed:
        return list(stored.values())
    for recovery in blamed:
        before = stored.get(recovery.node)
        stored[recovery.node] = _record(recovery, before, now)
    kept = [item for item in stored.values() if score_now(item, now) >= _FORGOTTEN]
    return sorted(kept, key=lambda item: (-score_now(item, now), item["name"]))[:MAX_SUSPECTS]


def _record(recovery: Recovery, before: Mapping[str, Any] | None, now: str) -> dict[str, Any]:
    return {
        "name": recovery.node,
        "faults": (before["faults"] if before else 0) + 1,
        "score": round((score_now(before, now) if before else 0.0) + _WEIGHTS[recovery.cause], 3),
        "scoreTime": now,
    }


def score_now(item: Mapping[str, Any], now: str) -> float:
    """Return what is left of a node's score."""
    age_s = max(0.0, seconds_between(item["scoreTime"], now))
    return float(item["score"] * 0.5 ** (age_s / HALF_LIFE_S))


def pardoned(snapshot: Snapshot, pods: Iterable[PodView]) -> list[dict[str, Any]] | None:
    """Return status.suspectNodes without forbidden nodes, when a pod waits because of them; None when none does."""
    stored = snapshot.status.get("suspectNodes") or ()
    is_needed = any(
        pod.avoids and not pod.node and pod.problem is not None and pod.problem.reason is Reason.UNSCHEDULABLE
        for pod in pods
    )
    if not is_needed or all(score_now(item, snapshot.now) < FORBIDDEN for item in stored):
        return None
    return [
        {**item, "score": _PARDONED, "scoreTime": snapshot.now}
        if score_now(item, snapshot.now) >= FORBIDDEN
        else dict(item)
        for item in stored
    ]


def avoided_nodes(snapshot: Snapshot, node_selector: Mapping[str, str]) -> AvoidedNodes:
    """Return where new pods are not to run: nodes that just failed, and those that have done so again and again.

    Nothing is forbidden while no other node could take a pod: then a bad node is better than none.
    """
    scores = {item["name"]: score_now(item, snapshot.now) for item in snapshot.status.get("suspectNodes") or ()}
    bad = sorted(name for name, score in scores.items() if score >= FORBIDDEN and name in snapshot.nodes)
    has_others = bool(bad) and any(
        node.is_ready
        and not node.is_cordoned
        and node.name not in bad
        and all(node.labels.get(key) == value for key, value in node_selector.items())
        for node in snapshot.nodes.values()
    )
    dubious = sorted(name for name, score in scores.items() if score >= AVOIDED and name in snapshot.nodes)
    return AvoidedNodes(_hostnames(snapshot, dubious), _hostnames(snapshot, bad) if has_others else ())


def _hostnames(snapshot: Snapshot, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(snapshot.nodes[name].labels.get(layout.HOSTNAME_LABEL, name) for name in names)
