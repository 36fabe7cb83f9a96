"""Ranks of a pod that is to leave move between two steps, with real processes and gloo: no step is made twice."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Observation, PodObservation
from unbroken_core.vocabulary.reasons import Cause

WORKLOAD = Path(__file__).parents[1] / "moves_workload.py"


def steps_of(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Return (iteration, step) of each step that a rank has made, in order."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(iteration), int(step)) for iteration, step in (line.split() for line in lines)]


def made_by(folder: Path, rank: int, iteration: int) -> list[int]:
    """Return the steps that a rank has made in one iteration."""
    return [step for made_in, step in steps_of(folder, rank) if made_in == iteration]


def observe(job: Any, leaving: str | None) -> None:
    """Tell the rendezvous, as the operator does, which pod is to leave."""
    seen = {
        pod["uid"]: PodObservation(
            pod["pod"], pod["node"], (), gone=Cause.POD_LEAVING if pod["pod"] == leaving else None
        )
        for pod in job.status()["pods"]
    }
    operator = derive_token(job.private("job-key").read_text(), Kind.OPERATOR, job.uid)
    assert job.request("/v1/observation", operator, data=wire.encode(Observation(seen)).encode())[0] == 204


@pytest.mark.timeout(200)
def test_pods_that_are_to_leave_give_their_ranks_away_after_a_step_that_all_have_saved(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of one pod is cordoned for a while; another pod is deleted, and goes once its rank has moved."""
    monkeypatch.setenv("UNBROKEN_DRAIN", "100")
    job = start_job("--pods", "2", "--spares", "1", "--last-call", "60", workload="wrapped", command=[str(WORKLOAD)])

    def wait_trained(iteration: int) -> None:
        job.wait_for(lambda: all(len(made_by(tmp_path, rank, iteration)) > 2 for rank in range(2)), f"{iteration}")

    def pod_of(rank: int) -> str:
        return next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [rank])

    wait_trained(0)
    cordoned = pod_of(1)
    observe(job, leaving=cordoned)
    wait_trained(1)
    observe(job, leaving=None)
    deleted = pod_of(0)
    job.part_of_pod("unbroken.launch", deleted).send_signal(signal.SIGTERM)
    wait_trained(2)
    recoveries = job.status()["recoveries"]
    assert job.complete() == 0
    told = [(recovery["cause"], recovery["pod"], recovery["rung"], recovery["detail"]) for recovery in recoveries]
    last = [made_by(tmp_path, 0, iteration)[-1] for iteration in (0, 1)]
    assert told == [
        ("pod-leaving", cordoned, "pod", f"moves after step {last[0]}"),
        ("pod-leaving", deleted, "pod", f"moves after step {last[1]}"),
    ]
    for rank in range(2):
        made = [step for _iteration, step in steps_of(tmp_path, rank)]
        assert made == list(range(1, len(made) + 1))


@pytest.mark.timeout(300)
def test_ranks_that_stand_for_a_move_go_on_where_a_new_rendezvous_knows_of_none(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """Seen before: all stood until the drain time was over, while the job was said to run."""
    shape = ("--pods", "2", "--spares", "1", "--last-call", "60", "--drain-timeout", "3000")
    job = start_job(*shape, workload="wrapped", command=[str(WORKLOAD)])
    job.wait_for(lambda: all(len(made_by(tmp_path, rank, 0)) > 2 for rank in range(2)), "two ranks")
    (tmp_path / "hold-0").touch()
    observe(job, leaving=next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [1]))
    job.wait_for(lambda: "move after step" in job.status()["message"], "ranks that stand")
    (rendezvous,) = job.parts("unbroken.rendezvous")
    rendezvous.kill()
    job.wait_for(lambda: {part.pid for part in job.parts("unbroken.rendezvous")} - {rendezvous.pid}, "a new rendezvous")
    (tmp_path / "hold-0").unlink()
    assert job.complete() == 0
    assert "fault 1" not in job.text()
    made = [[step for _iteration, step in steps_of(tmp_path, rank)] for rank in range(2)]
    assert made == [list(range(1, len(made[0]) + 1))] * 2


@pytest.mark.timeout(200)
def test_job_that_lost_a_pod_grows_back_after_a_step_that_all_have_saved(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """No spare: one rank trains on alone, until the pod that comes instead is ready."""
    shape = ("--pods", "2", "--min-pods", "1", "--grow-back", "0.5", "--last-call", "60")
    job = start_job(*shape, workload="wrapped", command=[str(WORKLOAD)])

    def has_trained(iteration: int) -> bool:
        return len(made_by(tmp_path, 1, iteration)) > 2

    job.wait_for(partial(has_trained, 0), "two ranks")
    lost = next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [1])
    for part in ("unbroken.agent", "unbroken.launch"):
        job.part_of_pod(part, lost).send_signal(signal.SIGKILL)
    job.wait_for(partial(has_trained, 2), "two ranks again")
    grown = job.status()["recoveries"][-1]
    assert job.complete() == 0
    alone, together = made_by(tmp_path, 0, 1), made_by(tmp_path, 0, 2)
    assert (grown["cause"], grown["detail"]) == ("capacity-returned", f"moves after step {alone[-1]}")
    assert together[0] == made_by(tmp_path, 1, 2)[0] == alone[-1] + 1
