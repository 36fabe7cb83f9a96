"""Pure: what the operator remembers of a job's last world, for a coordinator that was not there to see its end.

last report that a world ran ──> its pods; those that go are noted, with the time
last report of each term     ──> how much of the time was progress
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unbroken_core.protocol.messages import EarlierRun, GonePod, JobStatus, PodStatus
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.decisions.snapshot import PodView


@dataclass(frozen=True)
class Predecessor:
    """All times are monotonic seconds of this process."""

    report: JobStatus | None = None
    """The last one, and when it came."""
    at_s: float = 0.0
    before: JobStatus | None = None
    """The last one of the term before that, and when it came; None: this process has seen none that had run."""
    before_at_s: float = 0.0
    world: Mapping[str, PodStatus] = field(default_factory=dict)
    """Pods with ranks of the last world that ran, by uid."""
    world_term: int = 0
    gone_at: Mapping[str, float] = field(default_factory=dict)
    """Those of them that have gone, by uid."""


def follow(known: Predecessor, report: JobStatus | None, pods: Iterable[PodView], now_s: float) -> Predecessor:
    """Take in what is seen now."""
    if report is not None and report is not known.report:
        known = _with_report(known, report, now_s)
    there = {pod.uid for pod in pods if pod.phase != "Failed"}
    gone = [uid for uid in known.world if uid not in there]
    if list(known.gone_at) == gone:
        return known
    return replace(known, gone_at={uid: known.gone_at.get(uid, now_s) for uid in gone})


def gone_pods(known: Predecessor, now_s: float) -> tuple[GonePod, ...]:
    """Return the pods of the last world that have gone, while another coordinator than its own has yet to run one."""
    report = known.report
    if report is None or report.term <= known.world_term:
        return ()
    members = ((known.world[uid], at_s) for uid, at_s in known.gone_at.items())
    return tuple(GonePod(member.pod, member.node, member.ranks, now_s - at_s) for member, at_s in members)


def earlier_run(known: Predecessor, now_s: float) -> EarlierRun | None:
    """Return how the job did under the coordinator before; None: not known."""
    before = known.before
    if before is None or before.ran_for_s is None:
        return None
    gained_s = min(before.gained_s, before.ran_for_s)
    return EarlierRun(now_s - known.before_at_s, gained_s, before.ran_for_s, before.time)


def _with_report(known: Predecessor, report: JobStatus, now_s: float) -> Predecessor:
    last = known.report
    if last is not None and report.term > last.term and last.ran_for_s is not None:
        known = replace(known, before=last, before_at_s=known.at_s)
    known = replace(known, report=report, at_s=now_s)
    if report.phase is not JobPhase.RUNNING:
        return known
    world = {pod.uid: pod for pod in report.pods if pod.ranks}
    if report.term == known.world_term and world == known.world:
        return known
    return replace(known, world=world, world_term=report.term, gone_at={})
