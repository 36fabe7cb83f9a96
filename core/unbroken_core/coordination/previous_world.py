"""Whether the world that trained last is known to have stopped: before that, no other one may begin.

A world goes on for as long as all of its pods do. So it has stopped when

    one pod with ranks in it has left the iteration     its workers are READY or GONE; the Interrupt got it out
    the cluster confirms the end of one                 Observation; a node that nobody reaches confirms nothing
    timeouts.isolation has passed since the last word   a pod that hears no rendezvous leaves by itself (agent/fence.py)

Mostly the first is known at once. It is not when all pods with ranks are cut off together and a spare is heard, or
when a new rendezvous, or one that was out of touch, hears only pods that had no part in that world. The only pod of a
world has a shorter rule of its own, by which it has stopped before it is given up; a new rendezvous knows it as such
when it hears it. See docs/design/0008-one-world.md.
"""

from collections.abc import Iterator
from typing import Union

from unbroken_core.coordination.members import Member, Place
from unbroken_core.coordination.state import Former, Job
from unbroken_core.reasons import Reason, WorkerPhase
from unbroken_core.recoveries.ladder import shorten_names

Unheard = list[tuple[str, Union[Member, None]]]
"""Uids of pods, and what is known of them."""

_LEFT = (WorkerPhase.READY, WorkerPhase.GONE)
_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)


def first_world(job: Job, now_s: float) -> Former:
    """Return what a coordinator knows that has heard no pod yet, or forgets all: only whether there was a world."""
    if job.highest_iteration < 0:
        return Former(is_over=True)
    return _unknown(job.settings.replicas * job.settings.ranks_per_pod == 1, now_s)


def new_world(job: Job) -> Former:
    """Return the world of a plan that was just cut, or whose ranks were all seen in it."""
    return Former(is_lone=len(job.census.active) < 2)


def adopted_world(job: Job, num_seen: int) -> Former:
    """Return the world of a plan of which `num_seen` ranks are there."""
    is_newest = job.iteration >= job.highest_iteration
    if is_newest and num_seen == job.world_size:
        return new_world(job)
    former = _unknown(is_newest and job.world_size == 1, job.started_s)
    former.is_newest = is_newest
    return former


def note_lost(job: Job, member: Member) -> None:
    """Remember a pod of this world that is about to be dropped."""
    former = job.former
    if former.is_over or not (member.ranks or member.uid in former.lost):
        return
    if former.is_newest and _has_left(job, member):
        former.is_over = True
        return
    if former.is_newest and former.is_lone and member.session is None:
        # It stops by itself before it would be lost in an iteration that runs; in an interrupted one it is lost sooner.
        former.lone_until_s = member.away_since_s + job.settings.timeouts.reconnect_s
    former.lost[member.uid] = member.pod
    former.heard_at_s = max(former.heard_at_s, member.heard_at_s)


def note_back(job: Job, uid: str, now_s: float) -> None:
    """A pod of this world that was lost is heard again: it is told to leave now, and has its time for that."""
    if uid in job.former.lost:
        job.former.told_at_s, job.former.lone_until_s = now_s, None


def is_held(job: Job, now_s: float) -> bool:
    """Return whether the next plan has to wait for the end of the former world; says so, and until when."""
    former = job.former
    if former.is_over:
        return False
    # Each of thousands of pods says every few seconds that there is nothing to say.
    if former.holds_until_s is not None and not job.is_changed and now_s < former.holds_until_s:
        job.wake(former.holds_until_s)
        return True
    heard, unheard = _sort_pods(job)
    due_s = _due_s(job, heard, unheard)
    if _is_proven(job, heard) or due_s is None or now_s >= due_s:
        former.is_over = True
        return False
    former.holds_until_s = due_s
    job.wake(due_s)
    job.hold(due_s, Reason.WAITING_FOR_ISOLATION, _text(job, [member.pod for member in heard], unheard))
    return True


def _is_proven(job: Job, heard: list[Member]) -> bool:
    if job.former.is_newest and any(_is_obeying(job, member) for member in heard):
        return True
    if any(_is_confirmed(job, uid) for uid in _uids(job)):
        return True
    return job.former.has_unknown and _is_all_known(job)


