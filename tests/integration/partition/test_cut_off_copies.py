"""Pods with copies of a protected checkpoint are cut off together, and come back one by one to a new rendezvous."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.reasons import Reason

from .memory_job import MemoryJob
from .partition_fixtures import find_missing, make_settings
from .partition_network import Network

REPLICAS, SPARES = 4, 1


@pytest.fixture
def job() -> Iterator[MemoryJob]:
    """A job that trains, with an even number of active pods: the spare keeps no copies."""
    # As the other tests of this folder: without the right to make networks there is nothing real to cut. CI has it.
    if missing := find_missing():
        pytest.skip(f"no network namespaces: {missing}")
    network = Network("rendezvous", *(f"pod-{index}" for index in range(REPLICAS + SPARES)))
    settings = make_settings(6.0, replicas=REPLICAS, spares=SPARES, min_replicas=2, isolation_s=18.0)
    job = MemoryJob(network, replace(settings, uid="uid-of-the-job", copies=1))
    yield job
    job.close()
    network.close()


def is_short(status: JobStatus | None) -> bool:
    """Whether a rendezvous has too few pods."""
    return status is not None and status.reason is Reason.BELOW_MINIMUM


@pytest.mark.timeout(240)
def test_pods_that_were_cut_off_together_bring_back_what_was_protected(job: MemoryJob) -> None:
    """The first one back and the spare are enough for a world, and have no whole checkpoint."""
    job.start_rendezvous()
    job.start_pods()
    job.wait_for(lambda: job.protected() >= 1, "step that is protected")
    first, *others, lost = [job.pod_of(rank) for rank in range(REPLICAS)]
    protected = job.protected()
    for pod in (first, *others, lost):
        job.network.part(f"pod-{pod}", "rendezvous")
    job.kill_rendezvous()
    for pod in (first, *others, lost):
        job.wait_fenced(pod, 0)
    job.lose_pod(lost)
    job.start_rendezvous()

    job.wait_for(lambda: is_short(job.status()), "rendezvous that hears the spare alone")
    job.network.join(f"pod-{first}", "rendezvous")

    def is_waiting() -> bool:
        status = job.status()
        # Only the plan that was made without them makes another iteration.
        assert status is None or status.iteration < 1, job.text()
        return status is not None and "to be heard again" in status.message

    job.wait_for(is_waiting, "wait for the others")
    for pod in others:
        job.network.join(f"pod-{pod}", "rendezvous")
    size = job.wait_running(1).world_size

    def loads() -> dict[int, tuple[int, str]]:
        return {rank: (step, state) for iteration, rank, step, state in job.said("loaded") if iteration == 1}

    job.wait_for(lambda: len(loads()) == size, "load of all ranks")
    saved = {(rank, step): state for iteration, rank, step, state in job.said("saved") if iteration == 0}
    (step,) = {step for step, _state in loads().values()}
    assert step >= protected, job.text()
    assert loads() == {rank: (step, saved[rank, step]) for rank in range(size)}
