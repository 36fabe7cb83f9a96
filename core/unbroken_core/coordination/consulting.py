"""Who is which rank, asked of one worker, where the script has a rank assignment in Python.

The lowest healthy active rank is asked, and the next one when it is lost or silent. What it says is checked: workers
that are there, none twice, within all limits of the spec. An error of the script ends the job: all would make it. Too
few workers with a rank are no error while others may come: they are waited for as if too few were healthy.
"""

from collections.abc import Iterator

from unbroken_core.coordination.members import Member, Place
from unbroken_core.coordination.planning import condemn, finish
from unbroken_core.coordination.state import Consultation, Job, Objection
from unbroken_core.messages import Answer, Consult, Question
from unbroken_core.ranks.worlds import Shortage, Worker
from unbroken_core.reasons import Cause, JobPhase, Reason
from unbroken_core.recoveries.history import FaultRecord

MAX_SILENT = 3
"""Workers in a row that may leave a question without an answer."""


def consult(job: Job, now_s: float) -> list[Worker] | None:
    """Return the worker of each rank in the next plan.

    None while nobody has said, when the answer makes no world (`objection`), and when the job has failed.
    """
    talk = job.consultation
    if talk is None or talk.version != job.census.ranking.version:
        talk = job.consultation = _ask(job, talk, now_s)
    member = job.census.by_uid[talk.uid]
    place = member.places[talk.local_rank]
    answer = place.state.answer
    if answer is not None and _has_answered(job, talk):
        return _take(job, talk, answer)
    deadline_s = talk.asked_at_s + job.settings.timeouts.soft_s
    if now_s < deadline_s:
        job.wake(deadline_s)
        job.say(job.reason, f"waits for the rank assignment of the script on {member.pod} worker {talk.local_rank}")
        return None
    _give_up(job, member, place, now_s - talk.asked_at_s, now_s)
    return None


def objection(job: Job) -> Shortage | None:
    """Return why the script makes no world of what is ready; None when it was not asked since the last change."""
    last = job.objection
    return None if last is None or last.version != job.census.ranking.version else last.shortage


def ask_again(job: Job, member: Member) -> None:
    """Repeat an open question to a pod whose connection is new."""
    talk = job.consultation
    if talk is not None and talk.uid == member.uid:
        job.send(member, Consult(job.generation, talk.local_rank, talk.incarnation, talk.question))


def forget_asked(job: Job, member: Member) -> None:
    """A pod is given up: should it come back, it is asked anew, and has its time for the answer."""
    if job.consultation is not None and job.consultation.uid == member.uid:
        job.consultation = None


def _ask(job: Job, former: Consultation | None, now_s: float) -> Consultation:
    roll = job.census.ranking.roll()
    lost = set(roll.lost)
    workers = [*roll.active, *roll.idle]
    healthy = [worker for number, worker in enumerate(workers) if number not in lost]
    # Whoever was asked is waited for, whoever comes and goes meanwhile: it may hang, and must not get a rank then.
    is_same = former is not None and _is_there(job, former, healthy)
    uid, local_rank = (former.uid, former.local_rank) if former is not None and is_same else healthy[0]
    is_silent = former is not None and is_same and not _has_answered(job, former)
    asked_at_s = former.asked_at_s if former is not None and is_silent else now_s
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
        *_keys(job, workers),
    )
    version = job.census.ranking.version
    job.send(member, Consult(job.generation, local_rank, incarnation, question))
    return Consultation(version, question, workers, uid, local_rank, incarnation, asked_at_s)


def _keys(job: Job, workers: list[Worker]) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Return what the key functions of workers have said, each combination once, and whose is which."""
    said = job.script.keys
    if not said:
        return (), ()
    places: dict[tuple[str, ...], int] = {}
    keys = tuple(places.setdefault(said[worker], len(places)) if worker in said else -1 for worker in workers)
    return tuple(places), keys


def _is_there(job: Job, former: Consultation, healthy: list[Worker]) -> bool:
    if (former.uid, former.local_rank) not in healthy:
        return False
    return job.census.by_uid[former.uid].places[former.local_rank].state.incarnation == former.incarnation


def _has_answered(job: Job, talk: Consultation) -> bool:
    """Return whether the question was answered, if too late for what has come and gone since."""
    answer = job.census.by_uid[talk.uid].places[talk.local_rank].state.answer
    question = talk.question
    return answer is not None and (answer.generation, answer.number) == (question.generation, question.number)


def _take(job: Job, talk: Consultation, answer: Answer) -> list[Worker] | None:
    numbers = answer.workers[: job.rules.world_size(len(answer.workers))]
    for message in _faults(talk, answer):
        pod = job.census.by_uid[talk.uid].pod
        finish(
            job, JobPhase.FAILED, Reason.POLICY_REFUSED, f"{pod} worker {talk.local_rank}: rank_assignment: {message}"
        )
        return None
    job.num_silent = 0
    job.consultation = None
    shortage = _shortage(job, talk, answer, len(numbers))
    if shortage is None:
        by_uid = job.census.by_uid
        job.script.keys = {worker: keys for worker, keys in job.script.keys.items() if worker[0] in by_uid}
        return [talk.workers[number] for number in numbers]
    if len(job.census.ready) >= job.settings.replicas:
        # All are there: it would say the same for ever.
        finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, shortage.detail)
        return None
    job.objection = Objection(job.census.ranking.version, shortage)
    return None


def _faults(talk: Consultation, answer: Answer) -> Iterator[str]:
    """Yield why this cannot be an answer."""
    if answer.error:
        yield answer.error
    if len(set(answer.workers)) != len(answer.workers):
        yield "want each worker once, got one twice"
    if any(not 0 <= number < len(talk.workers) for number in answer.workers):
        yield f"want workers 0 to {len(talk.workers) - 1}, got others"
    lost = sorted(set(talk.question.terminated).intersection(answer.workers))
    if lost:
        yield f"want healthy workers, got {lost[:5]}, which are lost"


def _shortage(job: Job, talk: Consultation, answer: Answer, world_size: int) -> Shortage | None:
    """Return why an answer makes no world; None when it does."""
    settings, num_ranks = job.settings, len(answer.workers)
    # As elsewhere, those count that the world's size cuts off.
    num_pods = len({talk.workers[number][0] for number in answer.workers})
    what = f"the rank assignment of the script gives {num_ranks} workers of {num_pods} pods a rank"
    if num_pods < max(settings.minimum_replicas, 1):
        return Shortage(
            num_pods, num_ranks, f"{what}, at least {settings.minimum_replicas} pods are wanted (minReplicas)"
        )
    if world_size < 1:
        return Shortage(num_pods, num_ranks, f"{what}, a multiple of {job.rules.divisible_by} is wanted")
    return None


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
    job.script.silent_began = job.pod_clock.read(now_s)
    job.is_changed = True
    condemn(job, member, place)
