"""Pure: where a job's time went, in its status: it outlives the rendezvous and the operator, and both at once.

report of a rendezvous ──> status.time ──> the next rendezvous, unless this process saw a later report
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from unbroken_core.protocol.bounds import MAX_SECONDS
from unbroken_core.protocol.messages import EarlierRun, JobStatus, TimeSpent
from unbroken_core.recovery.account import ratios, wall_of
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.snapshot import Snapshot

WRITE_S = 1800.0
"""So often it is written without other news."""

REPORT_S = 60.0
"""A report is not older."""


def _name(field: str) -> str:
    """Return the status's name of a field: `progress_rank_s` is progressRankSeconds."""
    first, *rest = field.removesuffix("_s").split("_")
    return first + "".join(map(str.capitalize, rest)) + "Seconds"


NAMES = {field.name: _name(field.name) for field in fields(TimeSpent)}
"""Names in the status by field."""


def time_of(snapshot: Snapshot, report: JobStatus) -> dict[str, Any] | None:
    """Return `status.time`; None where nothing is known.

    A rendezvous that has not heard of the one before knows less than is stored: that stays until it has.
    """
    stored = snapshot.status.get("time")
    if report.time is None:
        return stored
    if not knows_earlier(snapshot, report):
        return None if stored is None else dict(stored)
    shares = ratios(report.time)
    return {
        "term": report.term,
        "reportedAt": snapshot.now,
        **{name: round(getattr(report.time, field), 3) for field, name in NAMES.items()},
        "ettrCapacity": round(shares["ettr_capacity"], 4),
        "goodputAllocated": round(shares["goodput_allocated"], 4),
    }


def knows_earlier(snapshot: Snapshot, report: JobStatus) -> bool:
    """Return whether what a report says of the time, ETTR included, is that of the whole job.

    A rendezvous counts from the iteration that it has taken over, until it is told what was before.
    """
    stored, earlier = snapshot.status.get("time"), earlier_time(snapshot)
    if earlier is None or (stored is not None and stored["term"] == report.term):
        return True
    before_s = earlier.ran_for_s if earlier.time is None else wall_of(earlier.time)
    known_s = report.ran_for_s if report.time is None else wall_of(report.time)
    return known_s is None or known_s >= before_s + max(earlier.ago_s - REPORT_S, 0.0)


def spent_of(stored: Mapping[str, Any]) -> TimeSpent:
    """Return what `status.time` says; another release may have written fewer fields."""
    return TimeSpent(**{field: float(stored.get(name) or 0.0) for field, name in NAMES.items()})


def earlier_time(snapshot: Snapshot) -> EarlierRun | None:
    """Return what the rendezvous before the present one has reported last; None: nobody knows."""
    memory, stored = snapshot.memory, snapshot.status.get("time")
    term = 0 if snapshot.report is None else snapshot.report.term
    earlier, of_term = memory.earlier, memory.earlier_term
    if earlier is None and stored is not None and stored["term"] < term:
        spent, of_term = spent_of(stored), stored["term"]
        ago_s = min(max(seconds_between(stored["reportedAt"], snapshot.now), 0.0), MAX_SECONDS)
        earlier = EarlierRun(ago_s, spent.progress_s, wall_of(spent), spent)
    if earlier is None or of_term > (snapshot.status.get("endedTerm") or 0):
        return earlier
    # It ended with a suspension, which ended when the job was started again.
    started = snapshot.status.get("startTime")
    since_start_s = 0.0 if not started else max(seconds_between(started, snapshot.now), 0.0)
    suspended_s = max(earlier.ago_s - since_start_s, 0.0)
    return EarlierRun(earlier.ago_s, earlier.gained_s, earlier.ran_for_s, earlier.time, suspended_s)


def newest_counted(snapshot: Snapshot) -> tuple[int, int]:
    """Return term and number of the newest recovery in the status that an earlier rendezvous has led to its end."""
    term = 0 if snapshot.report is None else snapshot.report.term
    ended = ((item["term"], item["number"]) for item in snapshot.status.get("history") or () if item.get("endedAt"))
    return max((key for key in ended if key[0] < term), default=(0, 0))


def is_old(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether what is stored is to be written again, even without other news."""
    stored, new = before.get("time"), after.get("time")
    if stored is None or new is None:
        return stored is not new
    return seconds_between(stored["reportedAt"], new["reportedAt"]) >= WRITE_S
