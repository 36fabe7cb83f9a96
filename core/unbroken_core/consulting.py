"""Who is which rank, asked of one worker, where the script has a rank assignment in Python.

The lowest healthy active rank is asked, and the next one when it is lost or silent. What it says is checked: workers
that are there, none twice, within all limits of the spec. An error of the script ends the job: all would make it.
"""

from unbroken_core.history import FaultRecord
from unbroken_core.job import Consultation, Job
from unbroken_core.membership import Member, Place
from unbroken_core.messages import Answer, Consult, Question
from unbroken_core.planning import condemn, finish
from unbroken_core.ranking import Worker
from unbroken_core.reasons import Cause, JobPhase, Reason

MAX_SILENT = 3
"""Workers in a row that may leave a question without an answer."""


def consult(job: Job, now_s: float) -> list[Worker] | None:
    """Return the worker of each rank in the next plan; None while nobody has said, or when the job has failed."""
    talk = job.consultation
    if talk is None or talk.version != job.census.ranking.version:
        talk = job.consultation = _ask(job, talk, now_s)
    member = job.census.by_uid[talk.uid]
    place = member.places[talk.local_rank]
    answer, question = place.state.answer, talk.question
    if answer is not None and (answer.generation, answer.number) == (question.generation, question.number):
        return _take(job, talk, answer)
    deadline_s = talk.asked_at_s + job.settings.timeouts.soft_s
    if now_s < deadline_s:
        job.wake(deadline_s)
        job.say(job.reason, f"waits for the rank assignment of the script on {member.pod} worker {talk.local_rank}")
        return None
    _give_up(job, member, place, now_s - talk.asked_at_s, now_s)
    return None


def ask_again(job: Job, member: Member) -> None:
    """Repeat an open question to a pod whose connection is new."""
    talk = job.consultation
    if talk is not None and talk.uid == member.uid:
        job.send(member, Consult(job.generation, talk.local_rank, talk.incarnation, talk.question))


def _ask(job: Job, former: Consultation | None, now_s: float) -> Consultation:
    roll = job.census.ranking.roll()
    lost = set(roll.lost)
    workers = [*roll.active, *roll.idle]
    healthy = [worker for number, worker in enumerate(workers) if number not in lost]
    # Whoever was asked is waited for, whoever comes and goes meanwhile: it may hang, and must not get a rank then.
    is_same = former is not None and _is_there(job, former, healthy)
    uid, local_rank = (former.uid, former.local_rank) if former is not None and is_same else healthy[0]
    asked_at_s = former.asked_at_s if former is not None and is_same else now_s
    member = job.census.by_uid[uid]
    incarnation = member.places[local_rank].state.incarnation
    job.num_questions += 1
    question = Question(
        job.generation,
        job.num_questions,
        job.highest_iteration + 1,
        len(workers),
        len(roll.active),
        tuple(roll.lost),
    )
    version = job.census.ranking.version
    job.send(member, Consult(job.generation, local_rank, incarnation, question))
    return Consultation(version, question, workers, uid, local_rank, incarnation, asked_at_s)


def _is_there(job: Job, former: Consultation, healthy: list[Worker]) -> bool:
    if (former.uid, former.local_rank) not in healthy:
        return False
    return job.census.by_uid[former.uid].places[former.local_rank].state.incarnation == former.incarnation


def _take(job: Job, talk: Consultation, answer: Answer) -> list[Worker] | None:
    settings = job.settings
    numbers = answer.workers[: job.rules.world_size(len(answer.workers))]
    chosen = [talk.workers[number] for number in numbers if 0 <= number < len(talk.workers)]
    lost = sorted(set(talk.question.terminated).intersection(answer.workers))
    # As elsewhere, those count that the world's size cuts off.
    num_pods = len({talk.workers[number][0] for number in answer.workers if 0 <= number < len(talk.workers)})
    checks = (
        (not answer.error, answer.error),
        (len(set(answer.workers)) == len(answer.workers), "want each worker once, got one twice"),
        (len(chosen) == len(numbers), f"want workers 0 to {len(talk.workers) - 1}, got others"),
        (not lost, f"want healthy workers, got {lost[:5]}, which are lost"),
        (
            num_pods >= max(settings.minimum_replicas, 1),
            f"want ranks on at least {settings.minimum_replicas} pods (minReplicas), got {num_pods}",
        ),
    )
    for is_sound, text in checks:
        if not is_sound:
            pod = job.census.by_uid[talk.uid].pod
            message = f"{pod} worker {talk.local_rank}: rank_assignment: {text}"
            finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, message)
            return None
    job.num_silent = 0
    job.consultation = None
    return chosen


def _give_up(job: Job, member: Member, place: Place, waited_s: float, now_s: float) -> None:
    job.consultation = None
    job.num_silent += 1
    where = f"{member.pod} worker {place.state.local_rank}"
    text = f"the rank assignment of the script did not answer for {waited_s:.0f} s (timeouts.softSeconds)"
    if job.num_silent >= MAX_SILENT:
        text = f"{where}: {text}, nor did {MAX_SILENT - 1} others"
        finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, text)
        return
    if job.history.running is not None:
        record = FaultRecord(
            Cause.HARD_TIMEOUT,
            member.uid,
            place.state.local_rank,
            now_s - waited_s,
            waited_s,
            place.state.incarnation,
            detail=f"{text}; its process is replaced",
        )
        job.history.running.add(job.fault(member, record))
    job.is_changed = True
    condemn(job, member, place)
