"""What must hold of the coordinator's own state after every step (docs/architecture.md), whatever happens."""

import math

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.health.settling import is_settled
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import OVER, Forming, Interrupted, Planned, Running
from unbroken_core.coordinator.status import build_pods
from unbroken_core.recovery.account import ratios, wall_of

SETS = (
    *("ready", "unready", "away", "broken", "coming", "out", "hopeless", "respawning", "not_entered", "active"),
    *("not_completed", "not_progressed", "leaving", "lingering", "without_domain", "heard"),
)
"""Of the table of pods."""


class BrokenStateError(AssertionError):
    """The coordinator's state contradicts itself."""


def check_state(coordinator: Coordinator, now_s: float, term: int, iteration: int, is_thorough: bool = True) -> None:
    """Check the state between two steps. `term` and `iteration` are those before the last step.

    A thorough check also makes anew all that is kept beside what it follows from, which takes as long as all else.
    """
    job = coordinator._job
    _check_numbers(job, term, iteration)
    _check_phase(job)
    _check_world(job)
    _check_time(coordinator, now_s)
    if is_thorough:
        _check_members(job)
        if coordinator.status(now_s, str).pods != build_pods(job):
            raise BrokenStateError("the status shows pods of another revision")
    if not is_settled(job, now_s):
        raise BrokenStateError("findings are to be judged again, by what the step itself has changed")
    deadline_s = coordinator.next_deadline_s()
    if deadline_s is not None and not now_s < deadline_s < math.inf:
        raise BrokenStateError(f"a tick is due at {deadline_s}, and was not taken at {now_s}")
    if deadline_s is None and job.phase.kind not in OVER and not job.pod_clock.is_standing and job.members.heard:
        raise BrokenStateError(f"{job.phase.kind} waits for ever: {job.report}")


def _check_time(coordinator: Coordinator, now_s: float) -> None:
    """All time since the job first ran is in one term, and is there once; the clock says so, not the account."""
    progress = coordinator.progress
    gained_s, ran_for_s = progress.totals(now_s)
    spent = progress.account.spent(now_s)
    if (spent is None) is not (ran_for_s is None):
        raise BrokenStateError(f"ran for {ran_for_s} s, and spent {spent}")
    if spent is None or ran_for_s is None:
        return
    # A float of 63 years, which fuzzed accounts may claim, is not as exact.
    if abs(wall_of(spent) - ran_for_s) > max(1e-9, 4 * math.ulp(ran_for_s)):
        raise BrokenStateError(f"the terms sum to {wall_of(spent)} s of {ran_for_s} s: {spent}")
    if abs(spent.progress_s - gained_s) > 1e-6 or min(vars(spent).values()) < 0:
        raise BrokenStateError(f"progress is {gained_s} s, got {spent}")
    if not all(0 <= ratio <= 1 for ratio in ratios(spent).values()) or spent.progress_rank_s > spent.held_rank_s + 1e-6:
        raise BrokenStateError(f"more progress than was held: {spent}")


def _check_numbers(job: JobState, term: int, iteration: int) -> None:
    """Plans are never numbered back."""
    numbers = job.numbers
    if numbers.term < term or numbers.highest_iteration < iteration:
        raise BrokenStateError(f"{numbers} after term {term} and iteration {iteration}")
    if job.world.iteration > numbers.highest_iteration:
        raise BrokenStateError(f"iteration {job.world.iteration} is above the highest, {numbers.highest_iteration}")


def _check_phase(job: JobState) -> None:
    """What belongs to a phase is there with it, and nothing of it later."""
    phase, has_incident = job.phase, job.history.running is not None
    if isinstance(phase, Forming) and (job.world.size or job.members.active):
        raise BrokenStateError(f"no plan is in force, and {len(job.members.active)} pods have ranks")
    if isinstance(phase, Interrupted) and not has_incident:
        raise BrokenStateError("the iteration is interrupted, and no recovery is under way")
    if isinstance(phase, Running) and has_incident:
        raise BrokenStateError("all run, and a recovery is still under way")
    if isinstance(phase, Running) and phase.move is not None and phase.move.order is not None:
        order, numbers = phase.move.order, job.numbers
        if (order.iteration, order.number) != (job.world.iteration, numbers.halt):
            raise BrokenStateError(
                f"{order} is in force in iteration {job.world.iteration}, the last is {numbers.halt}"
            )


def _check_world(job: JobState) -> None:
    """Active ranks are 0 to n-1, one worker each, but for those of pods that were lost since."""
    ranks = sorted(rank for member in job.members.by_uid.values() for rank in member.ranks.values())
    if len(set(ranks)) != len(ranks) or (ranks and not 0 <= ranks[0] <= ranks[-1] < job.world.size):
        raise BrokenStateError(f"a world of {job.world.size} ranks has the ranks {ranks}")
    is_whole = isinstance(job.phase, (Planned, Running))
    if is_whole and len(ranks) != job.world.size:
        raise BrokenStateError(f"a world of {job.world.size} ranks runs with {len(ranks)} of them")


def _check_members(job: JobState) -> None:
    """The sets of the table say what the pods say: sorting all of them again changes nothing."""
    members = job.members
    before = {name: dict(getattr(members, name)) for name in SETS}
    version = members.ranking.version
    for member in members.by_uid.values():
        members.sort(member)
    after = {name: dict(getattr(members, name)) for name in SETS}
    stale = [name for name in SETS if before[name] != after[name]]
    if stale or members.ranking.version != version:
        raise BrokenStateError(f"pods were not sorted after a change: {stale or 'the ranking'}")
    connected = {member.uid for member in members.by_uid.values() if member.session is not None}
    if connected != set(members.heard) or connected != {member.uid for member in members.by_session.values()}:
        raise BrokenStateError("connections and members differ")
