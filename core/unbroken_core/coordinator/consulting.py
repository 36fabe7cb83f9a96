"""Asks one worker for the ranks of the next plan, where the script has a rank assignment in Python.

The coordinator asks the lowest healthy active rank, and the next one when that is lost or silent. It checks the answer:
known workers, none twice, within all limits of the spec. An error of the script ends the job, since all workers would
make it. If the answer leaves too few workers with a rank while others may come, the job waits for them.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Union

from unbroken_core.coordinator.adoption.previous_world import hold_back
from unbroken_core.coordinator.decisions import (
    Ask,
    Consultable,
    CutPlan,
    Decision,
    EndJob,
    Learn,
    Replace,
    Wait,
    late_record,
)
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import Newcomers
from unbroken_core.coordinator.state.phases import Consultation, Consulting, Forming, Interrupted, Objection
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.messages import Answer, Consult, Question
from unbroken_core.ranks.worlds import Outcome, Shortage, Worker, World
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role, Rung

MAX_NAMES_BYTES = 2 << 20
"""Of all keys of all workers in a question: half of a message, since the other half has the workers' numbers."""
MAX_SILENT = 3
"""Workers in a row that may leave a question without an answer."""


def plan_when_ready(job: JobState, phase: Consultable, rung: Rung | None, now_s: float) -> Decision:
    """Cut the plan once no other world can train, and the script's code, where it has some, has given the ranks."""
    held = hold_back(job, phase, now_s)
    if held is not None:
        return held
    if not job.rules.has_code:
        return CutPlan(rung, phase)
    order = _consult(job, phase, now_s)
    return CutPlan(rung, phase, order) if isinstance(order, list) else order


def first_outcome(job: JobState, phase: Consultable, newcomers: Newcomers) -> Outcome:
    """Return the world of what is ready now, regardless of earlier ones."""
    ranking = job.members.ranking
    preferred = {uid for uid, pod in job.cluster.pods.items() if pod.role is Role.ACTIVE}
    failed = {} if job.rules.has_code else failed_preflights(job)
    if failed:
        # Whose preflight has failed gets ranks only where nobody else can.
        ranking.exclude({**newcomers.places, **failed})
        better = ranking.first(preferred)
        if isinstance(better, World) and better.world_size >= job.rules.wanted_ranks:
            return better
    ranking.exclude(newcomers.places)
    return phase.consulting.shortage(ranking.version) or ranking.first(preferred)


def failed_preflights(job: JobState) -> dict[str, set[int]]:
    """Return the places of ready pods whose preflight has failed, in a job that acts on it."""
    members = job.members
    return {uid: set(members.by_uid[uid].places) for uid in job.health.failed if uid in members.ready}


def _consult(job: JobState, phase: Consultable, now_s: float) -> Union[list[Worker], Decision]:
    """Return the worker of each rank in the next plan, or what to do while nobody has said."""
    asked = phase.consulting.question
    if asked is None or asked.version != job.members.ranking.version:
        question = _question(job, asked, now_s)
        if refusal := _too_long(question.question.names):
            return EndJob(JobPhase.FAILED, Reason.POLICY_REFUSED, refusal)
        return Ask(question, replace(phase, consulting=replace(phase.consulting, question=question)))
    member = job.members.by_uid[asked.uid]
    place = member.places[asked.local_rank]
    answer = place.state.answer
    if answer is not None and _has_answered(job, asked):
        return _take(job, phase, asked, answer)
    deadline_s = asked.asked_at_s + job.settings.timeouts.soft_s
    if now_s < deadline_s:
        message = f"waits for the rank assignment of the script on {member.pod} worker {asked.local_rank}"
        return Wait(deadline_s, StatusText(job.report.reason, message), phase)
    return _give_up(job, phase, asked, now_s)


def ask(job: JobState, member: Member) -> None:
    """Send a pod the question that is open for it, if one is: once it is asked, and over each new connection."""
    asked = job.phase.consulting.question if isinstance(job.phase, (Forming, Interrupted)) else None
    if asked is not None and asked.uid == member.uid:
        job.send(member, Consult(job.numbers.term, asked.local_rank, asked.incarnation, asked.question))


def _question(job: JobState, previous: Consultation | None, now_s: float) -> Consultation:
    roll = job.members.ranking.roll()
    lost = set(roll.lost)
    workers = [*roll.active, *roll.idle]
    healthy = [worker for number, worker in enumerate(workers) if number not in lost]
    # The worker that was asked is waited for, whatever changes meanwhile: it may hang, and must get no rank then.
    is_same = previous is not None and _is_there(job, previous, healthy)
    uid, local_rank = (previous.uid, previous.local_rank) if previous is not None and is_same else healthy[0]
    is_silent = previous is not None and is_same and not _has_answered(job, previous)
    asked_at_s = previous.asked_at_s if previous is not None and is_silent else now_s
    question = Question(
        job.numbers.term,
        job.numbers.question + 1,
        job.numbers.highest_iteration + 1,
        len(workers),
        len(roll.active),
        tuple(roll.lost),
        *_keys(job, workers),
    )
    incarnation = job.members.by_uid[uid].places[local_rank].state.incarnation
    version = job.members.ranking.version
    return Consultation(version, question, workers, uid, local_rank, incarnation, asked_at_s)


