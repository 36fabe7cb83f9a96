"""A pod that computes wrong numbers, or sends them to others, before the first plan of a job: it gets no rank."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar.launch import hostile_pairs, hostile_preflight

from .test_planned_moves import WORKLOAD, made_by

BROKEN = "digits-0"
FOUND = "preflight-matmul on cpu is fatal: float32: 1 of 65536 products are wrong"


@pytest.fixture
def image(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the preflight of one pod, and of no other one, compute wrong products."""
    folder = tmp_path_factory.mktemp("image")
    shutil.copy(hostile_preflight.__file__, folder / "hostile_preflight.py")
    hook = "import os\nfrom hostile_preflight import behave\n"
    hook += f"behave('product' if os.environ.get('UNBROKEN_POD') == {BROKEN!r} else 'well')\n"
    (folder / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(("mode", "has_rank"), [("Act", False), ("Observe", True)])
def test_who_computes_wrong_numbers_gets_a_rank_only_where_that_changes_nothing(
    start_job: Callable[..., Any], tmp_path: Path, mode: str, has_rank: bool
) -> None:
    options = ("--pods", "2", "--spares", "1", "--last-call", "100", "--job", "digits", "--preflight", mode)
    job = start_job(*options, workload="wrapped", command=[str(WORKLOAD)])
    job.wait_for(lambda: all(len(made_by(tmp_path, rank, 0)) > 2 for rank in range(2)), "steps of both ranks")
    status = job.status()
    ranks = {pod["pod"]: pod["ranks"] for pod in status["pods"]}
    assert sorted(rank for of_pod in ranks.values() for rank in of_pod) == [0, 1]
    assert bool(ranks[BROKEN]) is has_rank
    assert [(item["pod"], item["finding"]["check"]) for item in status["health"]["findings"]] == [
        (BROKEN, "preflight-matmul")
    ]
    assert (status["health"]["num_pods"], status["recoveries"]) == (3, [])
    job.wait_for(lambda: FOUND in job.text(), "the finding on the console")
    assert job.complete() == 0


@pytest.fixture
def adapters(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one pod, and no other one, send other numbers than it has."""
    folder = tmp_path_factory.mktemp("image")
    shutil.copy(hostile_pairs.__file__, folder / "hostile_pairs.py")
    hook = "import os\nfrom hostile_pairs import behave\n"
    hook += f"behave('corrupt' if os.environ.get('UNBROKEN_POD') == {BROKEN!r} else '')\n"
    (folder / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("adapters")
def test_who_sends_wrong_numbers_to_all_others_gets_no_rank(start_job: Callable[..., Any], tmp_path: Path) -> None:
    options = ("--pods", "2", "--spares", "2", "--last-call", "100", "--job", "digits", "--preflight", "Act")
    times = ("--preflight-pairs", "--preflight-timeout", "300")
    job = start_job(*options, *times, workload="wrapped", command=[str(WORKLOAD)])
    job.wait_for(lambda: all(len(made_by(tmp_path, rank, 0)) > 2 for rank in range(2)), "steps of both ranks")
    status = job.status()
    ranks = {pod["pod"]: pod["ranks"] for pod in status["pods"]}
    assert sorted(rank for of_pod in ranks.values() for rank in of_pod) == [0, 1]
    found = [
        (item["pod"], item["finding"]["check"], item["finding"]["verdict"]) for item in status["health"]["findings"]
    ]
    assert found == [(BROKEN, "preflight-pairs", "fatal")], status["health"]
    assert ranks[BROKEN] == []
    assert status["recoveries"] == []
    assert "who pass with others (WrongDataError: " in status["health"]["findings"][0]["finding"]["message"]
    assert job.complete() == 0
