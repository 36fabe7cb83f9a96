"""Findings of the pods' watches: noted always, and acted on where the job wants that (health.mode: Act).

A pod that is blamed gives its ranks to a spare: after a common step while all is well, at once where its iteration is
interrupted already. It gets no new process. Without a ready spare nobody is blamed: the job goes on as long as it can,
and recovers as without findings. The same holds where the rung `pod` has no budget
left, or no layer lets a spare take the ranks: a finding ends no job, and makes none smaller.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unbroken_core.coordinator.faults import inspect
from unbroken_core.coordinator.health.stragglers import note_moved, settle_stragglers
from unbroken_core.coordinator.state.health_table import HealthTable
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Interrupted, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.log_rules.rules import LogVerdict
from unbroken_core.protocol.settings import HealthMode, StragglerMode
from unbroken_core.ranks.worlds import World
from unbroken_core.recovery.health import BREAKER_S, BUDGET_S, SWITCH_S, Blame, Strike, assess, assess_preflights
from unbroken_core.vocabulary.findings import LOG_LINES, PREFLIGHT, Health, Verdict
from unbroken_core.vocabulary.layers import replacement_depth
from unbroken_core.vocabulary.reasons import Cause, Rung, WorkerPhase

_LOOK_AGAIN_S = 1.0
"""Whether layers let a spare take the ranks is a plan of the whole job."""


def receive_health(job: JobState, member: Member, health: Health | None, now_s: float) -> None:
    """Note what the watch of a pod says, and what lines of its workers say is slow by a log rule of the job."""
    findings = () if health is None else health.findings
    watched = tuple(each for each in findings if each.check != LOG_LINES and each.check not in PREFLIGHT)
    if job.settings.health is not HealthMode.OFF:
        # A pod without a watch may have lines to tell.
        health = None if health is None or not watched else replace(health, findings=watched)
        job.health.note(member.uid, health, now_s)
    if job.settings.preflight is not HealthMode.OFF:
        own = tuple(each for each in findings if each.check in PREFLIGHT)
        job.health.note_preflight(member.uid, own, now_s, may_fail=job.settings.preflight is HealthMode.ACT)
    slow = {rule.name for rule in job.settings.log_rules if rule.verdict is LogVerdict.SLOW}
    lines = (each for each in findings if each.check == LOG_LINES and each.entity in slow)
    job.health.note_lines(member.uid, tuple(replace(each, verdict=Verdict.DEGRADED) for each in lines))


def settle_health(job: JobState, now_s: float) -> float:
    """Blame who is to be blamed now, and acquit others. Return when to look again."""
    settle_stragglers(job, now_s)
    table, members = job.health, job.members
    believed = [uid for uid in members.unfit if uid in members.by_uid]
    if not table.strikes and not table.failed and not believed:
        _note(table, Blame({}))
        return math.inf
    recent = {uid: at_s for uid, at_s in table.blamed_s.items() if now_s - at_s < BREAKER_S}
    table.blamed_s = dict(recent)
    table.blames_s = [at_s for at_s in table.blames_s if now_s - at_s < BUDGET_S]
    table.unmovable_s = {
        uid: at_s for uid, at_s in table.unmovable_s.items() if uid in table.strikes or uid in table.failed
    }
    domains = {uid: _domain(job, uid) for uid in table.strikes}
    blame = assess(table.strikes, domains, believed, recent, len(table.blames_s))
    lately = _failed_lately(table, now_s)
    of_preflight = assess_preflights(table.failed, len(table.preflights), believed, lately, len(table.blames_s))
    _note(table, replace(blame, held="; ".join(filter(None, (blame.held, of_preflight.held)))))
    for uid in believed:
        if uid not in table.strikes and uid not in table.failed:
            members.note_unfit(members.by_uid[uid], "")
    due_s = [at_s + BREAKER_S for at_s in recent.values()] + [at_s + BUDGET_S for at_s in table.blames_s[:1]]
    due_s += [at_s + BUDGET_S for at_s in table.failed_s.values()]
    due_s += [at_s + _LOOK_AGAIN_S for at_s in table.unmovable_s.values() if at_s + _LOOK_AGAIN_S > now_s]
    for uid, strike in blame.blamed.items():
        if uid in members.unfit or not _acts(job, strike):
            continue
        # A switch is known by the second of its links that goes down.
        wait_s = SWITCH_S if strike.is_link and domains[uid] else 0.0
        if now_s < table.since_s[uid] + wait_s:
            due_s.append(table.since_s[uid] + wait_s)
        elif _may_blame(job, members.by_uid[uid], strike, now_s):
            table.blamed_s[uid] = now_s
            _blame(job, uid, strike, now_s)
    for uid, strike in of_preflight.blamed.items():
        if uid not in members.unfit and _may_blame(job, members.by_uid[uid], strike, now_s):
            table.failed_s[uid] = now_s
            _blame(job, uid, strike, now_s)
            break  # One, and no other one soon.
    return min(due_s, default=math.inf)


def _failed_lately(table: HealthTable, now_s: float) -> Mapping[str, float]:
    """Return when pods were blamed for their preflight, and forget what was long ago."""
    table.failed_s = {uid: at_s for uid, at_s in table.failed_s.items() if now_s - at_s < BUDGET_S}
    return table.failed_s


def _blame(job: JobState, uid: str, strike: Strike, now_s: float) -> None:
    """Take ranks, or the place among the spares, from a pod."""
    member = job.members.by_uid[uid]
    job.health.blames_s.append(now_s)
    if strike.is_slow:
        note_moved(job, uid)
    job.members.note_unfit(member, strike.text, strike.cause)
    inspect(job, member, now_s)


def _acts(job: JobState, strike: Strike) -> bool:
    """Return whether the job wants ranks to move for it."""
    if strike.is_slow:
        return job.settings.stragglers is StragglerMode.MOVE
    return job.settings.health is HealthMode.ACT


def _note(table: HealthTable, blame: Blame) -> None:
    if table.blame != blame:
        table.blame = blame
        table.num_changes += 1


def _may_blame(job: JobState, member: Member, strike: Strike, now_s: float) -> bool:
    """Return whether a pod may lose its ranks, or its place among the spares, for what was found."""
    if not member.ranks:
        return isinstance(job.phase, Running)
    others = [uid for uid in job.members.ready if uid not in job.members.active and not job.health.is_doubted(uid)]
    if not others or not _may_promote(job, strike.cause, now_s):
        return False
    if isinstance(job.phase, Running):
        # Where every move restarts the processes from a checkpoint, a suspicion is not worth one.
        is_worth_it = strike.is_fatal or (job.settings.is_in_process and job.settings.timeouts.drain_s > 0)
        if not is_worth_it:
            return False
        is_planned = job.rules.layers and not job.rules.has_code
        return _has_taker(job, member, now_s) if is_planned else _is_enough(job, member, others)
    # What interrupted it may have nothing to do with a suspicion.
    return isinstance(job.phase, Interrupted) and strike.is_fatal and _is_enough(job, member, others)


def _may_promote(job: JobState, cause: Cause, now_s: float) -> bool:
    """Return whether a spare may be promoted for this: without the rung, the job would shrink or end."""
    if not job.settings.counts(cause):
        return Rung.POD in job.budgets.allowed
    return job.budgets.is_possible(Rung.POD, now_s)


def _has_taker(job: JobState, member: Member, now_s: float) -> bool:
    """Return whether spares may take all ranks of a pod, where layers say which may."""
    seen_s = job.health.unmovable_s.get(member.uid, -math.inf)
    if now_s < seen_s + _LOOK_AGAIN_S:
        return False
    ranking = job.members.ranking
    ranking.exclude({member.uid: member.places.keys()})
    outcome = ranking.following(may_promote=True, may_grow=False)
    is_whole = isinstance(outcome, World) and not outcome.num_closed and outcome.world_size >= job.world.size
    ranking.exclude({})
    if not is_whole:
        job.health.unmovable_s[member.uid] = now_s
    return is_whole


def _is_enough(job: JobState, member: Member, others: Sequence[str]) -> bool:
    """Return whether these pods may take all ranks of one, and those that others have lost in an interruption.

    Nobody plans while workers still leave, so workers are counted: the ready ones of pods that may stand in for this
    one, whatever layers forbid. Pods that lost their ranks are ready again, and no spares for anybody.
    """
    ranking, by_uid, layers = job.members.ranking, job.members.by_uid, job.rules.tree_layers()
    limited = [depth for depth, layer in enumerate(layers[1:-1], 1) if layer.max_ranks is not None]
    depth = max(replacement_depth(layers), *limited, 0)

    def place(uid: str) -> tuple[str, ...]:
        return (*ranking.domains(uid), uid)[:depth]

    own = place(member.uid)
    free = (seat.state.phase for uid in others if place(uid) == own for seat in by_uid[uid].places.values())
    num_free = sum(phase is WorkerPhase.READY for phase in free)
    kept = (by_uid[uid] for uid in job.members.active if uid not in job.members.out and uid != member.uid)
    return num_free >= job.world.size - sum(len(each.ranks) for each in kept)


def _domain(job: JobState, uid: str) -> str:
    names = job.members.ranking.domains(uid)
    return names[-1] if names else ""
