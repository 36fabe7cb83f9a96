"""Findings of the pods' watches: noted always, and acted on where the job wants that (health.mode: Act).

A pod that is blamed gives its ranks to a spare: after a common step while all is well, at once where its iteration is
interrupted already. It gets no new process. Without a ready spare nobody is blamed: the job goes on as long as it can,
and recovers as without findings. The same holds where the rung `pod` has no budget left, no layer lets a spare take the
ranks, or fewer than minReplicas pods would be left: a finding ends no job, and makes none smaller. If the spare is lost
while all are led to a common step, the blame is taken back, nobody moves, and the budget of blames is as before. If it
is lost later, a pod that is only suspected has ranks again rather than that some are missing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unbroken_core.coordinator.faults import inspect
from unbroken_core.coordinator.health.stragglers import note_moved, settle_stragglers
from unbroken_core.coordinator.health.takers import (
    LOOK_AGAIN_S,
    are_there_still,
    can_take,
    has_enough,
    takers_of,
)
from unbroken_core.coordinator.moves import stays_until_s
from unbroken_core.coordinator.state.health_table import HealthTable
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.members import Newcomers
from unbroken_core.coordinator.state.phases import Interrupted, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.log_rules.rules import LogVerdict
from unbroken_core.protocol.settings import HealthMode, StragglerMode
from unbroken_core.recovery.health import (
    BREAKER_S,
    BUDGET_S,
    SWITCH_S,
    Blame,
    Strike,
    assess,
    assess_preflights,
    strike_of,
    why_spent,
)
from unbroken_core.vocabulary.findings import LOG_LINES, PAIRS, PREFLIGHT, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause, Rung

_FEW = 64
"""Pods that something speaks against: a finding more is judged at once."""
_PAUSE_S = 0.5
"""Between two judgements of more."""


def receive_health(job: JobState, member: Member, health: Health | None, now_s: float) -> None:
    """Note what the watch of a pod says, and what lines of its workers say is slow by a log rule of the job."""
    findings = () if health is None else health.findings
    # What comes of tests of pairs is the coordinator's own to say.
    watched = tuple(each for each in findings if each.check not in (LOG_LINES, *PREFLIGHT, PAIRS))
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
    """Blame who is to be blamed now, and acquit others. Return when to look again.

    All is judged anew when something has changed that it rests on, and when something is due: what most events of a
    job change makes no difference, and findings on all pods of a large job must not hold its recoveries up.
    """
    table = job.health
    if not (table.doubts or job.members.unfit or job.paces.stragglers):
        table.basis = None
        _note(table, Blame({}))
        return math.inf
    basis = _basis(job, now_s)
    if basis == table.basis and now_s < table.due_s:
        return table.due_s
    if not _is_put_off(table, now_s):
        table.basis, table.due_s, table.judged_s = basis, _judge(job, now_s), now_s
    is_open = now_s >= table.due_s or table.basis != _basis(job, now_s)
    return table.judged_s + _PAUSE_S if is_open else table.due_s


def is_settled(job: JobState, now_s: float) -> bool:
    """Return whether nothing has changed since all was judged, by the judgement itself or by what came of it.

    Also where many findings came lately, and are to be judged together.
    """
    table = job.health
    return table.basis is None or table.basis == _basis(job, now_s) or _is_put_off(table, now_s)


def _is_put_off(table: HealthTable, now_s: float) -> bool:
    """Return whether an alarm of many pods was judged just now: each judgement takes as long as there are findings."""
    return len(table.strikes) + len(table.failed) > _FEW and now_s < table.judged_s + _PAUSE_S


def _basis(job: JobState, now_s: float) -> tuple[object, ...]:
    """Return another value whenever it may be somebody else who is to be blamed; costs O(1)."""
    paces, members = job.paces, job.members
    return (
        job.health.num_changes,
        (paces.iteration, paces.judged, len(paces.stragglers), len(paces.moved)),
        members.num_shifts,
        members.ranking.num_placed,
        job.world.iteration,
        type(job.phase),
        job.budgets.is_possible(Rung.POD, now_s),
    )


def _judge(job: JobState, now_s: float) -> float:
    """Blame and acquit by all that is known. Return when time alone changes something."""
    settle_stragglers(job, now_s)
    table, members = job.health, job.members
    believed = [uid for uid in members.unfit if uid in members.by_uid]
    if not table.doubts and not believed:
        _note(table, Blame({}))
        return math.inf
    newcomers = members.newcomers(now_s, job.settings.timeouts.last_call_s)
    _acquit(job, believed, newcomers, now_s)
    believed = [uid for uid in believed if uid in members.unfit]
    recent = {uid: at_s for uid, at_s in table.blamed_s.items() if now_s < at_s + BREAKER_S}
    table.blamed_s = dict(recent)
    table.blames_s = [at_s for at_s in table.blames_s if now_s < at_s + BUDGET_S]
    table.vain_s = [at_s for at_s in table.vain_s if now_s < at_s + BREAKER_S]
    spent = why_spent(len(table.blames_s), len(table.vain_s))
    table.takers = {uid: takers for uid, takers in table.takers.items() if uid in members.unfit}
    table.unmovable_s = {
        uid: at_s for uid, at_s in table.unmovable_s.items() if uid in table.strikes or uid in table.failed
    }
    domains = {uid: _domain(job, uid) for uid in table.links} if members.ranking.num_layers else {}
    blame = assess(table.strikes, domains, believed, recent, spent)
    lately = _failed_lately(table, now_s)
    of_preflight = assess_preflights(table.failed, len(table.preflights), believed, lately, spent)
    _note(table, replace(blame, held="; ".join(filter(None, (blame.held, of_preflight.held)))))
    due_s = [at_s + BREAKER_S for at_s in recent.values()] + [at_s + BUDGET_S for at_s in table.blames_s[:1]]
    due_s += [at_s + BREAKER_S for at_s in table.vain_s[:1]] + [at_s + BUDGET_S for at_s in table.failed_s.values()]
    due_s.append(newcomers.until_s)
    due_s += [again_s for uid in table.strikes if now_s < (again_s := stays_until_s(job, uid))]
    for uid, found in blame.blamed.items():
        strike = _acted_on(job, uid, found)
        if strike is None:
            continue
        if uid in members.unfit:
            _sharpen(job, members.by_uid[uid], strike)
            continue
        # A switch is known by the second of its links that goes down.
        wait_s = SWITCH_S if domains.get(uid) else 0.0
        if now_s < table.since_s[uid] + wait_s:
            due_s.append(table.since_s[uid] + wait_s)
        elif _may_blame(job, members.by_uid[uid], strike, newcomers, now_s):
            table.blamed_s[uid] = now_s
            _blame(job, uid, strike, now_s)
    for uid, strike in of_preflight.blamed.items():
        if uid not in members.unfit and _may_blame(job, members.by_uid[uid], strike, newcomers, now_s):
            table.failed_s[uid] = now_s
            _blame(job, uid, strike, now_s)
            break  # One, and no other one soon.
    due_s += [at_s + LOOK_AGAIN_S for at_s in table.unmovable_s.values() if at_s + LOOK_AGAIN_S > now_s]
    return min(due_s, default=math.inf)


def _acquit(job: JobState, believed: Sequence[str], newcomers: Newcomers, now_s: float) -> None:
    """Take back a blame that nothing speaks for any more, that moves nothing while all train, or that is no more than
    a suspicion where the job cannot go on without the pod."""
    table, members = job.health, job.members
    for uid in believed:
        member = members.by_uid[uid]
        is_kept = _is_in_vain(job, member, newcomers, now_s) or _is_missed(job, member, newcomers)
        strike = table.strikes.get(uid)
        is_doubted = uid in table.failed or (strike is not None and _acted_on(job, uid, strike) is not None)
        if is_doubted and not is_kept:
            continue
        if table.is_doubted(uid) and member.ranks:
            table.give_back(uid, now_s)
        members.note_unfit(member, "")


def _failed_lately(table: HealthTable, now_s: float) -> Mapping[str, float]:
    """Return when pods were blamed for their preflight, and forget what was long ago."""
    table.failed_s = {uid: at_s for uid, at_s in table.failed_s.items() if now_s < at_s + BUDGET_S}
    return table.failed_s


def _blame(job: JobState, uid: str, strike: Strike, now_s: float) -> None:
    """Take ranks, or the place among the spares, from a pod."""
    member = job.members.by_uid[uid]
    job.health.blames_s.append(now_s)
    if strike.is_slow:
        note_moved(job, uid)
    job.members.note_unfit(member, strike.text, strike.cause)
    inspect(job, member, now_s)


def _sharpen(job: JobState, member: Member, strike: Strike) -> None:
    """Let a pod whose ranks move, or have moved, as it was slow be what it is known to be since: broken."""
    if member.unfit_cause is Cause.STRAGGLER and not strike.is_slow:
        job.members.note_unfit(member, strike.text, strike.cause)


def _acted_on(job: JobState, uid: str, strike: Strike) -> Strike | None:
    """Return for what the job wants ranks to leave a pod that this speaks against; None: it wants them to stay.

    What a watch has found hides no straggler where the job acts on stragglers alone.
    """
    if _acts(job, strike):
        return strike
    slow = strike_of(Health(job.health.slow.get(uid, ())))
    return slow if slow is not None and _acts(job, slow) else None


def _acts(job: JobState, strike: Strike) -> bool:
    """Return whether the job wants ranks to move for it."""
    if strike.is_slow:
        return job.settings.stragglers is StragglerMode.MOVE
    return job.settings.health is HealthMode.ACT


def _note(table: HealthTable, blame: Blame) -> None:
    if table.blame != blame:
        table.blame = blame
        table.num_changes += 1


def _may_blame(job: JobState, member: Member, strike: Strike, newcomers: Newcomers, now_s: float) -> bool:
    """Return whether a pod may lose its ranks, or its place among the spares, for what was found."""
    if isinstance(job.phase, Running):
        # Where every move restarts the processes from a checkpoint, a suspicion is not worth one.
        is_lossless = job.settings.is_in_process and job.settings.timeouts.drain_s > 0
        is_put_off = now_s < stays_until_s(job, member.uid)
        if member.ranks and not strike.is_fatal and (is_put_off or not is_lossless):
            return False
    # What interrupted it may have nothing to do with a suspicion.
    elif not (isinstance(job.phase, Interrupted) and member.ranks and strike.is_fatal):
        return False
    return _finds_takers(job, member, strike.cause, newcomers, now_s)


def _is_in_vain(job: JobState, member: Member, newcomers: Newcomers, now_s: float) -> bool:
    """Return whether a pod that is blamed still has its ranks, all train on, and nobody can take them any more."""
    takers = job.health.takers.get(member.uid)
    if takers is None or not member.ranks or not isinstance(job.phase, Running):
        return False
    if are_there_still(job, member, takers):
        return False
    return not _finds_takers(job, member, member.unfit_cause, newcomers, now_s)


def _is_missed(job: JobState, member: Member, newcomers: Newcomers) -> bool:
    """Return whether ranks are lost without a pod that is only suspected, as who was to take them is lost as well."""
    if not isinstance(job.phase, Interrupted) or not job.health.is_suspected(member.uid):
        return False
    rests_on = job.health.takers.get(member.uid)
    if rests_on is not None and are_there_still(job, member, rests_on):
        # Layers may let them take the ranks by a way that counting workers does not see.
        return False
    return not has_enough(job, member, takers_of(job, member, newcomers))


def _finds_takers(job: JobState, member: Member, cause: Cause, newcomers: Newcomers, now_s: float) -> bool:
    """Return whether others can stand in for this pod; then its blame rests on them."""
    takers = takers_of(job, member, newcomers)
    if not can_take(job, member, takers, cause, now_s):
        return False
    job.health.takers[member.uid] = takers
    return True


def _domain(job: JobState, uid: str) -> str:
    names = job.members.ranking.domains(uid)
    return names[-1] if names else ""