def _keys(job: JobState, workers: list[Worker]) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Return what the key functions of workers have said, each combination once, and whose is which."""
    said = job.script.keys
    if not said:
        return (), ()
    places: dict[tuple[str, ...], int] = {}
    keys = tuple(places.setdefault(said[worker], len(places)) if worker in said else -1 for worker in workers)
    return tuple(places), keys


def _too_long(names: tuple[tuple[str, ...], ...]) -> str:
    """Return why these keys fit in no message, and no worker could be asked; "" if they do."""
    size_bytes = len(json.dumps(names))
    if size_bytes <= MAX_NAMES_BYTES:
        return ""
    return (
        f"rank_assignment: want keys that take at most {MAX_NAMES_BYTES:,} bytes together, since one worker is sent "
        f"those of all, got {size_bytes:,} bytes of {counted(len(names), 'different key')}: make them shorter"
    )


def _is_there(job: JobState, previous: Consultation, healthy: list[Worker]) -> bool:
    if (previous.uid, previous.local_rank) not in healthy:
        return False
    return job.members.by_uid[previous.uid].places[previous.local_rank].state.incarnation == previous.incarnation


def _has_answered(job: JobState, asked: Consultation) -> bool:
    """Return whether the question was answered, if too late for what has come and gone since."""
    answer = job.members.by_uid[asked.uid].places[asked.local_rank].state.answer
    question = asked.question
    return answer is not None and (answer.term, answer.number) == (question.term, question.number)


def _take(job: JobState, phase: Consultable, asked: Consultation, answer: Answer) -> Union[list[Worker], Decision]:
    numbers = answer.workers[: job.rules.world_size(len(answer.workers))]
    for message in _faults(asked, answer):
        pod = job.members.by_uid[asked.uid].pod
        text = f"{pod} worker {asked.local_rank}: rank_assignment: {message}"
        return EndJob(JobPhase.FAILED, Reason.POLICY_REFUSED, text)
    shortage = _shortage(job, asked, answer, len(numbers))
    if shortage is None:
        return [asked.workers[number] for number in numbers]
    if len(job.members.ready) >= job.settings.replicas:
        # All are there: it would say the same for ever.
        return EndJob(JobPhase.FAILED, Reason.POLICY_REFUSED, shortage.detail)
    objection = Objection(job.members.ranking.version, shortage)
    silent_began = phase.consulting.silent_began
    return Learn(replace(phase, consulting=Consulting(objection=objection, silent_began=silent_began)))


def _faults(asked: Consultation, answer: Answer) -> Iterator[str]:
    """Yield why this cannot be an answer."""
    if answer.error:
        yield answer.error
    if len(set(answer.workers)) != len(answer.workers):
        yield "want each worker once, got one twice"
    if any(not 0 <= number < len(asked.workers) for number in answer.workers):
        yield f"want workers 0 to {len(asked.workers) - 1}, got others"
    lost = sorted(set(asked.question.terminated).intersection(answer.workers))
    if lost:
        yield f"want healthy workers, got {lost[:5]}, which are lost"


def _shortage(job: JobState, asked: Consultation, answer: Answer, world_size: int) -> Shortage | None:
    """Return why an answer makes no world; None when it does."""
    settings, num_ranks = job.settings, len(answer.workers)
    # As elsewhere, those count that the world's size cuts off.
    num_pods = len({asked.workers[number][0] for number in answer.workers})
    workers, pods = counted(num_ranks, "worker"), counted(num_pods, "pod")
    what = f"the rank assignment of the script gives {workers} of {pods} a rank"
    if num_pods < max(settings.minimum_replicas, 1):
        limit = f"at least {counted(settings.minimum_replicas, 'pod is', 'pods are')} wanted (minReplicas)"
        return Shortage(num_pods, num_ranks, f"{what}, {limit}", is_objection=True)
    if world_size < 1:
        limit = f"a multiple of {job.rules.divisible_by} is wanted"
        return Shortage(num_pods, num_ranks, f"{what}, {limit}", is_objection=True)
    return None


def _give_up(job: JobState, phase: Consultable, asked: Consultation, now_s: float) -> Decision:
    member, waited_s = job.members.by_uid[asked.uid], now_s - asked.asked_at_s
    place = member.places[asked.local_rank]
    num_silent = phase.consulting.num_silent + 1
    where = f"{member.pod} worker {place.state.local_rank}"
    text = f"the rank assignment of the script did not answer for {waited_s:.0f} s (timeouts.softSeconds)"
    if num_silent >= MAX_SILENT:
        text = f"{where}: {text}, nor did {MAX_SILENT - 1} others"
        return EndJob(JobPhase.FAILED, Reason.POLICY_REFUSED, text)
    record = late_record(member, place, waited_s, now_s, f"{text}; its process is replaced")
    consulting = Consulting(
        objection=phase.consulting.objection, num_silent=num_silent, silent_began=job.pod_clock.read(now_s)
    )
    return Replace(((member, place),), replace(phase, consulting=consulting), record)
