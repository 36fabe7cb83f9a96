"""Who keeps copies of whose checkpoints in memory: settled a moment after something has changed, then told.

pods with a keeper that is reached ──> rings, as few new ones as can be ──> Buddies to each pod for which it differs
           ^                                                                   │
           └──── Held.copies: who has what <──── keepers <─────────────────────┘
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from unbroken_core.coordinator.decisions import Consultable, Wait
from unbroken_core.coordinator.memory.rings import Wish, arrange
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.phases import Forming, Interrupted, KeepersWait, Planned, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.messages import PodObservation
from unbroken_core.protocol.settings import HOST
from unbroken_core.ranks.buddies import CopyHolder
from unbroken_core.ranks.worlds import World
from unbroken_core.vocabulary.reasons import Reason

SETTLE_S = 1.0
"""Pods of a job come one by one: rings are made for those that came together."""
_MOST_PIN_S, _PIN_S_PER_POD = 0.1, 0.0001
"""So often, at most, it is looked which steps are not to be overwritten: with thousands of pods that takes a while.
With few it is looked soon, since saves are skipped until a step that was copied is protected."""
KEEPERS_AWAITED_S = 10.0
"""After a fault, so long at most a plan waits for what only pods have that are away; without it steps would be lost."""
MOST_AWAITED_S = 3 * KEEPERS_AWAITED_S
"""So long at most it waits in a row, whoever comes meanwhile: pods that come and go hold up no plan for ever."""
_MAX_NAMES = 3
_UNNAMED = ""
"""In place of uids that are not known yet: pods that the operator will name, to a coordinator that has just begun."""
_LOOK_S = 5.0
"""How often it is looked whether copies that pods need not keep any more are safe elsewhere."""


def settle_copies(job: JobState, now_s: float) -> float:
    """Make rings of the world in force once it has changed, and tell them. Return when to look again."""
    if not job.settings.copies or not isinstance(job.phase, (Planned, Running)):
        return math.inf
    if job.copying.note_lost(job.world.iteration, job.members.by_uid, job.checkpoints.num_reached):
        # At once: a rank may wait for the keeper of one that is no more.
        _tell(job)
    return min(_settle_rings(job, now_s), _settle_pins(job, now_s))


def _settle_pins(job: JobState, now_s: float) -> float:
    copying = job.copying
    if copying.pins_due_s is None:
        is_any = copying.arrangement.rings or copying.safe or copying.next
        if job.checkpoints.version == copying.pins_version or not is_any:
            return math.inf
        copying.pins_due_s = now_s + min(_PIN_S_PER_POD * len(job.members.by_uid), _MOST_PIN_S)
    if now_s < copying.pins_due_s:
        return copying.pins_due_s
    copying.pins_due_s, copying.pins_version = None, job.checkpoints.version
    if copying.pin(job.checkpoints, job.settings.copies):
        _tell(job)
    return math.inf


def _tell(job: JobState) -> None:
    for uid, buddies in job.copying.news(job.checkpoints, job.settings.copies, job.numbers.term).items():
        job.send(job.members.by_uid[uid], buddies)


def _settle_rings(job: JobState, now_s: float) -> float:
    copying = job.copying
    basis = (job.checkpoints.num_reached, job.world.iteration, id(job.cluster.pods), job.numbers.term)
    has_changed = basis != copying.basis
    if copying.due_s is None:
        if not has_changed and not copying.has_left:
            return math.inf
        copying.due_s = now_s + (SETTLE_S if has_changed else _LOOK_S)
    elif has_changed:
        copying.due_s = min(copying.due_s, now_s + SETTLE_S)
    if now_s < copying.due_s:
        return copying.due_s
    copying.due_s = None
    if has_changed:
        copying.basis = basis
        _rearrange(job)
    _tell(job)
    if copying.has_left:
        copying.due_s = now_s + _LOOK_S
        return copying.due_s
    return math.inf


def repeat_buddies(job: JobState, member: Member) -> None:
    """Tell an agent that has come back what the one before it was told; if its keeper is not reached, it forgets it."""
    told = job.copying.told
    if member.uid in told and not job.checkpoints.is_reached(member.uid):
        del told[member.uid]
    elif member.uid in told:
        job.send(member, told[member.uid])


def note_return(job: JobState, now_s: float) -> None:
    """Note that a pod is back that has been in the job before; who comes after it within the time adds none to it."""
    if now_s >= job.returned_s + KEEPERS_AWAITED_S:
        job.returned_s = now_s


def await_keepers(job: JobState, phase: Consultable, world: World, now_s: float) -> Wait | None:
    """Return what to do while keepers may be reached without which the newest step is lost; None: nobody is awaited.

    An agent that was killed starts again, and with it its keeper, whose memory has stayed. A plan that is made before
    they are heard again would go back further, or to the beginning: the keeper may have a part of the step that nobody
    else has, or be the one that has to fetch it. Pods that were cut off together come back one by one, so those that
    are missing have their time once the first of them is back. `world`: the one that is to be planned.
    """
    table, members, pods = job.checkpoints, job.members.by_uid, job.cluster.pods
    returned_until_s = job.returned_s + KEEPERS_AWAITED_S
    is_blind = job.cluster.num_running is None and now_s < returned_until_s
    if not job.settings.copies or not (table.away or table.mute or table.unheard or is_blind):
        return None
    known = {*table.away, *table.unheard} - members.keys()
    missing = {uid for uid in known if _may_come_back(pods.get(uid))}
    unheard = missing.difference(table.away)
    if is_blind:
        unheard.add(_UNNAMED)
    at_s = phase.since_s if isinstance(phase, Forming) else phase.at_s
    until_s = max(at_s + KEEPERS_AWAITED_S, returned_until_s)
    ends = {uid: until_s for uid in (*table.away, *unheard) if uid in members or uid in missing}
    if is_blind:
        ends[_UNNAMED] = returned_until_s
    there = [uid for uid in ends if uid in table.away and now_s < until_s]
    # One that has just come may come long after the fault, and its keeper a moment after it.
    for uid in table.mute:
        if uid in members:
            ends[uid] = max(ends.get(uid, 0.0), members[uid].joined_at_s + KEEPERS_AWAITED_S)
    mute = [uid for uid in (*table.mute, *unheard) if now_s < ends.get(uid, now_s)]
    seated = [uid for uid in (*there, *mute) if uid in members and members[uid].ranks]
    # Where ranks are given anew, or the world has another size, any pod may have to read what others have.
    is_kept = world.world_size == job.world.size and isinstance(phase, Interrupted) and phase.job_rung_began is None
    takers = world.promoted if is_kept else [uid for uid in mute if uid in members]
    awaited = table.awaited(there, seated if is_kept else (), mute, takers)
    if awaited:
        return _wait_for(job, phase, awaited, min(ends[uid] for uid in awaited), now_s)
    if table.steps or not unheard or now_s >= returned_until_s:
        return None
    # Who came back first has no part of any: the others may have all of one.
    return _wait_for(job, phase, sorted(unheard), returned_until_s, now_s)


def _wait_for(job: JobState, phase: Consultable, awaited: Sequence[str], until_s: float, now_s: float) -> Wait | None:
    before = phase.keepers
    is_new = before is None or now_s > before.until_s + KEEPERS_AWAITED_S
    since_s = now_s if before is None or is_new else before.since_s
    if now_s >= since_s + MOST_AWAITED_S:
        return None
    until_s = min(until_s, since_s + MOST_AWAITED_S)
    text = f"{_wait_text(job, awaited)}; otherwise goes on without it"
    reason = Reason.WAITING_FOR_WORKERS if isinstance(phase, Forming) else Reason.RECOVERING
    phase = replace(phase, keepers=KeepersWait(since_s, until_s))
    return Wait(until_s, StatusText(reason, text, until_s), phase)


def _wait_text(job: JobState, awaited: Sequence[str]) -> str:
    table, members, pods = job.checkpoints, job.members.by_uid, job.cluster.pods
    # Of the others the rendezvous hears: only their keepers are still to come.
    missing = [uid for uid in awaited if uid not in table.mute]
    known = {uid: members[uid].pod if uid in members else pods[uid].pod for uid in awaited if uid != _UNNAMED}
    names = [known.get(uid, "pods that the operator has yet to name") for uid in missing or awaited]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    who = f"{', '.join(names[:_MAX_NAMES])}{more}"
    if not missing:
        return f"waits for the keeper of {who}, without which the newest checkpoint in memory cannot be restored"
    if table.away.isdisjoint(missing):
        return (
            f"waits for {who} to be heard again, which may have parts of a checkpoint in memory that no other pod has"
        )
    return f"waits for {who} to be heard again, where alone the newest checkpoint in memory can be read whole"


def _may_come_back(pod: PodObservation | None) -> bool:
    """Return whether a pod that was never heard may have something: it has started, and not ended."""
    return pod is not None and not pod.is_waiting and not pod.is_ended


def wish_of(job: JobState) -> Wish:
    """Return what the job asks for, in the layers of its tree: where the script names them, the outermost one."""
    layers = (*(layer.name for layer in job.members.ranking.rules.layers), HOST)
    across = job.settings.across
    return Wish(job.settings.copies, layers.index(across) if across in layers else 0, layers)


def _rearrange(job: JobState) -> None:
    ranking, by_uid = job.members.ranking, job.members.by_uid
    wish, keepers = wish_of(job), []
    for uid in job.checkpoints.peers():
        member = by_uid.get(uid)
        if member is not None:
            named = ranking.domains(uid)
            path = (*named, *("" for _ in range(ranking.num_layers - len(named))), member.node)
            keepers.append(CopyHolder(uid, path, is_active=bool(member.ranks)))
    copying = job.copying
    copying.arrangement = arrange(keepers, wish, copying.arrangement.rings)
    job.checkpoints.assign(copying.arrangement.owners, copying.arrangement.domains)
