"""Networks and jobs for the tests of partitions, here and in tests/e2e; they need root, and are skipped elsewhere."""

import functools
from collections.abc import Callable, Iterator

import pytest

from unbroken_core.protocol.settings import JobSettings, Timeouts

from .partition_job import Job
from .partition_network import Network, missing_ability

HOSTS = ("rendezvous", "second", "pod-0", "pod-1", "pod-2")

find_missing = functools.cache(missing_ability)


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch with the hosts of a job."""
    if missing := find_missing():
        pytest.skip(f"no network namespaces: {missing}")
    network = Network(*HOSTS)
    yield network
    network.close()


def make_settings(
    heartbeat_s: float,
    replicas: int = 2,
    spares: int = 1,
    min_replicas: int | None = None,
    isolation_s: float | None = None,
) -> JobSettings:
    """Return a job that waits no longer than a test wants to, and is not in a hurry on a busy machine.

    The soft timeout is seconds above the default heartbeat's: the silence of a pod is to be known before its peers have
    stood still for too long. The grace is time that a world has to end before its isolation time is over.
    """
    timeouts = Timeouts(
        soft_s=10.0,
        hard_s=16.0,
        heartbeat_s=heartbeat_s,
        barrier_s=40.0,
        completion_s=60.0,
        termination_grace_s=5.0,
        startup_s=60.0,
        reconnect_s=heartbeat_s,
        last_call_s=60.0,
        isolation_s=isolation_s,
    )
    return JobSettings(job="parted", replicas=replicas, min_replicas=min_replicas, spares=spares, timeouts=timeouts)


@pytest.fixture
def start_job(network: Network) -> Iterator[Callable[..., Job]]:
    """Start a job and wait until it trains."""
    jobs: list[Job] = []

    def start(
        heartbeat_s: float = 6.0,
        replicas: int = 2,
        spares: int = 1,
        service: str = "",
        min_replicas: int | None = None,
        isolation_s: float | None = None,
    ) -> Job:
        job = Job(network, make_settings(heartbeat_s, replicas, spares, min_replicas, isolation_s), service)
        jobs.append(job)
        job.start_rendezvous()
        job.start_pods()
        job.wait_trained(0)
        job.wait_running(0)
        return job

    yield start
    for job in jobs:
        job.close()
