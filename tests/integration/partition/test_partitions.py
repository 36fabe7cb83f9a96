"""Real partitions between real processes in network namespaces: who goes on, who stops, and who comes back."""

from collections.abc import Callable

import pytest

from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason

from .partition_checks import assert_replaced, pids
from .partition_job import Job

Start = Callable[..., Job]


@pytest.mark.timeout(200)
def test_pod_that_is_cut_off_from_everybody_holds_nobody_up(start_job: Start) -> None:
    """2.24, 3.8, 3.40: its peers, which lose rank 0, never hear of the end of a connection, and leave all the same."""
    job = start_job()
    before, lost = pids(job.saves()), job.pod_of(0)
    job.network.unplug(f"pod-{lost}")
    assert_replaced(job, 0, before, (Cause.HEARTBEAT_LOST,))
    job.wait_fenced(lost, 0)
    job.network.plug_in(f"pod-{lost}")
    job.wait_spare(f"pod-{lost}")
    job.wait_steps(10)
    assert job.wait_running(1).recoveries[1:] == ()
    job.complete()


@pytest.mark.timeout(200)
def test_lone_pod_that_is_cut_off_stops_before_the_spare_begins(start_job: Start) -> None:
    """It needs no peers, so nobody but itself can stop it."""
    # Its margin is a tenth of this at least, and the machine may be busy.
    job = start_job(heartbeat_s=18.0, replicas=1)
    before, lost = pids(job.saves()), job.pod_of(0)
    job.network.part(f"pod-{lost}", "rendezvous")
    assert_replaced(job, 0, before, (Cause.HEARTBEAT_LOST, Cause.POD_LOST))
    job.wait_steps(100)
    job.network.join(f"pod-{lost}", "rendezvous")
    job.wait_spare(f"pod-{lost}")
    job.complete()


@pytest.mark.timeout(200)
def test_rendezvous_that_was_cut_off_from_all_pods_takes_them_over_again(start_job: Start) -> None:
    # All agents must have connected again in this time: some may just have begun to try when the link is back.
    job = start_job(heartbeat_s=15.0)
    before = pids(job.saves())
    job.network.unplug("rendezvous")
    job.wait_phase(JobPhase.FORMING)
    job.wait_steps(50)
    job.network.plug_in("rendezvous")
    status = job.wait_running(0)
    assert status.recoveries == ()
    assert pids(job.wait_steps(50)) == before
    job.complete()


@pytest.mark.timeout(200)
def test_active_pods_that_are_cut_off_together_stop_before_the_spare_begins(start_job: Start) -> None:
    """3.8: they reach each other, so that nothing but the isolation time ends their world; both would save."""
    job = start_job(min_replicas=1, isolation_s=18.0)
    active = [job.pod_of(0), job.pod_of(1)]
    for pod in active:
        job.network.part(f"pod-{pod}", "rendezvous")

    def is_held() -> bool:
        status = job.status()
        return status is not None and status.reason is Reason.WAITING_FOR_ISOLATION

    job.wait_for(is_held, "wait for the end of the former world")
    job.wait_for(lambda: job.saves()[0].iteration == 1, "checkpoint of the next world")
    for pod in active:
        job.wait_fenced(pod, 0)
        job.network.join(f"pod-{pod}", "rendezvous")
        job.wait_spare(f"pod-{pod}")
    (recovery,) = job.wait_running(1).recoveries
    assert recovery.cause is Cause.HEARTBEAT_LOST, recovery
    job.complete()