def _due_s(job: Job, heard: list[Member], unheard: Unheard) -> float | None:
    """Return when the world has stopped whatever is heard until then; None when nobody is left of it."""
    former, timeouts = job.former, job.settings.timeouts
    ends = []
    if heard:
        interrupted_s = 0.0 if job.interruption is None else job.interruption.at_s
        ends.append(max(former.told_at_s, interrupted_s) + timeouts.barrier_s)
    if unheard or former.has_unknown:
        words = [member.heard_at_s for _uid, member in unheard if member is not None]
        ends.append(max([former.heard_at_s, *words]) + former.limit_s(timeouts))
    if former.lone_until_s is not None:
        ends.append(former.lone_until_s)
    return min(ends, default=None)


def _unknown(has_one_rank: bool, now_s: float) -> Former:
    # Two ranks may be in two pods, though one has room for both: minRanksPerPod, or the script's code, spreads them.
    return Former(is_newest=False, has_unknown=True, is_lone=has_one_rank, heard_at_s=now_s)


def _sort_pods(job: Job) -> tuple[list[Member], Unheard]:
    """Return the pods of the former world that are connected, and the uids of the others."""
    heard: list[Member] = []
    unheard: Unheard = []
    for uid in _uids(job):
        member = job.census.by_uid.get(uid)
        if member is not None and member.session is not None:
            heard.append(member)
        else:
            unheard.append((uid, member))
    return heard, unheard


def _uids(job: Job) -> Iterator[str]:
    yield from job.census.active
    yield from (uid for uid in job.former.lost if uid not in job.census.active)


def _is_obeying(job: Job, member: Member) -> bool:
    """Whether a pod that is heard has left, or was waited for long enough as one that leaves."""
    # Whoever keeps its ranks has left by now, or had its time and is ended; who is on its way out was not waited for,
    # nor was anybody where all processes are started again.
    was_waited_for = job.interruption is None or job.interruption.job_rung_began is None
    return _has_left(job, member) or (was_waited_for and bool(member.ranks) and member.out is None)


def _has_left(job: Job, member: Member) -> bool:
    numbers = set(member.ranks)
    plan = member.plan
    if not numbers and plan is not None and plan.iteration == job.iteration:
        numbers = {part.local_rank for part in plan.ranks if part.rank is not None}
    if not numbers:
        # It does not know any more which of them had ranks.
        return all(_is_outside(place, job.iteration) for place in member.places.values())
    return any(_is_outside(member.places[number], job.iteration) for number in numbers)


def _is_outside(place: Place, iteration: int) -> bool:
    """Whether a worker has left the iteration for good. One that starts may still have its predecessor beside it."""
    state = place.state
    if state.phase is WorkerPhase.READY:
        return state.incarnation != place.told_incarnation or state.iteration >= min(place.told_iteration, iteration)
    return state.phase in _LEFT


def _is_confirmed(job: Job, uid: str) -> bool:
    """Whether the cluster says that the pod's processes have ended."""
    if job.observed is None:
        return False
    pod = job.observed.get(uid)
    return job.is_accounted if pod is None else pod.is_ended


def _is_all_known(job: Job) -> bool:
    """Whether no pod of the job, seen or gone, trains: each is heard, and has left what it was told to leave."""
    if job.observed is None or not job.is_accounted:
        return False
    members = job.census.by_uid
    return all(
        pod.is_ended or pod.is_waiting or ((member := members.get(uid)) is not None and _is_idle(member, job.iteration))
        for uid, pod in job.observed.items()
    )


def _is_idle(member: Member, iteration: int) -> bool:
    """Whether none of its workers trains. Who hangs in an older iteration does not: that was over when this began."""
    states = (place.state for place in member.places.values())
    is_inside = any(state.phase in _INSIDE and state.iteration >= iteration for state in states)
    return member.session is not None and not is_inside


def _text(job: Job, heard: list[str], unheard: Unheard) -> str:
    if heard:
        return f"waits for {shorten_names(heard)} to leave the iteration before another world begins"
    names = [job.former.lost[uid] if member is None else member.pod for uid, member in unheard]
    who = f"pods {shorten_names(names)} of iteration {job.iteration}" if names else "the pods of an earlier iteration"
    return (
        f"{who} are not heard and may train on together: the next world begins when one of them is heard, when the "
        "cluster confirms that one has ended (its Node is deleted, or tainted node.kubernetes.io/out-of-service), "
        "or when all must have stopped by themselves"
    )
