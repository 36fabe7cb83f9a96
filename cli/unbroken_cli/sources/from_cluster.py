"""Pure: a job from its ResilientTrainingJob and its Events."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from unbroken_cli.job import ConditionRecord, EventRecord, FaultSummary, JobRecord
from unbroken_core.protocol.messages import TimeSpent
from unbroken_core.recovery.account import ratios, terms

JsonObject = Mapping[str, Any]
_FINAL = ("Complete", "Failed")


def job_from_objects(item: JsonObject, events: Sequence[JsonObject] = (), stale: str = "") -> JobRecord:
    """Return what the object says; every field of status may be missing, as one of another release has others."""
    metadata, status = item["metadata"], item.get("status") or {}
    conditions = tuple(_condition(one) for one in status.get("conditions") or ())
    notes = tuple(sorted((_note(event) for event in events), key=lambda note: note.time))
    ranks = status.get("ranks") or {}
    state = status.get("state") or ""
    reason, message = _because(state, conditions)
    spent = _spent(status.get("time"))
    no_number = None if state in ("Unknown", "Deleting") else 0
    return JobRecord(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        state=state,
        # Nobody keeps the status of a job up to date that is being deleted: its pods end at some time.
        is_training=None if metadata.get("deletionTimestamp") else _is_training(state, conditions),
        reason=reason,
        message=message,
        iteration=status.get("iteration", -1),
        active_ranks=ranks.get("active", no_number),
        spare_ranks=ranks.get("spare", no_number),
        lost_ranks=ranks.get("lost", no_number),
        restarts=(status.get("restarts") or {}).get("total", 0),
        ettr=status.get("ettr"),
        time=None if spent is None else terms(spent),
        time_at=str((status.get("time") or {}).get("reportedAt") or ""),
        ratios=None if spent is None else ratios(spent),
        container=_container(item),
        conditions=conditions,
        faults=_faults(status, notes),
        notes=notes,
        stale=stale,
        unwatched="" if status.get("lease") or state in _FINAL else _written_at(metadata, status),
        deleting=_deleting(metadata),
    )


def _written_at(metadata: JsonObject, status: JsonObject) -> str:
    """Return when the status was written last, as far as it can be known; "" of one that nobody has written."""
    by_server = [item for item in metadata.get("managedFields") or () if item.get("subresource") == "status"]
    times = [str(item.get("time") or "") for item in by_server]
    if not any(times):
        times = [str(item.get("lastTransitionTime") or "") for item in status.get("conditions") or ()]
        times.append(str((status.get("time") or {}).get("reportedAt") or ""))
    return max(times, default="")


def _spent(stored: JsonObject | None) -> TimeSpent | None:
    if stored is None:
        return None
    names = {field.name: field.name.removesuffix("_s").split("_") for field in fields(TimeSpent)}
    keys = {field: words[0] + "".join(map(str.capitalize, words[1:])) + "Seconds" for field, words in names.items()}
    return TimeSpent(**{field: float(stored.get(key) or 0.0) for field, key in keys.items()})


def _deleting(metadata: JsonObject) -> str:
    """Return since when the object is being deleted, and what keeps it; an object without finalizers goes at once."""
    since = metadata.get("deletionTimestamp")
    if not since:
        return ""
    holders = [str(holder) for holder in metadata.get("finalizers") or ()]
    if "foregroundDeletion" in holders:
        return f"since {since}; its pods end first (--cascade=foreground)"
    if not holders:
        return f"since {since}"
    # Its pods go when the object has gone, and the operator looks after no job that is to go.
    held = f"held by the finalizer {', '.join(holders[:5])}: until it is removed, the pods stay as they are"
    return f"since {since}; {held}, and lost ones are not replaced"


def _container(item: JsonObject) -> str:
    template = (item.get("spec") or {}).get("template") or {}
    containers = (template.get("spec") or {}).get("containers") or [{}]
    return str(containers[0].get("name", ""))


def _condition(item: JsonObject) -> ConditionRecord:
    sessions = ("type", "status", "reason", "message", "lastTransitionTime")
    return ConditionRecord(*(str(item.get(key, "")) for key in sessions))


def _note(event: JsonObject) -> EventRecord:
    metadata = event.get("metadata") or {}
    time = event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or ""
    return EventRecord(str(time), *(str(event.get(key) or "") for key in ("type", "reason", "message")))


def _is_training(state: str, conditions: Sequence[ConditionRecord]) -> bool | None:
    running = next((item.status for item in conditions if item.type == "Running"), "")
    if state == "Unknown" or (state == "Running" and running == "Unknown"):
        return None
    return state == "Running" and running in ("True", "")


_TELLING = {
    "Invalid": ("Admitted",),
    "Suspended": ("Suspended",),
    "Forming": ("Admitted", "Running", "PodsReady"),
    "Running": ("Running",),
    "Recovering": ("Running", "Recovering"),
    "Unknown": ("Running",),
    "Complete": ("Complete",),
    "Failed": ("Failed",),
    "Deleting": ("Running",),
}
"""By state, the conditions that may explain it; the first that is not as it should be does."""


def _because(state: str, conditions: Sequence[ConditionRecord]) -> tuple[str, str]:
    by_type = {item.type: item for item in conditions}
    candidates = [by_type[kind] for kind in _TELLING.get(state, ("Admitted",)) if kind in by_type]
    chosen = next((item for item in candidates if item.type != "Admitted" or item.status != "True"), None)
    return (chosen.reason, chosen.message) if chosen is not None else ("", "")


def _faults(status: JsonObject, notes: Sequence[EventRecord]) -> tuple[FaultSummary, ...]:
    records = [dict(record) for record in status.get("history") or ()]
    last = status.get("lastInterruption")
    if last and records and records[-1].get("startedAt") == last.get("time"):
        records[-1] |= {key: last[key] for key in ("domain", "detail") if last.get(key)}
    is_one_count = len({record.get("term") for record in records}) <= 1
    return tuple(_fault(record, is_one_count, notes) for record in records)


def _fault(record: JsonObject, is_one_count: bool, notes: Sequence[EventRecord]) -> FaultSummary:
    number = str(record.get("number", "?"))
    detail, others = _remembered(record, notes)
    return FaultSummary(
        id=number if is_one_count else f"{record.get('term', '?')}.{number}",
        cause=record.get("cause", ""),
        detail=record.get("detail") or detail,
        rank=record.get("rank"),
        pod=record.get("pod", ""),
        node=record.get("node", ""),
        domain=record.get("domain", ""),
        rung=record.get("rung", ""),
        replaced_by=tuple(record.get("replacedBy") or ()),
        iteration=record.get("iteration", 0),
        started_at=record.get("startedAt", ""),
        ended_at=record.get("endedAt") or "",
        seconds=dict(record.get("seconds") or {}),
        others_noted=others,
    )


def _remembered(record: JsonObject, notes: Sequence[EventRecord]) -> tuple[str, str]:
    """Return the detail of a recovery, and what else failed, from its Event: the history has neither, as they would
    fill the object.
    """
    head = f": {record.get('cause', '')}"
    tail = f"; recovered by rung {record.get('rung', '')} in "
    goal = f" -> {record.get('iteration', '')}"
    for note in reversed(notes):
        before, found, rest = note.message.partition(head)
        detail, is_whole, end = rest.rpartition(tail)
        is_same_pod = not record.get("pod") or record["pod"] in before
        arrived = end.partition("iteration ")[2].partition(";")[0]
        if note.reason == "Recovered" and found and is_whole and is_same_pod and arrived.endswith(goal):
            return detail.removeprefix(": "), end.partition("; and ")[2]
    return "", ""
