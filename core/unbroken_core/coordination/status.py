"""What the coordinator tells about a job."""

from collections.abc import Callable

from unbroken_core.coordination.members import Member
from unbroken_core.coordination.state import Job
from unbroken_core.messages import PROTOCOL, JobStatus, PodStatus
from unbroken_core.reasons import JobPhase


def build_status(job: Job, revision: int, now_s: float, wall: Callable[[float], str]) -> JobStatus:
    """Return the status; pods in the order of the tree."""
    census = job.census
    order = census.ranking.ordered(census.by_uid)
    world_size = job.world_size if _has_ranks(job) else 0
    num_ready = sum(map(len, census.ready.values()))
    spare = sum(len(local_ranks) for uid, local_ranks in census.ready.items() if not census.by_uid[uid].ranks)
    if job.iteration < 0:
        spare = max(num_ready - job.rules.wanted_ranks, 0)
    return JobStatus(
        protocol=PROTOCOL,
        job=job.settings.job,
        generation=job.generation,
        revision=revision,
        phase=job.phase,
        reason=job.reason,
        message=job.message if job.held_until_s is None else f"{job.message}, at {_clock(wall(job.held_until_s))}",
        iteration=job.iteration,
        world_size=world_size,
        spare_ranks=spare,
        lost_ranks=max(job.rules.wanted_ranks - world_size, 0),
        pods=tuple(_pod_status(job, census.by_uid[uid]) for uid in order),
        restarts_by_rung={rung.value: count for rung, count in job.history.by_rung.items() if count},
        restarts_by_cause={cause.value: count for cause, count in job.history.by_cause.items() if count},
        recoveries=job.history.to_messages(wall),
        max_step=job.progress.max_step,
        ettr=job.progress.ettr(now_s),
        refused=tuple(f"{pod}: {why}" for (_uid, pod), why in job.refused.items()),
        broken_spares=job.num_broken_spares,
    )


def _clock(time: str) -> str:
    """Return a time without parts of a second: they would differ each time."""
    whole, dot, _parts = time.partition(".")
    return f"{whole}Z" if dot else time


def _has_ranks(job: Job) -> bool:
    return job.phase is not JobPhase.FAILED


def _pod_status(job: Job, member: Member) -> PodStatus:
    return PodStatus(
        pod=member.pod,
        uid=member.uid,
        node=member.node,
        role=member.role,
        ranks=tuple(member.ranks[local_rank] for local_rank in sorted(member.ranks)),
        domains=job.census.ranking.names(member.uid),
        workers=tuple(place.state.phase for place in member.places.values()),
        is_connected=member.session is not None,
    )
