"""`unbroken run` of scripts that hang: who is blamed. With gloo, and once with NCCL."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[4]
WORKLOAD = Path(__file__).parents[1] / "hang_workload.py"
KINDS = Path(__file__).parents[1] / "hang_kinds_workload.py"


WHO = {"cpu": "rank 1 is not in a collective but in its own code", "gpu": ""}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rank_that_is_not_in_the_collective_is_blamed_without_any_ping(
    start_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """With NCCL the rank that waits is in no call of torch.distributed: only the flight recorder tells."""
    # NCCL has no other devices.
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [str(WORKLOAD), device]
    job = start_job("--pods", "2", "--soft-timeout", "12", workload="wrapped", command=command)
    assert job.wait_for_exit() == 0, job.text()
    if "REFUSED" in job.text():
        pytest.skip("needs two GPUs: NCCL does not let two ranks use one")
    # First nobody is named; then the one that the other waits for.
    told = [line.partition("fault 1: ")[2] for line in job.text().splitlines() if "fault 1: " in line]
    words = r"soft-timeout of rank 1 in hang-workload-\d: no rank pings; "
    assert re.match(words + WHO[device], told[-1]), job.text()
    assert "fault 2" not in job.text()


HANGS = {
    "sleep:2": r"rank 2 hung for \d+ s in its own code \(\S+ sleep_for_ever\)",
    "spin:1": r"rank 1 hung for \d+ s in its own code \(\S+ spin_for_ever\)",
    "backward:3": r"rank 3 hung for \d+ s in its own code \(\S+ sleep_for_ever\)",
    "item:2": r"rank 2 hung for \d+ s in its own code \(\S+ sleep_for_ever\)",
    "work:1": r"rank 1 hung for \d+ s in its own code \(\S+ sleep_for_ever\)",
    "loader:1": r"rank 1 hung for \d+ s in a data loader",
    "sleep:0": r"rank 0 hung for \d+ s in its own code \(\S+ sleep_for_ever\)",
    "sleep:1+2": r"ranks 1, 2 hung for \d+ s in their own code",
    "stop:3": r"rank 3 hung for \d+ s without running any thread",
    "gil:1": r"rank 1 hung for \d+ s without running any thread",
}
"""How each hang is told. On a busy machine it may not be known, or a slow step may count as one more hang."""


@pytest.mark.timeout(400)
def test_rank_that_hangs_is_blamed_or_nobody_and_never_one_that_waits(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.22"""
    monkeypatch.setenv("TEST_HANGS", str(tmp_path / "marks"))
    job = run_hangs(start_job, tmp_path / "marks", HANGS)
    told = last_words(job.text())
    blamed = [words for words in told.values() if "rank not known" not in words]
    right = "|".join(HANGS.values())
    assert blamed
    assert all(re.search(right, words) for words in blamed), job.text()


WAITS = {
    "nested:2": r"rank 2 hung for \d+ s in its own code \(\S+ sleep_for_ever\) while .*; "
    r".*rank 0 in all_reduce Float\[1\] \(collective \d+ of group '\d+'\) waits for rank 2",
    "mismatch:1": r"the script's mistake, no machine's: as collective \d+ of group '\d+' began "
    r"ranks 0, 2, 3 all_reduce Float\[1\], rank 1 barrier",
    "circle:3": r"the script's mistake, no machine's: ranks wait for each other in a circle; "
    r".*rank 2 in all_reduce Float\[1\] \(collective \d+ of group '\d+'\) waits for rank 3",
}
"""How a hang in nested groups is told, by the flight recorder of torch. On a busy machine it may not be known."""


@pytest.mark.timeout(400)
def test_hang_in_nested_groups_is_blamed_on_the_rank_or_the_script(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_HANGS", str(tmp_path / "marks"))
    job = run_hangs(start_job, tmp_path / "marks", WAITS)
    known = [words for words in last_words(job.text()).values() if "rank not known" not in words]
    assert known, job.text()
    assert all(re.search("|".join(WAITS.values()), words) for words in known), job.text()


def run_hangs(start_job: Callable[..., Any], marks: Path, hangs: Collection[str]) -> Any:
    """Run a job on four pods through these hangs to its end; return it. `marks` has a file of each that happened."""
    marks.mkdir()
    options = ("--pods", "4", "--soft-timeout", "8", "--hard-timeout", "14")
    job = start_job(*options, workload="wrapped", command=[str(KINDS), ",".join(hangs), "pings"])
    assert job.wait_for_exit(360) == 0, job.text()
    assert len(list(marks.iterdir())) == len(hangs)
    return job


def last_words(text: str) -> dict[str, str]:
    """Return what a job's text says of each fault at last."""
    return dict(re.findall(r"fault (\d+): (.*)", text))
