"""The end of a job: the training function has returned on all ranks, and their processes have yet to end well.

    Running ──all COMPLETED──> Ending ──every process of a rank has ended well──> COMPLETE
                                 └──one ended otherwise, was lost, or time over──> FAILED

What follows the training function in the script (an evaluation, the last save) is the user's. Nobody can run it again:
the others may have ended already.

A launcher ends well only when it was told that the training is over. So a new rendezvous knows a job that was ending by
the pods that have ended well, and does not take their ranks for lost.
"""

from dataclasses import replace

from unbroken_core.coordinator.decisions import Decision, EndJob, Wait
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import Members
from unbroken_core.coordinator.state.phases import Ending, Over
from unbroken_core.coordinator.state.places import Member
from unbroken_core.pod.liveness import ending_limit_s
from unbroken_core.protocol.messages import Finish, PodObservation
from unbroken_core.recovery.ladder import shorten_names
from unbroken_core.vocabulary.plurals import agreed
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role

_MARGIN_S = 30.0
"""So much longer than agents and launchers this waits: they end what still runs, and report it."""


def release_all(job: JobState, now_s: float) -> None:
    """Tell all workers that the training is over."""
    job.phase = Ending(now_s)
    ranks = f"{_all(job.world.size, 'rank')} {agreed(job.world.size, 'has', 'have')}"
    processes = agreed(job.world.size, "its process", "their processes")
    job.report = StatusText(Reason.ENDING, f"{ranks} returned from the training function; waits for {processes}")
    job.progress.end(now_s)
    job.broadcast(finish_message(job))


def finish(job: JobState, outcome: JobPhase, reason: Reason, message: str) -> None:
    """End the job."""
    was_ending = isinstance(job.phase, Ending)
    job.phase = Over(outcome)
    job.report = StatusText(reason, message)
    if was_ending:
        return  # All are told already; how one process ended must not end what the others do after the training.
    job.broadcast(Finish(job.numbers.term, outcome, reason, message))


def finish_message(job: JobState) -> Finish:
    """Return the message that tells agents how the job ended."""
    report, term = job.report, job.numbers.term
    if isinstance(job.phase, Ending):
        return Finish(term, JobPhase.COMPLETE, Reason.COMPLETED, _all_completed(job.world.size))
    return Finish(term, job.phase.kind, report.reason, report.message)


def decide_ending(job: JobState, phase: Ending, now_s: float) -> Decision:
    """Wait for the ends of all processes with a rank."""
    if phase.failure:
        return EndJob(JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING, phase.failure)
    members = job.members
    if not members.not_ended:
        return EndJob(JobPhase.COMPLETE, Reason.COMPLETED, _all_completed(job.world.size))
    timeouts = job.settings.timeouts
    limit_s = ending_limit_s(timeouts) + timeouts.termination_grace_s + _MARGIN_S
    if now_s < phase.since_s + limit_s:
        return Wait(phase.since_s + limit_s)
    names = shorten_names(members.not_ended, members.name)
    message = f"processes of {names} had not ended {limit_s:.0f} s after the training function had returned"
    return EndJob(JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING, message)


def note_end(job: JobState, member: Member) -> None:
    """Note how processes of this pod have ended."""
    phase = job.phase
    if not isinstance(phase, Ending) or phase.failure:
        return
    for local_rank, rank in member.ranks.items():
        fault = member.places[local_rank].state.fault
        if fault is not None:
            failure = f"rank {rank} in {member.pod} {fault.detail}"
            job.phase = replace(phase, failure=failure)
            return


def note_gone(job: JobState, member: Member, detail: str) -> None:
    """Note that nothing more will be heard of this pod; call it before the pod is forgotten."""
    phase = job.phase
    if not isinstance(phase, Ending) or phase.failure or not _has_open_end(job.members, member):
        return
    seen = job.cluster.pods.get(member.uid)
    if seen is not None and _is_done(seen):
        return  # Its agent was not heard to the end, but the cluster says that all went well.
    # Its processes may have ended well, with nobody left to say so.
    failure = f"{member.pod} was lost after the training function had returned, before it said how its processes ended"
    failure += f": {detail}"
    job.phase = replace(phase, failure=failure)


def was_ending(job: JobState, num_missing: int) -> bool:
    """Return whether the ranks that did not come back to a new rendezvous may all be those of pods that ended well."""
    num_done = sum(_is_done(pod) and uid not in job.members.by_uid for uid, pod in job.cluster.pods.items())
    return 0 < num_missing <= num_done * job.settings.ranks_per_pod


def decide_unheard_end(job: JobState, since_s: float, now_s: float) -> Decision | None:
    """Decide for a job that was ending when its rendezvous was lost, before any of its pods has come back; else None.

    `since_s`: when this rendezvous began. Without all active pods nobody knows what became of the others' ranks.
    """
    if job.numbers.highest_iteration < 0:
        return None
    active = {
        uid: pod
        for uid, pod in job.cluster.pods.items()
        if pod.role is Role.ACTIVE and pod.gone is None and not pod.is_waiting
    }
    is_open = {uid: pod.pod for uid, pod in active.items() if not _is_done(pod)}
    if len(active) < job.settings.replicas or len(is_open) == len(active):
        return None
    if not is_open:
        message = f"{_all(len(active), 'active pod')} ended well while no rendezvous ran"
        return EndJob(JobPhase.COMPLETE, Reason.COMPLETED, message)
    names, until_s = shorten_names(is_open.values()), since_s + job.settings.timeouts.heartbeat_s
    if now_s < until_s:
        text = f"the training function had returned on all ranks; waits for {names} to come back to a new rendezvous"
        return Wait(until_s, StatusText(Reason.ENDING, text))
    if any(uid in job.members.by_uid for uid in is_open):
        return None  # New pods: the job was started again.
    message = f"{names} did not come back to a new rendezvous after the training function had returned"
    return EndJob(JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING, message)


def _is_done(pod: PodObservation) -> bool:
    return pod.is_ended and pod.gone is None


def _all(number: int, noun: str) -> str:
    return f"the only {noun}" if number == 1 else f"all {number} {noun}s"


def _all_completed(size: int) -> str:
    return f"{_all(size, 'rank')} completed"


def _has_open_end(members: Members, member: Member) -> bool:
    return member.uid in members.not_ended
