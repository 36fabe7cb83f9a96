"""Restarts with real GPUs and NCCL; skipped where there are none."""

from pathlib import Path

import pytest
import torch

from unbroken_core.vocabulary.reasons import Cause

from .agent_double import Policy
from .test_inprocess_faults import start, values

NUM_GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def need_gpus(number: int) -> None:
    """Skip the test where there are fewer: nothing but GPUs runs NCCL. UNBROKEN_REQUIRE=gpu makes that a failure."""
    if number > NUM_GPUS:
        pytest.skip(f"needs GPUs and a torch with NCCL: want {number}, got {NUM_GPUS}")


@pytest.fixture(autouse=True)
def one_gpu() -> None:
    """Two ranks share it where there is no second."""
    need_gpus(1)


@pytest.mark.parametrize("num_groups", [0, 3])
def test_rank_that_waits_on_its_gpu_is_freed(tmp_path: Path, num_groups: int) -> None:
    """2.10: NCCL's communicators are aborted; both processes go on, with all of their GPU's memory free."""
    with start(tmp_path, "nccl_blocked", Policy(2, 2), TEST_GROUPS=str(num_groups)) as job:
        job.wait_for_event("blocks")
        (tmp_path / "go").touch()
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [2.0, 2.0]
        assert job.faults()[0] == (1, Cause.EXCEPTION)
        assert [event.values["bytes"] for event in job.events("memory")] == [0] * 4
        assert len({event.values["pid"] for event in job.events("started")}) == 2
        # NCCL's abort raises nothing, and the GPU goes on: the function must not.
        assert not job.events("went_on")
        print("freed after", [event.values["seconds"] for event in job.events("freed")], "s")


@pytest.mark.parametrize("section", ["atomic", "error"])
def test_what_an_aborted_collective_has_left_is_not_saved(tmp_path: Path, section: str) -> None:
    """2.7, 2.10: a collective that is queued only, when a section begins into which no abort comes."""
    with start(tmp_path, "nccl_queued", Policy(2, 2), TEST_SECTION=section) as job:
        job.wait_for_event("blocks")
        (tmp_path / "go").touch()
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [2.0, 2.0]
        assert not job.events("saved")
        assert len({event.values["pid"] for event in job.events("started")}) == 2


def test_process_outlives_the_loss_of_its_peer_in_a_collective(tmp_path: Path) -> None:
    """2.30: torch's watchdog, which hears of the loss, does not end it."""
    policy = Policy(2, 2, does_respawn=True)
    with start(tmp_path, "nccl_blocked", policy, TEST_GROUPS="0") as job:
        job.wait_for_event("blocks")
        job.kill(1)
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [2.0, 2.0]
        pids = {event.values["pid"] for event in job.events("started") if event.rank == 0}
        assert len(pids) == 1


def test_gpu_memory_is_free_before_the_function_starts_again(tmp_path: Path) -> None:
    """2.17: what the frames, the exception and the old groups held."""
    with start(tmp_path, "gpu_memory", Policy(1, 1)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert [(event.values["bytes"], event.values["alive"]) for event in job.events("memory")] == [(0, 0)] * 2


@pytest.mark.parametrize("sickness", ["assert", "spin"])
def test_worker_with_a_sick_gpu_leaves(tmp_path: Path, sickness: str) -> None:
    """2.14: a context that is broken, and a kernel that does not end."""
    with start(tmp_path, "sick_gpu", Policy(2, 2), TEST_SICKNESS=sickness) as job:
        job.wait_for_end()
        assert values(job) == [1]
        assert (1, Cause.UNHEALTHY) in job.faults()
