"""Checkpoints in memory as a user sees them: jobs that break go on with the very numbers of one that did not."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar.memory_runs import SHAPE, WORKLOAD, Calm, losses, restored, train

from unbroken.folders import lock_folder

EVERY = 2
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_every_loss_is_that_of_a_run_without_faults(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, kind: str
) -> None:
    """Exception, killed worker, each point of a save, killed keeper: the losses are the same bit by bit."""
    faults = ["raise:0:1:3", "kill:1:2:5", "begun:2:0:6", "copied:3:3:6", "half-sealed:4:1:6", "sealed:5:2:8"]
    train(start_job, tmp_path / "broken", kind, *faults, "kill-keeper:6:0:9", "raise:6:1:11")
    assert losses(tmp_path / "broken") == calm(kind)
    steps = restored(tmp_path / "broken")
    assert steps.pop(0) == {"None"}
    assert all(len(step) == 1 and step != {"None"} for step in steps.values()), steps
    assert len(steps) >= 7


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_an_optimizer_within_an_object_of_the_script_goes_on_as_well(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Seen before: its averages began anew after each fault, and the log alone said so."""
    monkeypatch.setenv("TEST_WRAPPED", "1")
    train(start_job, tmp_path / "broken", kind, "raise:0:1:3", "kill:1:2:5", "raise:2:3:9")
    monkeypatch.delenv("TEST_WRAPPED")
    assert losses(tmp_path / "broken") == calm(kind)
    steps = restored(tmp_path / "broken")
    assert steps.pop(0) == {"None"}
    assert len(steps) == 3
    assert all(len(step) == 1 and step != {"None"} for step in steps.values()), steps


