"""Whether a job that shrank takes in what is ready while all is well (restart.growBackSeconds)."""

from unbroken_core.coordination.newcomers import newcomers
from unbroken_core.coordination.state import Job
from unbroken_core.ranks.worlds import World
from unbroken_core.reasons import Cause, JobPhase, Rung
from unbroken_core.recoveries.history import FaultRecord

GROWTH = ""
"""In place of a pod's uid: nobody in particular leaves."""


def growth(job: Job, now_s: float) -> FaultRecord | None:
    """Return for what the iteration is to end after a common step: ranks that have somewhere to run again."""
    after_s = job.settings.grow_back_s
    world = _larger_world(job, now_s)
    if after_s is None or world is None:
        job.growing.since_s = None
        return None
    if job.growing.since_s is None:
        job.growing.since_s = now_s
    has_run_since_s = job.growing.since_s if job.running_s is None else max(job.growing.since_s, job.running_s)
    is_under_way = job.move is not None and GROWTH in job.move.faults
    if not is_under_way and now_s < has_run_since_s + after_s:
        job.wake(has_run_since_s + after_s)
        return None
    detail = f"pods are ready for {world.world_size - job.world_size} of the ranks that are missing"
    return FaultRecord(Cause.CAPACITY_RETURNED, GROWTH, None, now_s, detail=detail)


def _larger_world(job: Job, now_s: float) -> World | None:
    """Return the world that the next recovery would make, where it has more ranks than this one."""
    settings = job.settings
    is_wanted = settings.grow_back_s is not None and job.world_size < job.rules.wanted_ranks
    if not is_wanted or job.phase is not JobPhase.RUNNING or _has_given_up(job, now_s):
        job.census.ranking.exclude({})
        return None
    # Nothing may be lost by it, so only after a common step; and where the script's own code makes the plan, nobody
    # knows it before.
    is_lossless = settings.is_in_process and settings.timeouts.drain_s > 0
    if not is_lossless or job.rules.has_code or Rung.POD not in job.ladder.allowed:
        return None
    job.census.ranking.exclude(newcomers(job, now_s))
    outcome = job.census.ranking.following(may_promote=True, may_grow=True)
    return outcome if isinstance(outcome, World) and outcome.world_size > job.world_size else None


def _has_given_up(job: Job, now_s: float) -> bool:
    growing = job.growing
    if growing.given_up_in != job.iteration or now_s >= growing.given_up_until_s:
        return False
    job.wake(growing.given_up_until_s)
    return True
