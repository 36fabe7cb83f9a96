"""What the tests of partitions ask of a job."""

from unbroken_core.vocabulary.reasons import Cause, Rung

from .partition_job import Job, Save


def pids(saves: dict[int, Save]) -> dict[int, int]:
    """Return the process that has each rank."""
    return {rank: save.pid for rank, save in saves.items()}


def assert_replaced(job: Job, rank: int, before: dict[int, int], causes: tuple[Cause, ...]) -> None:
    """Check that one recovery gave this rank to the spare, and that no other process was touched."""
    after = pids(job.wait_trained(1))
    assert {r for r in before if before[r] != after[r]} == {rank}, job.text()
    (recovery,) = job.wait_running(1).recoveries
    assert recovery.cause in causes, recovery
    assert (recovery.rung, len(recovery.replaced_by)) == (Rung.POD, 1), recovery
