"""What an agent may say in this job: bounds that follow from the spec, and from what the coordinator has given out.

`unbroken_core.protocol.bounds` has those that hold in every job; a message that reaches this module keeps to them.

    Hello     refused, and the connection closed: the agent comes back, slower
    Report    the connection closed: the agent comes back at once, and a Hello says all that it knows

Neither changes anything. The pod's workers train on: for the job it is away, as with any broken connection.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unbroken_core.coordinator.state.job import JobState
from unbroken_core.protocol.bounds import MAX_CLAIMED
from unbroken_core.protocol.messages import Hello, Plan, Report, WorkerState
from unbroken_core.protocol.settings import JobSettings

_EARLIER_SPECS = 8
"""So many times larger than its spec a job may have been: it was made smaller, and its pods are told so now."""
_SMALL = 1024
"""Ranks up to which the size of an earlier world is no matter."""
_MORE_PODS = 64


class _Number(NamedTuple):
    """One number of a message, and its bounds, both included."""

    where: str
    seen: int
    low: int
    high: int


def check_hello(job: JobState, hello: Hello) -> str | None:
    """Return what is out of bounds in the first message of an agent; None: nothing."""
    numbers = job.numbers
    # A coordinator may know less than the agents: it, or what it had written down, was lost.
    iteration = max(numbers.highest_iteration, MAX_CLAIMED)
    found = [_Number("term", hello.term, 0, max(numbers.term, MAX_CLAIMED))]
    if hello.plan is not None:
        found += _plan_numbers(job.settings, hello, hello.plan, iteration)
    found += _worker_numbers(job.settings, hello.workers, iteration)
    return _first_fault(found) or _twice(hello) or _crowd(job, hello)


def check_report(job: JobState, report: Report) -> str | None:
    """Return what is out of bounds in a report; None: nothing.

    Its Hello has told the highest iteration that the pod knew; all later ones were given out here.
    """
    return _first_fault(_worker_numbers(job.settings, report.workers, job.numbers.highest_iteration))


def most_ranks(settings: JobSettings) -> int:
    """Return the ranks of the largest world that an agent may come with."""
    return max(_EARLIER_SPECS * (settings.replicas + settings.spares) * settings.ranks_per_pod, _SMALL)


def most_pods(settings: JobSettings) -> int:
    """Return how many pods may join that the operator has not named."""
    return _EARLIER_SPECS * (settings.replicas + settings.spares) + _MORE_PODS


def _plan_numbers(settings: JobSettings, hello: Hello, plan: Plan, iteration: int) -> Iterator[_Number]:
    last = settings.ranks_per_pod - 1
    yield _Number("plan.term", plan.term, 0, hello.term)
    yield _Number("plan.iteration", plan.iteration, 0, iteration)
    yield _Number("plan.world_size", plan.world_size, 0, most_ranks(settings))
    for index, part in enumerate(plan.ranks):
        yield _Number(f"plan.ranks[{index}].local_rank", part.local_rank, 0, last)
        if part.rank is not None:
            yield _Number(f"plan.ranks[{index}].rank", part.rank, 0, plan.world_size - 1)


def _worker_numbers(settings: JobSettings, workers: Iterable[WorkerState], iteration: int) -> list[_Number]:
    # Thousands of reports come at one instant: no more is made than what is wrong.
    last, found = settings.ranks_per_pod - 1, []
    for index, worker in enumerate(workers):
        if not 0 <= worker.local_rank <= last:
            found.append(_Number(f"workers[{index}].local_rank", worker.local_rank, 0, last))
        if worker.iteration > iteration:
            found.append(_Number(f"workers[{index}].iteration", worker.iteration, -1, iteration))
        fault = worker.fault
        if fault is not None and fault.iteration > iteration:
            found.append(_Number(f"workers[{index}].fault.iteration", fault.iteration, -1, iteration))
    return found


def _first_fault(numbers: Iterable[_Number]) -> str | None:
    for number in numbers:
        if not number.low <= number.seen <= number.high:
            wanted = "none" if number.high < number.low else f"{number.low} to {number.high}"
            return f"{number.where}: want {wanted}, got {number.seen}"
    return None


def _twice(hello: Hello) -> str | None:
    """Return why a Hello gives one worker, or one rank, two parts."""
    ranks = () if hello.plan is None else hello.plan.ranks
    lists = {
        "workers: want each local_rank once": [worker.local_rank for worker in hello.workers],
        "plan.ranks: want each local_rank once": [part.local_rank for part in ranks],
        "plan.ranks: want each rank once": [part.rank for part in ranks if part.rank is not None],
    }
    for text, numbers in lists.items():
        if len(set(numbers)) != len(numbers):
            return f"{text}, got {numbers[:8]}"
    return None


def _crowd(job: JobState, hello: Hello) -> str | None:
    """Return why a pod may not join that nobody has named; those that the operator sees always may."""
    uid, most = hello.pod_uid, most_pods(job.settings)
    if uid in job.members.by_uid or uid in job.cluster.pods or len(job.members.by_uid) < most:
        return None
    return f"pod_uid: want at most {most} pods, those aside that the operator has named; {uid[:64]!r} is one more"
