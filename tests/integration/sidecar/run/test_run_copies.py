"""Whole jobs whose pods keep copies of each other's checkpoints, and lose a pod with all that was in it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.sidecar.conftest import RunningJob
from tests.integration.sidecar.memory_runs import WORKLOAD, Calm, losses, restored
from tests.processes import environment_of

from unbroken.folders import lock_folder
from unbroken.memory.disk import steps_on_disk

EVERY = 2
COPIES = ("--memory", "8Mi", "--memory-replicas", "1", "--reconnect-timeout", "60")
LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def sure_of_each_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_INSIST", "1")
    monkeypatch.setenv("TEST_STATE", "1")
    # Without it MKL computes another last bit where a tensor's memory begins elsewhere.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")


def start(start_job: Callable[..., Any], folder: Path, shape: tuple[str, ...], *faults: str) -> RunningJob:
    """Start a job; return it."""
    folder.mkdir()
    job: RunningJob = start_job(*COPIES, *shape, workload="wrapped", command=[WORKLOAD, "fsdp2", str(folder), *faults])
    return job


def memory_of(job: RunningJob) -> dict[str, Any]:
    """Return what the status says of the memory."""
    found: dict[str, Any] = job.status()["memory"]
    return found


def held(folder: Path, iteration: int) -> str | None:
    """Return the pod in which a rank waits to be killed; None before it does."""
    lines = (folder / "held").read_text().splitlines() if (folder / "held").exists() else []
    return next((line.split()[2] for line in lines if line.split()[0] == str(iteration)), None)


def lose_pod(job: RunningJob, folder: Path, iteration: int, protected: int) -> None:
    """Kill a whole pod at once, launcher, agent and keeper, when this step is protected and its rank waits."""
    pod = job.wait_for(lambda: held(folder, iteration), f"a rank that waits in iteration {iteration}", LIMIT_S)
    job.wait_for(lambda: memory_of(job)["protected_step"] >= protected, f"step {protected} protected", LIMIT_S)
    lose(job, pod)


def lose(job: RunningJob, *pods: str) -> None:
    """Kill whole pods in one go, as the loss of a host is: nobody sees one end before another."""
    parts, roots = [], []
    for pod in pods:
        agent, launcher = job.part_of_pod("unbroken.agent", pod), job.part_of_pod("unbroken.launch", pod)
        keeper = next(one for one in agent.children() if "unbroken.keeper" in one.cmdline())
        # What other keepers' lines, and the status of a rendezvous that was started again, call it.
        assert environment_of(keeper)["UNBROKEN_POD_UID"].startswith(f"{pod}-")
        root = Path(environment_of(keeper)["UNBROKEN_MEMORY_DIR"])
        assert any(root.glob("*/*.slot"))
        parts += [launcher, agent, keeper]
        roots.append(root)
    subprocess.run(["kill", "-KILL", *(str(part.pid) for part in parts)], check=False)
    job.wait_for(lambda: not any(root.exists() for root in roots), "the memory of lost pods to be gone", LIMIT_S)


def complete(job: RunningJob) -> None:
    """Wait for the end of the training."""
    assert job.process.wait(LIMIT_S) == 0, job.text()


def states(folder: Path, what: str) -> dict[tuple[int, int], str]:
    """Return the digests of whole states, by iteration and step."""
    lines = [line.split() for line in (folder / "states").read_text().splitlines()]
    return {
        (int(iteration), int(step)): digest for iteration, of, step, digest in lines if of == what and step != "None"
    }


def test_a_spare_takes_over_with_what_other_pods_have_and_no_loss_differs(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path
) -> None:
    """Twice: the second pod to go is one that the copies of the first restored."""
    shape = ("--pods", "2", "--ranks-per-pod", "2", "--spares", "1")
    folder = tmp_path / "broken"
    job = start(start_job, folder, shape, "hold:0:2:7", "hold:1:0:11")
    lose_pod(job, folder, 0, 6)
    job.wait_for(lambda: memory_of(job)["restored_step"] == 6, "step 6 restored", LIMIT_S)
    assert memory_of(job)["source"] == "memory"
    lose_pod(job, folder, 1, 10)
    complete(job)
    assert losses(folder) == calm("fsdp2")
    assert restored(folder) == {0: {"None"}, 1: {"6"}, 2: {"10"}}
    # Each step up to the one that a rank was lost in is made once, but those since the checkpoint.
    made = [line.split() for line in (folder / "losses").read_text().splitlines()]
    for iteration, last in ((0, 6), (1, 10)):
        assert max(int(step) for number, _, step, _ in made if int(number) == iteration) - last <= EVERY
    assert states(folder, "loaded") == {(1, 6): states(folder, "saved")[0, 6], (2, 10): states(folder, "saved")[1, 10]}
    left = Path("/dev/shm", f"unbroken-{os.getuid()}").iterdir()
    assert [one for one in left if lock_folder(one) is not None] == []


def test_a_smaller_world_goes_on_with_the_shards_of_a_lost_pod(start_job: Callable[..., Any], tmp_path: Path) -> None:
    """Then one of those that are left fails, and both read what they saved at the new size."""
    shape = ("--pods", "3", "--ranks-per-pod", "1", "--min-pods", "2", "--max-replacements", "0")
    folder = tmp_path / "broken"
    job = start(start_job, folder, shape, "hold:0:1:7", "raise:1:1:9")
    lose_pod(job, folder, 0, 6)
    complete(job)
    worlds = {tuple(line.split()[i] for i in (0, 2, 3)) for line in (folder / "restored").read_text().splitlines()}
    assert worlds == {("0", "3", "None"), ("1", "2", "6"), ("2", "2", "8")}
    loaded, saved = states(folder, "loaded"), states(folder, "saved")
    assert loaded == {(1, 6): saved[0, 6], (2, 8): saved[1, 8]}


def test_all_pods_lost_at_once_mean_the_disk_and_no_loss_differs(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners and holders of all copies go together, and with them a step that was protected."""
    wanted = calm("fsdp2")
    monkeypatch.setenv("TEST_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("TEST_DISK_EVERY", "4")
    # A rank that holds orders nothing more: what is due is on the disk before, however late the disk's processes start.
    monkeypatch.setenv("TEST_FLUSH_AT", "4")
    folder = tmp_path / "broken"
    job = start(start_job, folder, ("--pods", "2", "--ranks-per-pod", "2"), "hold:0:2:5")
    job.wait_for(lambda: held(folder, 0), "a rank that waits", LIMIT_S)
    job.wait_for(lambda: memory_of(job)["protected_step"] == 4, "step 4 protected", LIMIT_S)
    assert steps_on_disk(tmp_path / "disk") == [4]
    lose(job, *(pod["pod"] for pod in job.status()["pods"]))
    complete(job)
    assert restored(folder) == {0: {"None"}, 1: {"4"}}
    assert losses(folder) == wanted
    assert states(folder, "loaded") == {(1, 4): states(folder, "saved")[0, 4]}


def test_a_step_that_a_new_pod_has_from_others_is_not_on_the_disk_and_the_next_save_is(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is lost before its part of step 4 is written: a step of which a part is missing is none."""
    wanted = calm("fsdp2")
    monkeypatch.setenv("TEST_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("TEST_DISK_EVERY", "4")
    # The first save after it; the run fails where it is not on the disk.
    monkeypatch.setenv("TEST_FLUSH_AT", "6")
    folder = tmp_path / "broken"
    shape = ("--pods", "2", "--ranks-per-pod", "2", "--spares", "1")
    job = start(start_job, folder, shape, "stop-writer:0:2:3", "hold:0:2:5")
    lose_pod(job, folder, 0, 4)
    # It outlives its worker, to end what it writes.
    psutil.Process(int((folder / "stopped").read_text())).kill()
    complete(job)
    assert restored(folder) == {0: {"None"}, 1: {"4"}}
    assert losses(folder) == wanted
    assert steps_on_disk(tmp_path / "disk") == [8, 6]
    assert "step 4: not all ranks have their own parts of it in memory; a later save is" in job.text()
