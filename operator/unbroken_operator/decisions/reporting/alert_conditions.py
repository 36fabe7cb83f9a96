"""Two conditions with an alert: the job recovers, or runs, and yet somebody should look. Kept once they were shown.

    RestartStorm    the last recoveries, however many terms and operators they saw, lie within a quarter of an hour
    NoProgress      nothing new was reached for as long as the coordinator reports

No message has a number that changes while nothing happens: each would be a write.
"""

from collections import Counter
from collections.abc import Iterator

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.alert_thresholds import STILL_S, STORM_RECOVERIES, STORM_S
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.limits.fitting import is_time
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut
from unbroken_operator.decisions.snapshot import Snapshot

_NUM_SHOWN = STORM_RECOVERIES + 1


def restart_storm(snapshot: Snapshot) -> Iterator[ConditionState]:
    """Say whether the job keeps recovering, by the history in its status and the report."""
    recent = [(ended_at, cause) for ended_at, cause in _ends(snapshot) if _is_recent(ended_at, snapshot.now)]
    if len(recent) >= _NUM_SHOWN:
        newest = sorted(recent, key=lambda item: seconds_between(item[0], snapshot.now))[:_NUM_SHOWN]
        causes = Counter(cause for _ended_at, cause in newest)
        tally = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items(), key=lambda it: (-it[1], it[0])))
        message = f"more than {STORM_RECOVERIES} recoveries within {STORM_S // 60} minutes; of the last ones {tally}"
        yield ConditionState(ConditionType.RESTART_STORM, True, Reason.KEEPS_RECOVERING, cut(message))
    elif _is_stored(snapshot, ConditionType.RESTART_STORM):
        message = f"no more than {STORM_RECOVERIES} recoveries within {STORM_S // 60} minutes"
        yield ConditionState(ConditionType.RESTART_STORM, False, Reason.RECOVERS_SELDOM, message)


def no_progress(snapshot: Snapshot, report: JobStatus) -> Iterator[ConditionState]:
    """Say whether the job has its pods and gets nowhere, as the coordinator tells."""
    minutes = STILL_S // 60
    if report.still_for_s >= STILL_S:
        message = f"no step was reached for the first time in {minutes} minutes; the newest is {report.max_step}"
        if report.max_step < 0:
            message = f"the job has not trained for {minutes} minutes, although it should"
        yield ConditionState(ConditionType.NO_PROGRESS, True, Reason.STANDS_STILL, message)
    elif _is_stored(snapshot, ConditionType.NO_PROGRESS):
        message = f"something new was reached, or it could not be, within {minutes} minutes"
        yield ConditionState(ConditionType.NO_PROGRESS, False, Reason.GETS_ON, message)


def alert_conditions_over(snapshot: Snapshot) -> Iterator[ConditionState]:
    """Say of a job that is over that its troubles are, too."""
    for kind, reason in (
        (ConditionType.RESTART_STORM, Reason.RECOVERS_SELDOM),
        (ConditionType.NO_PROGRESS, Reason.GETS_ON),
    ):
        if _is_stored(snapshot, kind):
            yield ConditionState(kind, False, reason, "the job is over")


def _ends(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return end and cause of the recoveries that are known to be over; a report knows better than what is stored."""
    stored = snapshot.status.get("history") or ()
    ends = {(item["term"], item["number"]): (item.get("endedAt") or "", str(item["cause"])) for item in stored}
    report = snapshot.report
    if report is not None:
        told = {(report.term, item.number): (item.ended_at or "", item.cause.value) for item in report.recoveries}
        ends |= told
    return [item for item in ends.values() if is_time(item[0])]


def _is_recent(ended_at: str, now: str) -> bool:
    """Whether it ended within the window. The time is of the rendezvous' clock, which may be ahead by as much.

    What lies further ahead is no time of this job, and would make a storm that lasts for years.
    """
    return -STORM_S <= seconds_between(ended_at, now) <= STORM_S


def _is_stored(snapshot: Snapshot, kind: ConditionType) -> bool:
    return any(item["type"] == kind.value for item in snapshot.status.get("conditions") or ())