def test_a_smaller_world_has_the_same_averages_of_such_an_optimizer(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has another part of each then."""
    for name in ("TEST_WRAPPED", "TEST_RESIZE", "TEST_STATE"):
        monkeypatch.setenv(name, "1")
    shape = (*SHAPE, "--min-pods", "1", "--max-replacements", "0")
    train(start_job, tmp_path / "broken", "fsdp2", "kill-pod:0:2:7", shape=shape)
    worlds = {line.split()[2] for line in (tmp_path / "broken" / "restored").read_text().splitlines()}
    assert worlds == {"2", "4"}
    saved: dict[str, str] = {}
    loaded: dict[str, str] = {}
    for line in (tmp_path / "broken" / "states").read_text().splitlines():
        iteration, what, step, digest = line.split()
        if what == "loaded" and step != "None":
            loaded[step] = digest
        elif iteration == "0":
            saved[step] = digest
    assert loaded
    assert loaded == {step: saved[step] for step in loaded}


def test_a_fault_beside_a_step_that_is_saved_twice_costs_that_step_at_most(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the callbacks of two libraries do. Those who have saved it twice still have the step before."""
    monkeypatch.setenv("TEST_TWICE", "1")
    faults = {"late-kill": 4, "again-raise": 6, "late-begun": 8, "again-half-sealed": 10}
    words = [f"{what}:{iteration}:{iteration}:{step}" for iteration, (what, step) in enumerate(faults.items())]
    train(start_job, tmp_path / "broken", "fsdp2", *words)
    assert losses(tmp_path / "broken") == calm("fsdp2")
    steps = restored(tmp_path / "broken")
    assert steps.pop(0) == {"None"}
    for (what, step), found in zip(faults.items(), steps.values(), strict=True):
        # Where nobody waited, others may not have saved it once.
        assert found == {str(step - EVERY)} or (what.startswith("again") and found == {str(step)}), (what, steps)


GIVEN_UP = "was restored twice and is given up: both times process-signal, and no newer step was saved"


def test_a_worker_that_is_killed_in_a_load_leaves_a_load_for_the_next_one(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path
) -> None:
    """At each point: found, verified, half copied, copied but not told to the keeper."""
    faults = ["raise:0:1:7", "found:1:2:0", "verified:2:3:0", "half-read:3:1:0", "read:4:0:0"]
    job = train(start_job, tmp_path / "broken", "fsdp2", *faults)
    assert losses(tmp_path / "broken") == calm("fsdp2")
    steps = restored(tmp_path / "broken")
    assert steps.pop(0) == {"None"}
    last = max(steps)
    assert last >= 5
    found = steps.pop(last) if GIVEN_UP in job.text() else set()
    # All of them go back to the one step; a rank that was killed notes nothing.
    assert set().union(*steps.values()) in ({"4"}, {"6"}), f"{steps}\n{job.text()}"
    # Where the other ranks were faster than the one that is killed half-way, two iterations began with that step.
    assert found in (set(), {"2"}, {"4"}), f"{found}\n{job.text()}"


AWAY = "@kill-rendezvous"


@pytest.mark.parametrize(
    "faults",
    [
        ("kill-rendezvous:0:1:3", "raise:0:1:3", f"found{AWAY}:1:2:0"),
        (f"begun{AWAY}:0:0:4", "kill:0:3:5", f"verified{AWAY}:1:2:0"),
        (f"copied{AWAY}:0:1:4", "raise:0:1:5", f"half-read{AWAY}:1:1:0"),
        (f"sealed{AWAY}:0:0:4", "kill:0:0:5", f"read{AWAY}:1:3:0"),
    ],
)
def test_the_rendezvous_may_end_at_each_point_of_a_save_a_fault_and_a_load(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    """A new one knows of no step: keepers and agents tell it what was sealed."""
    train(start_job, tmp_path / "broken", "fsdp2", *faults)
    assert losses(tmp_path / "broken") == calm("fsdp2")
    steps = restored(tmp_path / "broken")
    assert steps.pop(0) == {"None"}
    assert steps
    assert all(len(step) == 1 and step != {"None"} for step in steps.values()), steps
    assert len((tmp_path / "broken" / "rendezvous-killed").read_text().splitlines()) >= 2


def test_a_restarted_agent_and_its_keeper_find_the_checkpoints_again(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    job = train(start_job, tmp_path / "broken", "fsdp2", "kill-agent:0:2:5", "raise:0:1:7")
    assert "agent was killed by SIGKILL: started again" in job.text()
    assert restored(tmp_path / "broken")[1] in ({"4"}, {"6"})


def test_a_keeper_that_stands_still_costs_one_wait_and_no_second_fault(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path
) -> None:
    """Seen before: each load hung on it, until the job had failed as often as it may, beside an idle spare."""
    shape = (*SHAPE, "--soft-timeout", "150", "--hard-timeout", "160")
    job = train(start_job, tmp_path / "broken", "fsdp2", "stop-keeper:0:1:7", "raise:0:1:7", shape=shape)
    assert losses(tmp_path / "broken") == calm("fsdp2")
    steps = restored(tmp_path / "broken")
    assert set(steps) == {0, 1}
    assert steps[1] in ({"4"}, {"6"})
    assert "keeper says nothing, it is ended: silent_s=30" in job.text()


def test_a_flipped_bit_sends_all_ranks_to_the_step_before(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path
) -> None:
    job = train(start_job, tmp_path / "broken", "fsdp2", "corrupt:0:1:7", "raise:1:0:11")
    assert losses(tmp_path / "broken") == calm("fsdp2")
    assert restored(tmp_path / "broken")[1] == {"4"}
    assert "differ from what was sealed" in job.text()
    # The step that was given up is void; what came after it counts.
    assert restored(tmp_path / "broken")[2] in ({"8"}, {"10"})


def test_a_spare_reads_the_shards_of_a_lost_pod_on_the_same_host(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path
) -> None:
    train(start_job, tmp_path / "broken", "fsdp2", "kill-pod:0:2:7", shape=(*SHAPE, "--spares", "1"))
    assert losses(tmp_path / "broken") == calm("fsdp2")
    assert restored(tmp_path / "broken")[1] in ({"4"}, {"6"})


def test_a_smaller_world_reads_the_shards_of_the_larger_one(start_job: Callable[..., Any], tmp_path: Path) -> None:
    shape = (*SHAPE, "--min-pods", "1", "--max-replacements", "0")
    train(start_job, tmp_path / "broken", "fsdp2", "kill-pod:0:2:7", "raise:1:1:9", shape=shape)
    worlds = [line.split() for line in (tmp_path / "broken" / "restored").read_text().splitlines()]
    assert {(world, step) for iteration, _, world, step in worlds if iteration == "1"} <= {("2", "4"), ("2", "6")}
    assert {(world, step) for iteration, _, world, step in worlds if iteration == "2"} <= {("2", "6"), ("2", "8")}
    assert {iteration for iteration, *_ in worlds} >= {"0", "1", "2"}


def test_a_limit_that_is_too_small_is_told_with_the_size_needed(start_job: Callable[..., Any], tmp_path: Path) -> None:
    shape = ("--pods", "1", "--ranks-per-pod", "2", "--memory", "64Ki")
    job = train(start_job, tmp_path / "small", "fsdp2", shape=shape)
    assert "checkpoints in memory need" in job.text()
    assert "its limit is 65536" in job.text()
    assert restored(tmp_path / "small") == {0: {"None"}}


def test_the_status_says_for_as_long_as_it_lasts_that_a_limit_is_too_small(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    shape = ("--pods", "1", "--ranks-per-pod", "2", "--memory", "64Ki")
    job = start_job(*shape, workload="wrapped", command=[WORKLOAD, "fsdp2", str(tmp_path), "hold:0:1:7"])
    job.wait_for((tmp_path / "held").exists, "a rank that waits", 200.0)
    reason = job.wait_for(lambda: (job.status()["memory"] or {}).get("reason"), "a status that says why", 200.0)
    assert "checkpoints in memory need" in reason
    assert "but its limit is 65536" in reason
    # Not killed: what a killed run leaves in memory is there until the next one.
    job.process.terminate()
    assert job.process.wait(100.0) == 128 + signal.SIGTERM


def test_a_run_leaves_nothing_in_memory(start_job: Callable[..., Any], tmp_path: Path) -> None:
    train(start_job, tmp_path / "calm", "ddp", shape=("--pods", "1", "--ranks-per-pod", "2", "--memory", "8Mi"))
    # Those of runs that live are locked.
    left = [
        folder for folder in Path("/dev/shm", f"unbroken-{os.getuid()}").iterdir() if lock_folder(folder) is not None
    ]
    assert left == []


def test_a_job_without_memory_has_no_keeper_and_says_what_is_missing(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    job = start_job("--pods", "1", workload="wrapped")
    job.wait_started(0, 1)
    assert [process for agent in job.parts("unbroken.agent") for process in agent.children(recursive=True)] == []
    assert job.complete() == 0
    plain = train(start_job, tmp_path / "plain", "ddp", shape=("--pods", "1"))
    assert "unbroken run --memory SIZE" in plain.text()
    assert restored(tmp_path / "plain") == {0: {"None"}}
