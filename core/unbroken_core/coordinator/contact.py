"""Pods that are lost, and when the coordinator itself may be out of touch: it then takes the job over anew.

Two signs say that it is: all pods fall silent at once, which one broken link of the rendezvous explains better than
many of theirs; and an agent comes that has obeyed a higher term, so that another coordinator has led the job
meanwhile. What is known of the pods is stale in both cases. The agents know better: they come back with the plan that
they are in, as they do to a new rendezvous, and when all of its ranks are there nothing was interrupted.
"""

import math
from dataclasses import replace

from unbroken_core.coordinator.adoption.previous_world import first_world, note_lost
from unbroken_core.coordinator.ending import note_gone
from unbroken_core.coordinator.faults import take_fault
from unbroken_core.coordinator.health.pairs import forget_pairs
from unbroken_core.coordinator.state.health_table import HealthTable
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import ActiveWorld, Members
from unbroken_core.coordinator.state.pair_table import PairTable
from unbroken_core.coordinator.state.phases import Ending, Forming, Interrupted, Outage, Planned, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.pod.liveness import heartbeat_interval_s, reconnect_grace_s
from unbroken_core.protocol.messages import Hello
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.vocabulary.reasons import Cause, Reason

_LIVE = (Planned, Running, Interrupted)
_MISSED_HEARTBEATS = 2


def lose_overdue(job: JobState, now_s: float) -> float:
    """Take out the pods that were away or silent for too long. Return when the next of them is; inf: none."""
    timeouts, members = job.settings.timeouts, job.members
    until_s = _lose_away(job, now_s) if members.away else math.inf
    while members.heard:
        member = members.by_uid[next(iter(members.heard))]
        due_s = member.heard_at_s + timeouts.heartbeat_s
        if now_s < due_s:
            return min(until_s, due_s)
        if _is_deaf(job, now_s):
            start_over(job, f"no pod was heard for {timeouts.heartbeat_s:g} s: waits for them to come back", now_s)
            return until_s
        silent_s = now_s - member.heard_at_s
        detail = f"it was silent for {silent_s:.1f} s"
        lose(job, member, Cause.HEARTBEAT_LOST, now_s, detect_s=silent_s, detail=detail)
    return until_s


def lose(job: JobState, member: Member, cause: Cause, now_s: float, *, detect_s: float, detail: str) -> None:
    """Take a pod out of the job."""
    if member.session is not None:
        job.close(member.session)
    if member.ranks:
        record = FaultRecord(cause, member.uid, None, now_s - detect_s, detect_s, detail=detail)
        take_fault(job, record, now_s)
    note_gone(job, member, detail)
    job.previous = note_lost(job, member)
    _forget_asked(job, member)
    job.members.drop(member)
    # Once it is no member: copies of its shards that nobody confirmed count now that it is gone.
    job.checkpoints.lose(member.uid)
    job.health.note(member.uid, None, now_s)
    job.health.note_lines(member.uid, ())
    job.health.note_slow(member.uid, (), now_s)
    job.health.note_preflight(member.uid, (), now_s, may_fail=False)
    forget_pairs(job, member, now_s)
    job.paces.forget(member.uid)


def is_superseded(job: JobState, hello: Hello) -> bool:
    """Return whether this agent has obeyed a coordinator that came after this one."""
    return isinstance(job.phase, _LIVE) and hello.term > job.numbers.term


def start_over(job: JobState, why: str, now_s: float) -> None:
    """Forget the pods and close their connections, as a new rendezvous would begin; what has happened stays known."""
    for member in job.members.by_uid.values():
        if member.session is not None:
            job.close(member.session)
    outage = Outage(now_s, why, job.world.iteration, job.world.size)
    heard_s = max((member.heard_at_s for member in job.members.by_uid.values()), default=now_s)
    job.progress.lose_touch(now_s, heard_s)
    job.checkpoints.forget_pods()
    job.checkpoints.await_first(uid for uid, pod in job.cluster.pods.items() if not pod.is_waiting)
    job.copying.told.clear()
    known = job.health
    job.health = HealthTable(
        blamed_s=known.blamed_s, blames_s=known.blames_s, vain_s=known.vain_s, failed_s=known.failed_s
    )
    job.pairs = PairTable(number=job.pairs.number)
    job.previous = first_world(job, now_s)
    job.members = Members(job.rules, ActiveWorld(now_s))
    job.members.expect({uid: pod.pod for uid, pod in job.cluster.pods.items()})
    job.phase = Forming(now_s, job.pod_clock.read(now_s), outage)
    job.report = StatusText(Reason.WAITING_FOR_PODS, why)


def _lose_away(job: JobState, now_s: float) -> float:
    members = job.members
    grace_s = reconnect_grace_s(job.settings.timeouts, isinstance(job.phase, Interrupted))
    if isinstance(job.phase, Ending):
        # Nobody waits to train on: what it has to say is how its processes ended.
        grace_s = max(grace_s, job.settings.timeouts.heartbeat_s)
    until_s = math.inf
    for uid in list(members.away):
        member = members.by_uid[uid]
        away_s = now_s - member.away_since_s
        # Compared as a deadline is computed: rounding must not put the decision behind its tick.
        if now_s >= member.away_since_s + grace_s:
            detail = f"its connection was broken for {away_s:.1f} s"
            lose(job, member, Cause.POD_LOST, now_s, detect_s=away_s, detail=detail)
        else:
            until_s = min(until_s, member.away_since_s + grace_s)
    return until_s


def _is_deaf(job: JobState, now_s: float) -> bool:
    """Return whether no pod at all was heard recently; to be asked once the quietest was silent for too long."""
    if not isinstance(job.phase, _LIVE) or not job.members.heard:
        return False
    newest = job.members.by_uid[next(reversed(job.members.heard))]
    return now_s - newest.heard_at_s >= _MISSED_HEARTBEATS * heartbeat_interval_s(job.settings.timeouts)


def _forget_asked(job: JobState, member: Member) -> None:
    """A pod is given up: should it come back, it is asked anew, and has its time for the answer."""
    phase = job.phase
    if isinstance(phase, (Forming, Interrupted)):
        question = phase.consulting.question
        if question is not None and question.uid == member.uid:
            job.phase = replace(phase, consulting=replace(phase.consulting, question=None))
