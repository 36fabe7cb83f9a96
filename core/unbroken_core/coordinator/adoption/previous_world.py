"""Whether the world that trained last is known to have stopped: before that, no other one may begin.

A world goes on for as long as all of its pods do. So it has stopped when

    one pod with ranks in it has left the iteration     its workers are READY or GONE; the TakeFaults got it out
    the cluster confirms the end of one                 Observation; a node that nobody reaches confirms nothing
    timeouts.isolation has passed since the last word   a pod without contact leaves by itself (the agent's fence)

Mostly the first is known at once. It is not when all pods with ranks are cut off together and a spare is heard, or
when a new rendezvous, or one that was out of touch, hears only pods that had no part in that world. The only pod of a
world has a shorter rule of its own, by which it has stopped before it is given up; a new rendezvous knows it as such
when it hears it. See docs/design/0008-one-world.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Union

from unbroken_core.coordinator.decisions import Consultable, Decision, Learn, Wait
from unbroken_core.coordinator.state.job import JobState, PreviousWorld, StatusText
from unbroken_core.coordinator.state.phases import Hold, Interrupted
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.recovery.ladder import shorten_names
from unbroken_core.vocabulary.reasons import Reason, WorkerPhase

Unheard = list[tuple[str, Union[Member, None]]]
"""Uids of pods, and what is known of them."""

_LEFT = (WorkerPhase.READY, WorkerPhase.GONE)
_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)


def first_world(job: JobState, now_s: float) -> PreviousWorld:
    """Return what a coordinator knows that has heard no pod yet, or forgets all: only whether there was a world."""
    if job.numbers.highest_iteration < 0:
        return PreviousWorld(is_over=True)
    return _unknown(job.settings.replicas * job.settings.ranks_per_pod == 1, now_s)


def new_world(job: JobState) -> PreviousWorld:
    """Return the world of a plan that was just cut, or whose ranks were all seen in it."""
    return PreviousWorld(is_lone=len(job.members.active) < 2)


def adopted_world(job: JobState, num_seen: int, began_s: float) -> PreviousWorld:
    """Return the world of a plan of which `num_seen` ranks are there; this coordinator began to form then."""
    world = job.world
    is_newest = world.iteration >= job.numbers.highest_iteration
    if is_newest and num_seen == world.size:
        return new_world(job)
    return replace(_unknown(is_newest and world.size == 1, began_s), is_newest=is_newest)


def note_lost(job: JobState, member: Member) -> PreviousWorld:
    """Return what is known once this pod is dropped."""
    previous = job.previous
    if previous.is_over or not (member.ranks or member.uid in previous.lost):
        return previous
    if previous.is_newest and _has_left(job, member):
        return replace(previous, is_over=True)
    if previous.is_newest and previous.is_lone and member.session is None:
        # It stops by itself before it would be lost in an iteration that runs; in an interrupted one it is lost sooner.
        previous = replace(previous, lone_until_s=member.away_since_s + job.settings.timeouts.reconnect_s)
    previous.lost[member.uid] = member.pod
    return replace(previous, heard_at_s=max(previous.heard_at_s, member.heard_at_s))


def note_back(job: JobState, uid: str, now_s: float) -> PreviousWorld:
    """A pod of this world that was lost is heard again: it is told to leave now, and has its time for that."""
    previous = job.previous
    return replace(previous, told_at_s=now_s, lone_until_s=None) if uid in previous.lost else previous


def hold_back(job: JobState, phase: Consultable, now_s: float) -> Decision | None:
    """Return what to do while the next plan has to wait for the end of the previous world; None: it need not."""
    previous, hold = job.previous, phase.hold
    if previous.is_over:
        return None
    # Each of thousands of pods says every few seconds that there is nothing to say.
    if hold is not None and now_s < hold.until_s and hold.report is job.report and hold.facts == _facts(job):
        return Wait(hold.until_s, phase=phase)
    heard, unheard = _sort_pods(job)
    due_s = _due_s(job, heard, unheard)
    if _is_proven(job, heard) or due_s is None or now_s >= due_s:
        return Learn(phase, previous=replace(previous, is_over=True))
    text = _text(job, [member.pod for member in heard], unheard)
    report = StatusText(Reason.WAITING_FOR_ISOLATION, text, due_s)
    return Wait(due_s, report, replace(phase, hold=Hold(_facts(job), report, due_s)))


def _facts(job: JobState) -> tuple[object, ...]:
    """Return others whenever an agent or the operator has said something new."""
    return job.members.num_changes, job.history.num_changes, job.cluster


def _is_proven(job: JobState, heard: list[Member]) -> bool:
    if job.previous.is_newest and any(_is_obeying(job, member) for member in heard):
        return True
    if any(_is_confirmed(job, uid) for uid in _uids(job)):
        return True
    return job.previous.has_unknown and _is_all_known(job)


def _due_s(job: JobState, heard: list[Member], unheard: Unheard) -> float | None:
    """Return when the world has stopped whatever is heard until then; None when nobody is left of it."""
    previous, timeouts = job.previous, job.settings.timeouts
    ends = []
    if heard:
        interrupted_s = job.phase.at_s if isinstance(job.phase, Interrupted) else 0.0
        ends.append(max(previous.told_at_s, interrupted_s) + timeouts.barrier_s)
    if unheard or previous.has_unknown:
        words = [member.heard_at_s for _uid, member in unheard if member is not None]
        ends.append(max([previous.heard_at_s, *words]) + previous.limit_s(timeouts))
    if previous.lone_until_s is not None:
        ends.append(previous.lone_until_s)
    return min(ends, default=None)


def _unknown(has_one_rank: bool, now_s: float) -> PreviousWorld:
    # Two ranks may be in two pods, though one has room for both: minRanksPerPod, or the script's code, spreads them.
    return PreviousWorld(is_newest=False, has_unknown=True, is_lone=has_one_rank, heard_at_s=now_s)


def _sort_pods(job: JobState) -> tuple[list[Member], Unheard]:
    """Return the pods of the previous world that are connected, and the uids of the others."""
    heard: list[Member] = []
    unheard: Unheard = []
    for uid in _uids(job):
        member = job.members.by_uid.get(uid)
        if member is not None and member.session is not None:
            heard.append(member)
        else:
            unheard.append((uid, member))
    return heard, unheard


def _uids(job: JobState) -> Iterator[str]:
    yield from job.members.active
    yield from (uid for uid in job.previous.lost if uid not in job.members.active)


def _is_obeying(job: JobState, member: Member) -> bool:
    """Whether a pod that is heard has left, or was waited for long enough as one that leaves."""
    # A pod that keeps its ranks has left by now, or had its time and was ended. Pods on their way out were not waited
    # for; where all processes are started again, no pod was.
    was_waited_for = not isinstance(job.phase, Interrupted) or job.phase.job_rung_began is None
    return _has_left(job, member) or (was_waited_for and bool(member.ranks) and member.out is None)


def _has_left(job: JobState, member: Member) -> bool:
    numbers = set(member.ranks)
    plan = member.plan
    if not numbers and plan is not None and plan.iteration == job.world.iteration:
        numbers = {part.local_rank for part in plan.ranks if part.rank is not None}
    if not numbers:
        # It does not know any more which of them had ranks.
        return all(_is_outside(place, job.world.iteration) for place in member.places.values())
    return any(_is_outside(member.places[number], job.world.iteration) for number in numbers)


def _is_outside(place: WorkerPlace, iteration: int) -> bool:
    """Whether a worker has left the iteration for good. One that starts may still have its predecessor beside it."""
    state = place.state
    if state.phase is WorkerPhase.READY:
        return state.incarnation != place.told_incarnation or state.iteration >= min(place.told_iteration, iteration)
    return state.phase in _LEFT


def _is_confirmed(job: JobState, uid: str) -> bool:
    """Whether the cluster says that the pod's processes have ended."""
    if job.cluster.num_running is None:
        return False
    pod = job.cluster.pods.get(uid)
    return job.cluster.is_accounted if pod is None else pod.is_ended


