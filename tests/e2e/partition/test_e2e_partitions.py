"""More partitions between real processes: short ones, one-way ones, and those that meet a second fault."""

import os
import signal
from collections.abc import Callable

import pytest
from tests.integration.partition.partition_checks import assert_replaced, pids
from tests.integration.partition.partition_job import Job
from tests.integration.partition.partition_network import Network

from unbroken_core.vocabulary.reasons import Cause, JobPhase

Start = Callable[..., Job]
SERVICE = "198.51.100.251"


@pytest.mark.timeout(200)
def test_agent_that_is_cut_off_for_a_moment_costs_nothing(start_job: Start) -> None:
    """3.8: the workers reach their peers meanwhile, and train."""
    job = start_job(heartbeat_s=20.0)
    before = pids(job.saves())
    job.network.part("pod-1", "rendezvous")
    job.wait_steps(50)
    job.network.join("pod-1", "rendezvous")
    job.wait_steps(50)
    assert job.wait_running(0).recoveries == ()
    assert pids(job.saves()) == before
    job.complete()


@pytest.mark.timeout(200)
def test_pod_that_is_cut_off_from_the_rendezvous_is_replaced_and_comes_back_as_a_spare(start_job: Start) -> None:
    """3.8, 3.40."""
    job = start_job()
    before, lost = pids(job.saves()), job.pod_of(1)
    job.network.part(f"pod-{lost}", "rendezvous")
    assert_replaced(job, 1, before, (Cause.HEARTBEAT_LOST,))
    job.network.join(f"pod-{lost}", "rendezvous")
    job.wait_spare(f"pod-{lost}")
    assert job.wait_running(1).recoveries[1:] == ()
    job.complete()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("is_up", [True, False], ids=["from-pod", "to-pod"])
def test_one_way_loss_between_agent_and_rendezvous_is_a_lost_pod(start_job: Start, is_up: bool) -> None:
    job = start_job()
    before, lost = pids(job.saves()), job.pod_of(1)
    path = (f"pod-{lost}", "rendezvous") if is_up else ("rendezvous", f"pod-{lost}")
    job.network.drop(*path)
    assert_replaced(job, 1, before, (Cause.HEARTBEAT_LOST, Cause.POD_LOST))
    job.network.deliver(*path)
    job.wait_spare(f"pod-{lost}")
    assert job.wait_running(1).recoveries[1:] == ()
    job.complete()


@pytest.mark.timeout(200)
def test_rendezvous_killed_in_a_recovery_goes_on_with_it_when_the_lost_pod_is_back(start_job: Start) -> None:
    """No spare: the recovery waits for the pod that is cut off, and all processes are kept."""
    job = start_job(spares=0)
    before, lost = pids(job.saves()), job.pod_of(1)
    job.network.unplug(f"pod-{lost}")
    job.wait_phase(JobPhase.INTERRUPTED)
    job.rendezvous["rendezvous"].kill()
    job.start_rendezvous()
    job.wait_for(lambda: len(job.pods()) == 1, "survivor at the new rendezvous")
    job.network.plug_in(f"pod-{lost}")
    assert pids(job.wait_trained(1)) == before
    assert job.wait_running(1).term == 2
    job.complete()


@pytest.mark.timeout(200)
def test_rendezvous_that_comes_back_beside_a_newer_one_harms_nobody(network: Network, start_job: Start) -> None:
    """Two at once: agents obey the highest term, and a pod that the old one leads astray costs only itself."""
    network.share(SERVICE, "rendezvous", "second")
    pods = ("pod-0", "pod-1", "pod-2")
    for pod in pods:
        network.direct(SERVICE, pod, "rendezvous")
    job = start_job(heartbeat_s=15.0, service=SERVICE)
    before = pids(job.saves())
    os.kill(job.rendezvous["rendezvous"].pid, signal.SIGSTOP)
    job.start_rendezvous("second")
    for pod in pods:
        network.direct(SERVICE, pod, "second")
    status = job.wait_running(0, "second")
    assert (status.term, status.recoveries) == (2, ())
    os.kill(job.rendezvous["rendezvous"].pid, signal.SIGCONT)
    job.wait_phase(JobPhase.FORMING)
    assert pids(job.wait_steps(50)) == before

    lost = f"pod-{job.pod_of(1, 'second')}"
    network.direct(SERVICE, lost, "rendezvous")
    job.wait_for(lambda: lost in job.pods(), "pod at the old rendezvous")
    after = pids(job.wait_trained(1))
    assert (after[0], after[1] == before[1]) == (before[0], False)
    network.direct(SERVICE, lost, "second")
    job.wait_for(lambda: (seen := job.pods("second").get(lost)) is not None and not seen.ranks, "pod at the newer one")
    status = job.wait_running(1, "second")
    assert len(status.recoveries) == 1
    assert pids(job.wait_steps(50)) == after
    job.complete()


@pytest.mark.timeout(200)
def test_lone_pod_trains_on_while_no_rendezvous_runs(start_job: Start) -> None:
    """Connections are refused, so nobody can have given its ranks away."""
    job = start_job(heartbeat_s=8.0, replicas=1)
    before = pids(job.saves())
    job.rendezvous["rendezvous"].kill()
    # A step takes more than 10 ms: longer than a pod that is cut off would go on.
    job.wait_steps(400)
    job.start_rendezvous()
    assert job.wait_running(0).recoveries == ()
    assert pids(job.wait_steps(10)) == before
    job.complete()
