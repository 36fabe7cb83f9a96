"""Stragglers become findings of their pods: told, and moved from where the job wants that (health.stragglers: Move)."""

from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.messages import Pace
from unbroken_core.protocol.settings import StragglerMode
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.stragglers import Slow, find_slow, stage_of
from unbroken_core.vocabulary.findings import STRAGGLERS, WAS_SLOW, Finding, Verdict

_SLACK = 2
"""Windows that a worker may be ahead of what the time since the beginning of its iteration allows."""
_ACTION = "compare its node with others"
_NUM_UNTOLD = 3
"""After so many windows nobody tells that what is not told will not be."""


def receive_paces(job: JobState, member: Member, paces: tuple[Pace, ...], now_s: float) -> None:
    """Note how busy the workers of a pod were, and judge the window once all have told it, or somebody the next."""
    phase = job.phase
    if job.settings.stragglers is StragglerMode.OFF or not isinstance(phase, Running):
        return
    table, since_s = job.paces, job.paces.since_s(job.world.iteration, phase.since_s)
    newest = (now_s - since_s) / job.settings.window_s + _SLACK
    if table.iteration != job.world.iteration:
        table.begin(job.world.iteration)
    for pace in paces:
        is_of_world = pace.iteration == table.iteration and pace.local_rank in member.ranks
        if not is_of_world or not table.window <= pace.window <= newest:
            continue
        if pace.window > table.window:
            if not table.is_judged:
                _judge(job, now_s)
            table.begin_window(pace.window)
        table.told[member.uid, pace.local_rank] = pace
    if not table.is_judged and len(table.told) >= job.world.size:
        _judge(job, now_s)


def settle_stragglers(job: JobState, now_s: float) -> None:
    """Let each straggler's finding say what follows from it now: a rank that has left its pod blames it no more."""
    for uid in {uid for uid, _local_rank in job.paces.stragglers}:
        _tell(job, uid, now_s)


def note_moved(job: JobState, uid: str) -> None:
    """Note that ranks move from a pod because they are slow there."""
    member = job.members.by_uid[uid]
    for owner, local_rank in job.paces.stragglers:
        if owner == uid and local_rank in member.ranks:
            job.paces.moved.setdefault(member.ranks[local_rank], uid)


def has_untold(job: JobState, now_s: float) -> bool:
    """Return whether nobody tells how busy it is, although there was time enough to."""
    phase = job.phase
    if job.settings.stragglers is StragglerMode.OFF or not isinstance(phase, Running):
        return False
    is_known = job.paces.iteration == job.world.iteration and bool(job.paces.told)
    return not is_known and now_s - phase.since_s > _NUM_UNTOLD * job.settings.window_s


def _judge(job: JobState, now_s: float) -> None:
    table = job.paces
    stages: dict[int, dict[Worker, tuple[float, float]]] = {}
    for worker, pace in table.told.items():
        member = job.members.by_uid.get(worker[0])
        if member is not None and worker[1] in member.ranks:
            stage = stage_of(member.ranks[worker[1]], job.world.size, job.settings.pipeline_stages)
            stages.setdefault(stage, {})[worker] = pace.busy_s, pace.step_s
    before = {uid for uid, _local_rank in table.stragglers}
    slow = {worker: found for paces in stages.values() for worker, found in find_slow(paces).items()}
    is_first = not table.measured
    has_changed = table.judge(slow)
    job.health.num_changes += is_first
    if has_changed:
        for uid in before | {uid for uid, _local_rank in table.stragglers}:
            _tell(job, uid, now_s)


def _tell(job: JobState, uid: str, now_s: float) -> None:
    member = job.members.by_uid.get(uid)
    if member is None:
        return
    found = sorted((local, slow) for (owner, local), slow in job.paces.stragglers.items() if owner == uid)
    findings = tuple(_finding(job, member, local, slow) for local, slow in found)
    job.health.note_slow(uid, findings, now_s)


def _finding(job: JobState, member: Member, local_rank: int, slow: Slow) -> Finding:
    rank = member.ranks.get(local_rank)
    text = (
        f"in two windows busy for {slow.busy_s:.3g} s of a step of {slow.step_s:.3g} s, "
        f"{slow.percent:.0f} % longer than its stage ({slow.usual_s:.3g} s)"
    )
    if rank is None:
        text = f"while it had a rank, {text}"
        return Finding(STRAGGLERS, f"worker {local_rank}", Verdict.DEGRADED, WAS_SLOW, _ACTION, text, 2)
    is_elsewhere = job.paces.moved.get(rank, member.uid) != member.uid
    if is_elsewhere:
        text += "; it was so on another pod, too: look at what the script does on this rank"
    may_move = job.settings.stragglers is StragglerMode.MOVE and not is_elsewhere
    verdict = Verdict.SUSPECT if may_move else Verdict.DEGRADED
    return Finding(STRAGGLERS, f"rank {rank}", verdict, "slow-rank", _ACTION, text, 2)
