"""A fault while no rendezvous runs: the next one counts it from the loss, and says whose it was."""

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.reasons import Cause, JobPhase

from .partition_job import Job

AWAY_S = 12.0


@pytest.mark.timeout(200)
def test_a_recovery_counts_from_the_loss_that_no_rendezvous_was_there_to_see(start_job: Callable[..., Job]) -> None:
    job = start_job()
    lost, saves = job.pod_of(0), job.saves()
    before = job.status()
    assert before is not None
    ran_for_s, asked_s = before.ran_for_s or 0.0, time.monotonic()
    job.rendezvous["rendezvous"].send_signal(signal.SIGKILL)
    job.rendezvous["rendezvous"].wait()
    victim = psutil.Process(saves[0].pid)
    os.kill(victim.pid, signal.SIGKILL)
    job.wait_for(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, "end of rank 0")
    lost_s = time.monotonic()
    # Nothing is waited for but time: this is the length of the outage.
    time.sleep(AWAY_S)
    job.start_rendezvous()
    away_s = time.monotonic() - lost_s

    def recovered() -> JobStatus | None:
        status = job.status()
        is_over = status is not None and status.phase is JobPhase.RUNNING and any(r.ended_at for r in status.recoveries)
        return status if is_over else None

    status = job.wait_for(recovered, "end of the recovery")
    (recovery,) = status.recoveries
    assert (recovery.cause, recovery.pod, recovery.rank) == (Cause.PROCESS_SIGNAL, f"pod-{lost}", 0)
    # An agent that gets no processor sees the end of its worker later than this test.
    assert sum(recovery.phase_s.values()) >= away_s - 1.0, recovery
    # The new rendezvous knows the run from the pods' own words.
    assert status.ran_for_s is not None
    assert status.ran_for_s >= ran_for_s + (lost_s - asked_s) + away_s - 3.0
    assert status.ettr is not None
    assert status.gained_s <= status.ran_for_s - away_s + 1.0
    job.complete()
