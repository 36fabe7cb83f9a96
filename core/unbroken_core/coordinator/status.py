"""The status of a job, as the coordinator reports it.

An operator reads a report of bounded size, with names of Kubernetes and times below thirty years, or none of it. What
pods and scripts say has other bounds; so here it is put into those of a report, and no pod can silence its job.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from unbroken_core.coordinator.health.stragglers import has_untold
from unbroken_core.coordinator.memory.choosing import memory_status
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Forming, Interrupted, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.bounds import MAX_DETAIL, MAX_RANK_SECONDS, MAX_SECONDS
from unbroken_core.protocol.messages import (
    PROTOCOL,
    HealthStatus,
    JobStatus,
    PodFinding,
    PodStatus,
    Recovery,
    TimeSpent,
)
from unbroken_core.protocol.settings import HealthMode
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.findings import LOG_LINES, MAX_FINDINGS, STRAGGLERS, WATCH, Finding
from unbroken_core.vocabulary.names import plain_domains, plain_name
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Spent

_MAX_TEXTS = 256 << 10
"""Bytes of JSON of all findings, and of the details and stacks of all recoveries."""
_WIDEST = 12
"""Bytes of JSON that one character may take."""
_SHORT = 100
_WATCH_S = 60.0
"""A watch that has told nothing for so long while all train is not awaited any more: it begins within seconds."""
_FEW = 8
"""Findings of one pod that are told before others of it, where there are too many; and of slow ranks and lines."""


def build_pods(job: JobState) -> tuple[PodStatus, ...]:
    """Return the pods in the order of the tree; with thousands, all but a small part of the work of a status."""
    members = job.members
    return tuple(_pod_status(job, members.by_uid[uid]) for uid in members.ranking.ordered(members.by_uid))


def build_status(
    job: JobState, revision: int, now_s: float, wall: Callable[[float], str], pods: tuple[PodStatus, ...]
) -> JobStatus:
    """Return the status; `pods` are those of this revision."""
    members = job.members
    gained_s, ran_for_s = job.progress.totals(now_s)
    world, report, phase = job.world, job.report, job.phase.kind
    world_size = 0 if phase is JobPhase.FAILED else world.size
    num_ready = sum(map(len, members.ready.values()))
    spare = sum(len(local_ranks) for uid, local_ranks in members.ready.items() if not members.by_uid[uid].ranks)
    if world.iteration < 0:
        spare = max(num_ready - job.rules.wanted_ranks, 0)
    return JobStatus(
        protocol=PROTOCOL,
        job=job.settings.job,
        term=job.numbers.term,
        revision=revision,
        phase=phase,
        reason=report.reason,
        message=report.message if report.until_s is None else f"{report.message}, at {_clock(wall(report.until_s))}",
        iteration=world.iteration,
        world_size=world_size,
        spare_ranks=spare,
        lost_ranks=max(job.rules.wanted_ranks - world_size, 0),
        pods=pods,
        restarts_by_rung={rung.value: count for rung, count in job.history.by_rung.items() if count},
        restarts_by_cause={cause.value: count for cause, count in job.history.by_cause.items() if count},
        recoveries=_fitting(tuple(map(_plain, job.history.to_messages(wall)))),
        max_step=job.progress.max_step,
        ettr=job.progress.ettr(now_s),
        refused=tuple(f"{pod}: {why}" for (_uid, pod), why in job.refused.items()),
        broken_spares=job.history.num_broken_spares,
        memory=_memory_status(job) if job.checkpoints.is_used else None,
        gained_s=min(gained_s, MAX_SECONDS),
        ran_for_s=None if ran_for_s is None else min(ran_for_s, MAX_SECONDS),
        time=_bounded(job.progress.account.spent(now_s)),
        still_for_s=min(job.progress.still_for_s(now_s), MAX_SECONDS),
        health=_health_status(job, now_s) if job.health.by_uid or job.health.lines or job.paces.measured else None,
    )


def note_time(job: JobState, now_s: float) -> None:
    """Tell the account what the job does now; after each event."""
    if job.progress.is_away:
        return
    phase = job.phase
    term = None
    if isinstance(phase, Forming) or (
        isinstance(phase, Interrupted) and phase.shortage_began is not None and phase.enough_at_s is None
    ):
        term = Spent.WAITING
    elif not isinstance(phase, Running):
        term = Spent.RESTART
    held = len(job.members.by_uid) * job.rules.ranks_per_pod
    job.progress.account.look(now_s, term, held, job.rules.wanted_ranks)


def _memory_status(job: JobState) -> MemoryStatus:
    copies = job.settings.copies
    status = memory_status(job.checkpoints, job.recall, job.world.iteration)
    protected = job.copying.protected(job.checkpoints, copies) if copies else None
    said = (job.copying.arrangement.across, job.checkpoints.copy_problem() if copies else "")
    if not copies:
        return status
    step = -1 if protected is None else protected.step
    return replace(status, protected_step=step, across="; ".join(filter(None, said))[:1000])


def _health_status(job: JobState, now_s: float) -> HealthStatus:
    table, members = job.health, job.members
    found = [(uid, finding) for uid, finding in table.findings() if uid in members.by_uid]

    def order(item: tuple[str, Finding]) -> tuple[int, str, str]:
        return -item[1].verdict.severity, members.by_uid[item[0]].pod, item[1].entity

    found.sort(key=order)
    shown, left = [], _MAX_TEXTS
    for uid, finding in sorted(_chosen(found), key=order):
        left -= _size(finding.entity, finding.code, finding.action, finding.message)
        if left < 0:
            break
        shown.append(PodFinding(members.by_uid[uid].pod, plain_name(members.by_uid[uid].node), finding))
    unchecked = table.unchecked + Counter({WATCH: _num_unwatched(job, now_s)})
    if has_untold(job, now_s):
        unchecked[STRAGGLERS] = len(members.active)
    return HealthStatus(
        table.num_telling,
        tuple(shown),
        len(found),
        tuple(sorted(unchecked.most_common(MAX_FINDINGS))),
        table.blame.held[:MAX_DETAIL],
        len(job.paces.measured),
    )


def _num_unwatched(job: JobState, now_s: float) -> int:
    """Return how many pods with ranks have no watch, as those that are older than a change of health.mode, or one that
    has told nothing although there was time to."""
    phase = job.phase
    if job.settings.health is HealthMode.OFF or not isinstance(phase, Running) or now_s - phase.since_s <= _WATCH_S:
        return 0
    return sum(uid not in job.health.told for uid in job.members.active)


def _chosen(found: Sequence[tuple[str, Finding]]) -> Sequence[tuple[str, Finding]]:
    """Return what is told of all findings, the worst first: no pod hides those of others, and neither of the two kinds,
    which have a condition each, those of the other one."""
    if len(found) <= MAX_FINDINGS:
        return found
    counts: Counter[tuple[str, bool]] = Counter()
    few: dict[bool, list[tuple[str, Finding]]] = {True: [], False: []}
    more: dict[bool, list[tuple[str, Finding]]] = {True: [], False: []}
    for uid, finding in found:
        is_slow = finding.check in (STRAGGLERS, LOG_LINES)
        counts[uid, is_slow] += 1
        (few if counts[uid, is_slow] <= _FEW else more)[is_slow].append((uid, finding))
    slow, devices = ([*few[kind], *more[kind]] for kind in (True, False))
    kept = devices[: MAX_FINDINGS - min(len(slow), _FEW)]
    return [*kept, *slow[: MAX_FINDINGS - len(kept)]]


def _plain(recovery: Recovery) -> Recovery:
    """Return it with names that a status may have."""
    node, domain = plain_name(recovery.node), plain_name(recovery.domain)
    if (node, domain) == (recovery.node, recovery.domain):
        return recovery
    return replace(recovery, node=node, domain=domain)


def _fitting(recoveries: tuple[Recovery, ...]) -> tuple[Recovery, ...]:
    """Return them with the whole details and the stacks of the newest, as many as fit in a report."""
    if _WIDEST * sum(len(text) for item in recoveries for text in _texts(item)) <= _MAX_TEXTS:
        return recoveries
    kept, left = [], _MAX_TEXTS
    for item in reversed(recoveries):
        left -= _size(*_texts(item))
        kept.append(item if left >= 0 else _shortened(item))
    return tuple(reversed(kept))


def _texts(recovery: Recovery) -> tuple[str, ...]:
    return (recovery.detail, *recovery.stack, *(other.detail for other in recovery.others))


def _shortened(recovery: Recovery) -> Recovery:
    others = tuple(replace(other, detail="") for other in recovery.others)
    return replace(recovery, detail=recovery.detail[:_SHORT], stack=(), others=others)


def _size(*texts: str) -> int:
    """Return the bytes of these texts as JSON."""
    return len(json.dumps(texts))


def _bounded(spent: TimeSpent | None) -> TimeSpent | None:
    """Return it with no time that a status may not have: agents have a say in when a world was taken over."""
    if spent is None or all(seconds <= MAX_SECONDS for seconds in vars(spent).values()):
        return spent
    return TimeSpent(
        **{
            name: min(value, MAX_RANK_SECONDS if name.endswith("_rank_s") else MAX_SECONDS)
            for name, value in vars(spent).items()
        }
    )


def _clock(time: str) -> str:
    """Return a time without parts of a second: they would differ each time."""
    whole, dot, _parts = time.partition(".")
    return f"{whole}Z" if dot else time


def _pod_status(job: JobState, member: Member) -> PodStatus:
    return PodStatus(
        pod=member.pod,
        uid=member.uid,
        node=plain_name(member.node),
        role=member.role,
        ranks=tuple(member.ranks[local_rank] for local_rank in sorted(member.ranks)),
        domains=plain_domains(job.members.ranking.names(member.uid)),
        workers=tuple(place.state.phase for place in member.places.values()),
        is_connected=member.session is not None,
        unfit=member.unfit if member.unfit_cause is Cause.DEVICE_FAULT else "",
    )
