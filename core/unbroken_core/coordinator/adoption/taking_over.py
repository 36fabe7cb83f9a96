"""When the world was lost that a new coordinator takes over, and which pods went: it was not there to see it.

Each agent says how long ago its workers entered the iteration, since when it knows that it is over, and how old its
faults are; the operator says which pods went, and how long ago. These are ages on the clock of who says them. They
come from pods, so no loss counts as older than the iteration is by the word of half of the pods that were in it.
"""

from collections import Counter
from dataclasses import replace

from unbroken_core.coordinator.decisions import Adopt
from unbroken_core.coordinator.state.job import Inherited, JobState
from unbroken_core.coordinator.state.phases import Planned
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.messages import Hello
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.history import FaultRecord


def note_ages(member: Member, hello: Hello, now_s: float) -> None:
    """Note since when a pod is in its plan's iteration, since when that is over, and when its last step was made."""
    member.entered_at_s = now_s - hello.entered_ago_s if hello.entered_ago_s > 0 else None
    member.over_at_s = now_s - hello.over_ago_s if hello.over_ago_s > 0 else None
    member.made_at_s = now_s - max(hello.step_ago_s, 0.0)


def entered_s(job: JobState, places: dict[int, Worker], now_s: float) -> float:
    """Return when the iteration that is taken over began, at the earliest that counts."""
    unknown_s = now_s - job.settings.timeouts.heartbeat_s  # Older agents do not say.
    entered = sorted(unknown_s if pod.entered_at_s is None else pod.entered_at_s for pod in _pods(job, places))
    if not entered:
        # None of its pods is left: it had begun when the operator saw the first of them go.
        entered = [min((at_s for _pod, at_s in job.gone_before), default=unknown_s)]
    return min(entered[len(entered) // 2], now_s)


def told_step(job: JobState, adopted: Adopt, now_s: float) -> tuple[int, float]:
    """Return the last step that workers tell of the iteration that is taken over, and when it was made; -1: none."""
    told = [
        (place.state.step, -pod.made_at_s)
        for pod in _pods(job, adopted.places)
        for place in pod.places.values()
        if place.state.iteration == adopted.iteration
    ]
    step, minus_s = max(told, default=(-1, -now_s))
    return step, min(-minus_s, now_s)


def num_held(job: JobState, adopted: Adopt) -> int:
    """Return how many pods the job has, spares too: those that came back, and those that the operator sees."""
    seen = {uid for uid, pod in job.cluster.pods.items() if not (pod.is_waiting or pod.is_ended)}
    return len(seen.union(job.members.by_uid, (uid for uid, _local_rank in adopted.places.values())))


def loss_s(job: JobState, adopted: Adopt, earliest_s: float, now_s: float) -> float | None:
    """Return when the first of the world's ranks was lost, as far as anybody knows; None: nobody knows of a loss."""
    instants, places = [], adopted.places
    for pod in _pods(job, places):
        for place in pod.places.values():
            fault = place.state.fault
            if fault is not None and fault.iteration == adopted.iteration:
                instants.append(place.fault_at_s)
        if pod.over_at_s is not None:
            instants.append(pod.over_at_s)
    missing = {rank for rank in range(adopted.world_size) if rank not in places}
    if missing:
        gone = [at_s for pod, at_s in job.gone_before if missing & set(pod.ranks)]
        instants += gone or [now_s - job.settings.timeouts.heartbeat_s]
    return min(max(min(instants), earliest_s), now_s) if instants else None


def with_name(job: JobState, fault: FaultRecord) -> FaultRecord:
    """Return the fault of a pod that this coordinator never heard, with what the operator knows of it."""
    for pod, at_s in job.gone_before:
        if not fault.pod and set(fault.lost_ranks) & set(pod.ranks):
            learned_s = fault.at_s + fault.detect_s
            known_s = min(max(at_s, fault.at_s), learned_s)
            detail = f"{fault.detail}: it went while no rendezvous was there"
            return replace(fault, pod=pod.pod, node=pod.node, at_s=known_s, detect_s=learned_s - known_s, detail=detail)
    return fault


def name_lost(job: JobState) -> None:
    """Name the pods that were lost with the rendezvous, once the operator has reported them."""
    incident = job.history.running
    if incident is None or incident.found_s is None:
        return
    for fault in [fault for fault in incident.faults.values() if fault.lost_ranks and not fault.pod]:
        named = with_name(job, fault)
        if named is not fault:
            incident.replace_fault(fault, named)
            job.history.num_changes += 1


def inherit(job: JobState, adopted: Adopt, planned_s: float) -> None:
    """Note the recovery that led to the iteration that is taken over, by the word of more than half of its pods."""
    plans = [pod.plan for pod in _pods(job, adopted.places) if pod.plan is not None]
    told = Counter((plan.term, plan.repair) for plan in plans if plan.repair is not None)
    for (term, repair), count in told.most_common(1):
        if repair is not None and 2 * count > len(plans):
            job.inherited = Inherited(term, repair, planned_s, adopted.iteration)
            count_inherited(job)


def count_inherited(job: JobState, counted: tuple[int, int] | None = None) -> None:
    """Count it, once the operator says that nobody has: its coordinator may have been lost right after its plan."""
    job.counted = counted or job.counted
    found = job.inherited
    if found is None or job.counted is None:
        return
    job.inherited, repair = None, found.repair
    if (found.term, repair.number) <= job.counted:
        return
    started_s = found.planned_s - repair.ago_s
    fault = FaultRecord(
        repair.cause,
        "",
        None,
        started_s - repair.detect_s,
        repair.detect_s,
        rank=repair.rank,
        pod=repair.pod,
        node=repair.node,
        domain=repair.domain,
        detail=repair.detail,
    )
    is_under_way = isinstance(job.phase, Planned) and job.world.iteration == found.iteration
    had_other = job.history.running is not None
    if not (found.has_run or is_under_way or had_other):
        return  # It never ran: the recovery that followed counts for both.
    job.history.take_over(repair, fault, started_s, found.iteration)
    if not had_other and not is_under_way:
        job.history.close(found.planned_s)


def _pods(job: JobState, places: dict[int, Worker]) -> list[Member]:
    uids = dict.fromkeys(uid for uid, _local_rank in places.values())
    return [job.members.by_uid[uid] for uid in uids if uid in job.members.by_uid]
