"""Before the first plan: waiting for the pods, or taking over a job that runs already."""

import math
from dataclasses import replace

from unbroken_core.coordinator.consulting import failed_preflights, first_outcome, plan_when_ready
from unbroken_core.coordinator.copying import await_keepers
from unbroken_core.coordinator.decisions import Adopt, Decision, EndJob, Learn, Wait, at_latest
from unbroken_core.coordinator.ending import decide_unheard_end, was_ending
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.phases import Adoption, Forming
from unbroken_core.protocol.messages import Plan
from unbroken_core.ranks.worlds import Shortage, Worker
from unbroken_core.recovery.ladder import shorten_names
from unbroken_core.vocabulary.plurals import agreed, counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Rung


def decide_forming(job: JobState, phase: Forming, now_s: float) -> Decision:
    """Cut the first plan when it is time, or give up when the startup timeout is over."""
    if phase.adoption is not None:
        return _decide_adoption(job, phase, phase.adoption, now_s)
    unheard_end = decide_unheard_end(job, phase.since_s, now_s)
    if unheard_end is not None:
        return unheard_end
    has_enough = len(job.members.ready) >= job.settings.replicas
    if has_enough != (phase.last_call_s is not None):
        phase = replace(phase, last_call_s=now_s if has_enough else None)
    startup_end_s = job.startup_due_s(phase.began)
    if _is_hopeless(job):
        text = job.members.hopeless_text + "; " + _count_text(job)
        return EndJob(JobPhase.FAILED, Reason.FAILED_BEFORE_READY, text)
    wait = _wait_for_pods(job, phase, startup_end_s, now_s) or _wait_for_pairs(job, phase, startup_end_s, now_s)
    decision = _first_plan(job, phase, startup_end_s, now_s) if wait is None else wait
    return at_latest(decision, startup_end_s) if now_s < startup_end_s else decision


def begin_adoption(job: JobState, plan: Plan, now_s: float) -> None:
    """Note that an agent came with a plan."""
    phase = job.phase
    if not isinstance(phase, Forming):
        return
    adoption = phase.adoption or Adoption(now_s)
    is_newer = (plan.iteration, plan.term) > adoption.newest
    num_awaited = 0 if is_newer else adoption.num_awaited
    adoption = replace(adoption, num_joins=adoption.num_joins + 1, num_awaited=num_awaited)
    job.phase = replace(phase, adoption=adoption)


def _decide_adoption(job: JobState, phase: Forming, adoption: Adoption, now_s: float) -> Decision:
    """Take over the iteration that the agents are in, when all of its ranks are there or have had their time."""
    deadline_s = adoption.since_s + job.settings.timeouts.heartbeat_s
    num_members = len(job.members.by_uid)
    # A lost pod may have brought the newest plan.
    may_be_complete = num_members < adoption.num_members or adoption.num_joins >= adoption.num_awaited
    if now_s < deadline_s:
        adoption = replace(adoption, num_members=num_members)
        phase = replace(phase, adoption=adoption)
        if not may_be_complete and not _is_nobody_to_come(job):
            return Wait(deadline_s, phase=phase)
    plans = [(member.uid, member.plan) for member in job.members.by_uid.values() if member.plan is not None]
    if not plans:
        return Learn(replace(phase, adoption=None))  # Those who came with a plan are lost again.
    plans.sort(key=lambda held: (held[1].iteration, held[1].term))
    newest = plans[-1][1]
    places: dict[int, Worker] = {}
    for uid, plan in plans:
        # A number may have been used again by a coordinator without memory: the last one holds.
        if plan.iteration == newest.iteration:
            places.update({part.rank: (uid, part.local_rank) for part in plan.ranks if part.rank is not None})
    is_complete = all(rank in places for rank in range(newest.world_size)) or _is_nobody_to_come(job)
    # Pods that ended well did so in the newest one: who has been cut off since an earlier one says nothing of it.
    is_newest = newest.iteration >= job.numbers.highest_iteration
    if is_newest and was_ending(job, newest.world_size - len(places)):
        return Adopt(newest.iteration, newest.world_size, places, is_ending=True)
    if is_complete or now_s >= deadline_s:
        return Adopt(newest.iteration, newest.world_size, places)
    num_awaited = _num_awaited(job, newest.world_size - len(places))
    adoption = replace(adoption, newest=(newest.iteration, newest.term), num_joins=0, num_awaited=num_awaited)
    back = f"{len(places)} of {counted(newest.world_size, 'rank has', 'ranks have')} come back"
    message = f"takes over iteration {newest.iteration}: {back}"
    return Wait(deadline_s, StatusText(Reason.WAITING_FOR_PODS, message), replace(phase, adoption=adoption))


