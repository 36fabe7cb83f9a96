"""When the coordinator itself may be out of touch: it then decides nothing, and takes the job over anew.

Two signs: all pods fall silent at once, which one broken link of the rendezvous explains better than many of theirs;
and an agent comes that has obeyed a higher generation, so that another coordinator has led the job meanwhile. What is
known of the pods is stale in both cases. The agents know better: they come back with the plan that they are in, as
they do to a new rendezvous, and when all of its ranks are there nothing was interrupted.
"""

from unbroken_core.coordination.previous_world import first_world
from unbroken_core.coordination.state import Job, Outage
from unbroken_core.messages import Hello
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.reasons import JobPhase, Reason

_LIVE = (JobPhase.PLANNED, JobPhase.RUNNING, JobPhase.INTERRUPTED)
_MISSED_HEARTBEATS = 2


def is_deaf(job: Job, now_s: float) -> bool:
    """Return whether no pod at all was heard of late; to be asked when the first of them has been silent too long."""
    if job.phase not in _LIVE or not job.census.heard:
        return False
    newest = job.census.by_uid[next(reversed(job.census.heard))]
    return now_s - newest.heard_at_s >= _MISSED_HEARTBEATS * heartbeat_interval_s(job.settings.timeouts)


def is_superseded(job: Job, hello: Hello) -> bool:
    """Return whether this agent has obeyed a coordinator that came after this one."""
    return job.phase in _LIVE and hello.generation > job.generation


def start_over(job: Job, why: str, now_s: float) -> None:
    """Forget the pods and close their connections, as a new rendezvous would begin; what has happened stays known."""
    for member in job.census.by_uid.values():
        if member.session is not None:
            job.close(member.session)
    job.outage = Outage(now_s, why, job.iteration, job.world_size)
    job.former = first_world(job, now_s)
    job.forget_pods(now_s)
    job.enter_phase(JobPhase.FORMING, Reason.WAITING_FOR_PODS, why)