def _is_all_known(job: JobState) -> bool:
    """Whether no pod of the job, seen or gone, trains: each is heard, and has left what it was told to leave."""
    if job.cluster.num_running is None or not job.cluster.is_accounted:
        return False
    members, iteration = job.members.by_uid, job.world.iteration
    return all(
        pod.is_ended or pod.is_waiting or ((member := members.get(uid)) is not None and _is_idle(member, iteration))
        for uid, pod in job.cluster.pods.items()
    )


def _is_idle(member: Member, iteration: int) -> bool:
    """Whether none of its workers trains. Who hangs in an older iteration does not: that was over when this began."""
    states = (place.state for place in member.places.values())
    is_inside = any(state.phase in _INSIDE and state.iteration >= iteration for state in states)
    return member.session is not None and not is_inside


def _text(job: JobState, heard: list[str], unheard: Unheard) -> str:
    if heard:
        return (
            f"waits for {shorten_names(heard)} to leave the iteration before another world begins; otherwise begins it"
        )
    names = [job.previous.lost[uid] if member is None else member.pod for uid, member in unheard]
    who = (
        f"pods {shorten_names(names)} of iteration {job.world.iteration}"
        if names
        else "the pods of an earlier iteration"
    )
    return (
        f"{who} are not heard and may train on together: the next world begins when one of them is heard, when the "
        "cluster confirms that one has ended (its Node is deleted, or tainted node.kubernetes.io/out-of-service), "
        "or when all must have stopped by themselves"
    )