def _is_nobody_to_come(job: JobState) -> bool:
    """Whether each pod that may have ranks has come: the operator says that all others have ended, or never began."""
    cluster = job.cluster
    if cluster.num_running is None or not cluster.is_accounted:
        return False
    return all(cluster.pods[uid].is_ended or cluster.pods[uid].is_waiting for uid in job.members.absent)


def _num_awaited(job: JobState, num_missing: int) -> int:
    """Return how many pods must come before another look pays; few enough that people see progress."""
    num_wanted = -(-num_missing // job.settings.ranks_per_pod)
    return max(min(num_wanted, len(job.members.by_uid) // 8), 1)


def _last_call(job: JobState, phase: Forming, last_call_s: float, now_s: float) -> Wait | None:
    """Return the wait for those who come up together with the last pod that is needed; None when it is over."""
    settings, members = job.settings, job.members
    failed = _replaceable(job)
    # Pods that came up with these test themselves no longer than they did.
    wait_s = settings.timeouts.last_call_s + (settings.preflight_s if failed else 0.0)
    deadline_s = last_call_s + wait_s
    if now_s >= deadline_s:
        return None
    if members.without_domain:
        names = shorten_names(members.without_domain, members.name)
        report = StatusText(Reason.WAITING_FOR_TOPOLOGY, f"waits {wait_s:.0f} s for the domains of {names}")
    elif len(members.ready) >= settings.replicas + settings.spares:
        return None
    else:
        why = f", since the preflight of {shorten_names(failed, members.name)} has failed" if failed else ""
        report = StatusText(Reason.WAITING_FOR_PODS, f"{_count_text(job)}; waits {wait_s:.0f} s for the others{why}")
    return Wait(deadline_s, report, phase)


def _replaceable(job: JobState) -> list[str]:
    """Return the pods whose preflight has failed, where spares that are still to come may all take their places.

    Where more have failed than there are spares the job would wait in vain: it may be the image that fails.
    """
    failed = list(failed_preflights(job))
    num_sound = len(job.members.ready) - len(failed)
    may_help = 0 < len(failed) <= job.settings.spares and num_sound < job.settings.replicas
    return failed if may_help and not job.rules.has_code else []


def _wait_for_pods(job: JobState, phase: Forming, startup_end_s: float, now_s: float) -> Wait | None:
    """Return the wait for the pods that are needed, or then for others; None when it is over."""
    if phase.last_call_s is not None:
        return _last_call(job, phase, phase.last_call_s, now_s)
    if now_s >= startup_end_s:
        return None
    has_all_pods = len(job.members.by_uid) >= job.settings.replicas
    reason = Reason.WAITING_FOR_WORKERS if has_all_pods else Reason.WAITING_FOR_PODS
    message = _count_text(job) + _missing_text(job) + (f"; {job.pod_clock.why}" if job.pod_clock.why else "")
    return Wait(report=StatusText(reason, message), phase=phase)


def _wait_for_pairs(job: JobState, phase: Forming, startup_end_s: float, now_s: float) -> Decision | None:
    """Let pods test with each other, and return the wait for that; None when it is over, or the job does not want it.

    It is over when all is said, when the job's time for it is, or when the startup timeout is: then the plan is cut
    with what is known.
    """
    settings = job.settings
    if not settings.preflight_pairs or phase.outage is not None:
        return None  # A job that ran before is not held up.
    if phase.pairs_until_s is None:
        until_s = min(now_s + settings.preflight_s, startup_end_s)
        return Learn(replace(phase, pairs_until_s=until_s)) if until_s > now_s else None
    flight = job.pairs.flight
    if flight is None and (now_s >= phase.pairs_until_s or job.pairs.is_open):
        return None  # One whose time is over ends first, in this step, so that what it has found counts.
    number = 0 if flight is None else flight.round
    text = f"round {number} of tests of pods with each other, {settings.preflight_s:.0f} s for all rounds at most"
    return Wait(phase.pairs_until_s, StatusText(Reason.WAITING_FOR_WORKERS, f"{_count_text(job)}; {text}"), phase)


def _first_plan(job: JobState, phase: Forming, startup_end_s: float, now_s: float) -> Decision:
    newcomers = job.members.newcomers(now_s, job.settings.timeouts.last_call_s)
    outcome = first_outcome(job, phase, newcomers)
    if not isinstance(outcome, Shortage):
        waits = await_keepers(job, phase, outcome, now_s)
        decision = waits or plan_when_ready(job, phase, None if phase.outage is None else Rung.JOB, now_s)
    elif now_s >= startup_end_s:
        decision = _give_up(job, phase, outcome, now_s)
    else:
        report = StatusText(Reason.WAITING_FOR_PODS, f"cannot place the ranks: {outcome.detail}")
        decision = Wait(report=report, phase=phase)
    return at_latest(decision, newcomers.until_s)


def _give_up(job: JobState, phase: Forming, shortage: Shortage, now_s: float) -> Decision:
    """End a job that has no world when its startup timeout is over."""
    if phase.last_call_s is not None:
        return EndJob(JobPhase.FAILED, Reason.STARTUP_TIMEOUT, shortage.detail)
    counts, missing = _count_text(job), _missing_text(job)
    silent_began = phase.consulting.silent_began
    silent_until_s = -math.inf if silent_began is None else job.startup_due_s(silent_began)
    if now_s < silent_until_s:
        # However late it was asked, its new process has the time to get ready that every process has.
        return Wait(silent_until_s, StatusText(Reason.WAITING_FOR_WORKERS, counts + missing), phase)
    why = f"; {shortage.detail}" if shortage.is_objection else _hint(job)
    message = f"after {job.settings.timeouts.startup_s:.0f} s {counts}{missing}{why}"
    return EndJob(JobPhase.FAILED, Reason.STARTUP_TIMEOUT, message)


def _is_hopeless(job: JobState) -> bool:
    if not job.members.hopeless:
        return False
    expected = max(len(job.members.by_uid), job.settings.replicas + job.settings.spares)
    num_lost = len(job.members.by_uid) - job.members.num_living
    return expected - num_lost < job.settings.minimum_replicas


def _count_text(job: JobState) -> str:
    members, settings = job.members, job.settings
    joined = len(members.by_uid)
    have = agreed(joined, "has", "have")
    return f"{len(members.ready)} of {counted(settings.replicas, 'pod is', 'pods are')} ready, {joined} {have} joined"


def _hint(job: JobState) -> str:
    has_silent_workers = len(job.members.by_uid) > len(job.members.ready)
    if not (job.settings.is_in_process and has_silent_workers):
        return ""
    return (
        " (workers are ready when they call a function under unbroken.inprocess.Wrapper; "
        "a script without it wants restart.rungs without in-process)"
    )


def _missing_text(job: JobState) -> str:
    members = job.members
    absent, unready = members.absent, members.unready
    text = f"; not joined: {shorten_names(absent.values())}" if absent else ""
    text += f"; not ready: {shorten_names(unready, members.name)}" if unready else ""
    refused = next(((pod, why) for (_uid, pod), why in job.refused.items()), None)
    return text + (f"; refused: {refused[0]}: {refused[1]}" if refused else "")
