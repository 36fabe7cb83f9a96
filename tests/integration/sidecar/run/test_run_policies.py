"""Rank assignment of the script, in real jobs: the coordinator plans by it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

Start = Callable[..., Any]
WORKLOAD = str(Path(__file__).parents[1] / "policy_workload.py")


def start(start_job: Start, monkeypatch: pytest.MonkeyPatch, policy: str, *options: str) -> Any:
    """Start pods of two workers with this policy."""
    monkeypatch.setenv("TEST_POLICY", policy)
    return start_job("--ranks-per-pod", "2", "--last-call", "60", *options, workload="wrapped", command=[WORKLOAD])


def pods_by_rank(job: Any, iteration: int) -> dict[int, int]:
    """Return the number of the pod that each rank of an iteration was on."""
    return {
        event.rank: int(event.name.split("-")[1]) for event in job.events("started-") if event.iteration == iteration
    }


def kill_pod(job: Any, number: int) -> None:
    """End a pod's launcher, and with it the pod."""
    name = next(pod["pod"] for pod in job.status()["pods"] if pod["pod"].endswith(f"-{number}"))
    job.part_of_pod("unbroken.launch", name).kill()


@pytest.mark.timeout(250)
def test_limit_and_divisor_of_the_script_hold_in_every_plan(start_job: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.8: six workers, at most five, in fours: four train, before and after a pod is lost."""
    job = start(start_job, monkeypatch, "narrowed", "--pods", "3", "--min-pods", "1", "--max-replacements", "0")
    job.wait_started(0, 4)
    assert job.status()["world_size"] == 4
    kill_pod(job, 0)
    job.wait_started(1, 4)
    assert job.status()["world_size"] == 4
    assert job.complete() == 0


@pytest.mark.timeout(250)
def test_spare_of_the_domain_that_the_scripts_keys_name_takes_over(
    start_job: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.26, 0.35: each process knows its own rack; nobody told the job."""
    job = start(start_job, monkeypatch, "tree", "--pods", "2", "--spares", "2")
    job.wait_started(0, 4)
    assert pods_by_rank(job, 0) == {0: 0, 1: 0, 2: 1, 3: 1}
    pods = job.status()["pods"]
    kill_pod(job, 1)
    job.wait_started(1, 4)
    assert pods_by_rank(job, 1) == {0: 0, 1: 0, 2: 3, 3: 3}
    _code, text = job.request("/v1/topology")
    lost, spare = (next(pod["pod"] for pod in pods if pod["pod"].endswith(f"-{number}")) for number in (1, 3))
    assert f"rack-1/{spare}: takes ranks 2-3 of rack-1/{lost}, both in rack-1.\n" in text.decode()
    assert job.complete() == 0


@pytest.mark.timeout(250)
def test_filter_of_the_scripts_tree_sets_the_size_of_the_world(
    start_job: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.38: a power of two of six workers, then of four, whose pods are whole."""
    job = start(start_job, monkeypatch, "powers", "--pods", "3", "--min-pods", "1", "--max-replacements", "0")
    job.wait_started(0, 4)
    kill_pod(job, 0)
    job.wait_started(1, 4)
    kill_pod(job, 1)
    job.wait_started(2, 2)
    assert set(pods_by_rank(job, 2).values()) == {2}
    assert job.complete() == 0


@pytest.mark.timeout(250)
def test_highest_ranks_fill_the_gaps(start_job: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.12"""
    job = start(start_job, monkeypatch, "gaps", "--pods", "3", "--min-pods", "1", "--max-replacements", "0")
    job.wait_started(0, 6)
    kill_pod(job, 0)
    job.wait_started(1, 4)
    assert pods_by_rank(job, 1) == {0: 2, 1: 2, 2: 1, 3: 1}
    job.wait_for(lambda: "no more (--max-replacements)" in job.text(), "end of the lost pod")
    assert job.complete() == 0, "enough pods are left: the run goes on"


@pytest.mark.timeout(250)
def test_workers_that_ask_for_different_things_end_the_job_with_the_words_of_both(
    start_job: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(start_job, monkeypatch, "different", "--pods", "2")
    assert job.wait_for_exit() == 1
    text = job.text()
    assert "rank_assignment: want the same on all workers, got MaxActiveWorldSize(" in text
    assert "MaxActiveWorldSize(2)" in text
    assert "MaxActiveWorldSize(3)" in text


@pytest.mark.timeout(250)
def test_own_policy_gives_the_ranks_after_a_killed_worker(start_job: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3: one worker is asked, and everybody follows."""
    job = start(start_job, monkeypatch, "own", "--pods", "2", "--spares", "1")
    before = job.wait_started(0, 4)
    assert pods_by_rank(job, 0) == {0: 2, 1: 2, 2: 1, 3: 1}
    os.kill(before[0], signal.SIGKILL)
    job.wait_started(1, 4)
    # Workers are numbered by rank, then the idle ones: 1 on pod 2, 2 and 3 on pod 1, 4 and 5 on pod 0.
    assert pods_by_rank(job, 1) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert len({event.pid for event in job.events("asked-")}) == 1
    assert job.complete() == 0


@pytest.mark.timeout(250)
def test_groups_are_counted_by_what_each_worker_said(start_job: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.15, 0.16: only pods 1 and 2 know that they are together, and without pod 2 they are too few."""
    job = start(start_job, monkeypatch, "counted", "--pods", "3", "--min-pods", "1", "--max-replacements", "0")
    job.wait_started(0, 6)
    kill_pod(job, 2)
    job.wait_started(1, 2)
    assert pods_by_rank(job, 1) == {0: 0, 1: 0}
    assert job.complete() == 0


@pytest.mark.timeout(250)
def test_own_policy_that_raises_fails_the_job_with_its_words(
    start_job: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = start(start_job, monkeypatch, "own", "--pods", "2")
    before = job.wait_started(0, 4)
    (tmp_path / "raise").touch()
    os.kill(before[0], signal.SIGKILL)
    assert job.wait_for_exit() == 1
    assert "rank_assignment: KeyError: 'no plan for this'" in job.text()
    assert "policy_workload.py" in job.text()


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("is_killed", "options"),
    [
        pytest.param(True, [], id="killed"),
        # A worker of a busy machine that trains must not be taken for one that hangs.
        pytest.param(False, ["--soft-timeout", "6", "--hard-timeout", "12"], id="silent"),
    ],
)
def test_another_worker_is_asked_when_the_first_is_lost_or_hangs(
    start_job: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_killed: bool, options: list[str]
) -> None:
    job = start(start_job, monkeypatch, "own", "--pods", "3", *options)
    before = job.wait_started(0, 6)
    (tmp_path / "hang").touch()
    os.kill(before[5], signal.SIGKILL)
    asked = job.wait_for(lambda: job.events("asked-"), "first question")[0].pid
    assert asked == before[0]
    if is_killed:
        psutil.Process(asked).kill()
    job.wait_for(lambda: not psutil.pid_exists(asked) or job.events("asked-")[1:], "end of the first that was asked")
    (tmp_path / "hang").unlink()
    iterations = job.wait_for(
        lambda: [e.iteration for e in job.events("started-") if e.iteration > 0], "next iteration"
    )
    job.wait_started(iterations[0], 6)
    assert {event.pid for event in job.events("asked-")} != {asked}
    assert job.complete() == 0
