"""Findings of the pods' watches: noted always, and acted on where the job wants that (health.mode: Act).

A pod that is blamed gives its ranks to a spare: after a common step while all is well, at once where its iteration is
interrupted already. It gets no new process. Without a ready spare nobody is blamed: the job goes on as long as it can,
and recovers as without findings.
"""

import math

from unbroken_core.coordinator.faults import inspect
from unbroken_core.coordinator.state.health_table import HealthTable
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Interrupted, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.findings import Health
from unbroken_core.recovery.health import BREAKER_S, SWITCH_S, Blame, Strike, assess
from unbroken_core.settings import HealthMode


def receive_health(job: JobState, member: Member, health: Health | None, now_s: float) -> None:
    """Note what the watch of a pod says."""
    if job.settings.health is not HealthMode.OFF:
        job.health.note(member.uid, health, now_s)


def settle_health(job: JobState, now_s: float) -> float:
    """Blame who is to be blamed now, and acquit others. Return when to look again."""
    table, members = job.health, job.members
    believed = [uid for uid in members.unfit if uid in members.by_uid]
    if not table.strikes and not believed:
        _note(table, Blame({}))
        return math.inf
    recent = {uid: at_s for uid, at_s in table.blamed_s.items() if now_s - at_s < BREAKER_S}
    table.blamed_s = dict(recent)
    domains = {uid: _domain(job, uid) for uid in table.strikes}
    blame = assess(table.strikes, domains, believed, recent)
    _note(table, blame)
    for uid in believed:
        if uid not in table.strikes:
            members.note_unfit(members.by_uid[uid], "")
    due_s = [at_s + BREAKER_S for at_s in recent.values()]
    if job.settings.health is HealthMode.ACT:
        for uid, strike in blame.blamed.items():
            # A switch is known by the second of its links that goes down.
            wait_s = SWITCH_S if strike.is_link and domains[uid] else 0.0
            if uid not in members.unfit and now_s < table.since_s[uid] + wait_s:
                due_s.append(table.since_s[uid] + wait_s)
            elif uid not in members.unfit and _may_blame(job, members.by_uid[uid], strike):
                table.blamed_s[uid] = now_s
                members.note_unfit(members.by_uid[uid], strike.text)
                inspect(job, members.by_uid[uid], now_s)
    return min(due_s, default=math.inf)


def _note(table: HealthTable, blame: Blame) -> None:
    if table.blame != blame:
        table.blame = blame
        table.num_changes += 1


def _may_blame(job: JobState, member: Member, strike: Strike) -> bool:
    """Return whether a pod may lose its ranks, or its place among the spares, for what was found."""
    if not member.ranks:
        return isinstance(job.phase, Running)
    others = (uid for uid in job.members.ready if uid not in job.members.active and uid not in job.health.strikes)
    if next(others, None) is None:
        return False
    if isinstance(job.phase, Running):
        # Where every move restarts the processes from a checkpoint, a suspicion is not worth one.
        return strike.is_fatal or (job.settings.is_in_process and job.settings.timeouts.drain_s > 0)
    # What interrupted it may have nothing to do with a suspicion.
    return isinstance(job.phase, Interrupted) and strike.is_fatal


def _domain(job: JobState, uid: str) -> str:
    names = job.members.ranking.domains(uid)
    return names[-1] if names else ""
