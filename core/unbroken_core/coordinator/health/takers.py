"""Whether others can take the ranks of a pod that is blamed: else a finding would end the job, or make it smaller."""

import math
from collections.abc import Sequence

from unbroken_core.coordinator.state.health_table import Takers
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.members import Newcomers
from unbroken_core.coordinator.state.phases import Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.ranks.worlds import World
from unbroken_core.vocabulary.layers import replacement_depth
from unbroken_core.vocabulary.reasons import Cause, Rung

LOOK_AGAIN_S = 1.0
"""Whether layers let a spare take the ranks is a plan of the whole job."""


def takers_of(job: JobState, member: Member, newcomers: Newcomers) -> Takers:
    """Return who is there besides this pod."""
    members = job.members
    ready = (uid for uid in members.ready if uid != member.uid and uid not in newcomers.places)
    spares = tuple(uid for uid in ready if uid not in members.active and not _is_doubted(job, uid))
    return Takers(spares, _num_kept(job, member))


def are_there_still(job: JobState, member: Member, takers: Takers) -> bool:
    """Return whether all of them are as they were; costs as much as there are spares."""
    members = job.members
    spares_stay = all(
        uid in members.ready and uid not in members.active and not _is_doubted(job, uid) for uid in takers.spares
    )
    return spares_stay and _num_kept(job, member) == takers.num_kept


def can_take(job: JobState, member: Member, takers: Takers, cause: Cause, now_s: float) -> bool:
    """Return whether they can stand in for this pod, and are enough pods without it."""
    if takers.num_kept + len(takers.spares) < job.settings.minimum_replicas:
        return False
    if not member.ranks:
        return True
    if not takers.spares or not _may_promote(job, cause, now_s):
        return False
    if isinstance(job.phase, Running) and job.rules.layers and not job.rules.has_code:
        return _has_place(job, member, now_s)
    return _is_enough(job, member, takers.spares)


def has_enough(job: JobState, member: Member, takers: Takers) -> bool:
    """Return whether an interrupted job has workers for all ranks, and enough pods, without this one."""
    is_above = takers.num_kept + len(takers.spares) >= job.settings.minimum_replicas
    return is_above and _is_enough(job, member, takers.spares)


def _is_doubted(job: JobState, uid: str) -> bool:
    return job.health.is_doubted(uid) or uid in job.set_aside


def _num_kept(job: JobState, member: Member) -> int:
    members = job.members
    num_out = sum(uid in members.active for uid in members.out if uid != member.uid)
    return len(members.active) - num_out - (member.uid in members.active)


def _may_promote(job: JobState, cause: Cause, now_s: float) -> bool:
    """Return whether a spare may be promoted for this: without the rung, the job would shrink or end."""
    if not job.settings.counts(cause):
        return Rung.POD in job.budgets.allowed
    return job.budgets.is_possible(Rung.POD, now_s)


def _has_place(job: JobState, member: Member, now_s: float) -> bool:
    """Return whether spares may take all ranks of a pod, where layers say which may."""
    seen_s = job.health.unmovable_s.get(member.uid, -math.inf)
    if now_s < seen_s + LOOK_AGAIN_S:
        return False
    members, ranking = job.members, job.members.ranking
    newcomers = members.newcomers(now_s, job.settings.timeouts.last_call_s)
    doubted = {uid for uid in (*job.health.strikes, *job.health.failed, *job.set_aside) if uid not in members.active}
    places = {uid: members.by_uid[uid].places.keys() for uid in (member.uid, *doubted) if uid in members.by_uid}
    ranking.exclude({**newcomers.places, **places})
    outcome = ranking.following(may_promote=True, may_grow=False)
    is_whole = isinstance(outcome, World) and not outcome.num_closed and outcome.world_size >= job.world.size
    ranking.exclude({})
    if not is_whole:
        job.health.unmovable_s[member.uid] = now_s
    return is_whole


def _is_enough(job: JobState, member: Member, others: Sequence[str]) -> bool:
    """Return whether these pods may take all ranks of one, and those that others have lost in an interruption.

    Nobody plans while workers still leave, so workers are counted: those that can have ranks now, of pods that may
    stand in for this one, whatever layers forbid. Pods that lost their ranks are ready again, and no spares for
    anybody.
    """
    ranking, members, layers = job.members.ranking, job.members, job.rules.tree_layers()
    limited = [depth for depth, layer in enumerate(layers[1:-1], 1) if layer.max_ranks is not None]
    depth = max(replacement_depth(layers), *limited, 0)

    def place(uid: str) -> tuple[str, ...]:
        return (*ranking.domains(uid), uid)[:depth]

    own = place(member.uid)
    # Not all that say READY: a place with too many faults gets no rank again.
    num_free = sum(len(members.ready[uid]) for uid in others if place(uid) == own)
    kept = (members.by_uid[uid] for uid in members.active if uid not in members.out and uid != member.uid)
    return num_free >= job.world.size - sum(len(each.ranks) for each in kept)
