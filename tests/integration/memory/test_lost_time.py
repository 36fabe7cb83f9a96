"""A small run of `benchmarks/lost_time.py`, of our own systems, and what it makes of time stamps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIMIT_S = 500.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", ["unbroken-memory", "unbroken-disk", "unbroken-process"])
def test_a_small_run_loses_no_more_than_the_steps_since_the_last_checkpoint(tmp_path: Path, system: str) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "lost_time.py"), "--quick", "--kinds", "exception", "--loud"]
    done = subprocess.run(
        [*command, "--systems", system, "--limit", str(LIMIT_S), "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        timeout=LIMIT_S + 60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())
    assert (row["system"], row["fault"], row["steps_redone"], row["reason"]) == (system, "exception", 2, "")
    assert set(row["terms"]) == {"restart", "join", "model", "restore", "redo"}
    assert abs(sum(row["terms"].values()) - row["lost_s"]) < 0.01
    assert f"| exception | {system} |" in done.stdout


def test_time_is_lost_from_the_last_step_before_a_fault_to_the_next_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from lost_time import Recovery, recoveries
    from lost_time_job import Mark

    words = [
        ("step", 4, 0, 10), ("step", 4, 1, 11), ("fault", 5, 1, 12), ("entered", -1, 1, 13), ("entered", -1, 0, 14),
        ("joined", -1, 0, 15), ("joined", -1, 1, 15), ("built", -1, 0, 17), ("built", -1, 1, 18),
        ("restored", 3, 0, 19), ("restored", 3, 1, 21), ("step", 4, 0, 22), ("step", 4, 1, 22),
        ("step", 5, 0, 24), ("step", 5, 1, 25), ("fault", 8, 1, 26), ("step", 8, 0, 27),
    ]  # fmt: skip
    marks = [Mark(name, step, rank, at_s * 10**9) for name, step, rank, at_s in words]
    terms = {"restart": 3.0, "join": 1.0, "model": 3.0, "restore": 3.0, "redo": 4.0}
    # The second one did not come back: one rank alone has made its step.
    assert recoveries(marks, [5, 8]) == [Recovery(14.0, 1, terms)]


def test_a_step_is_timed_where_nothing_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from lost_time import mean_step_s
    from lost_time_job import Mark

    words = [
        ("step", 4, 0, 10), ("step", 4, 1, 11), ("step", 5, 0, 12), ("fault", 6, 1, 13), ("entered", -1, 0, 14),
        ("restored", 3, 0, 20), ("step", 4, 0, 22), ("step", 5, 0, 26), ("step", 6, 0, 29),
    ]  # fmt: skip
    marks = [Mark(name, step, rank, at_s * 10**9) for name, step, rank, at_s in words]
    assert mean_step_s(marks) == 3.0
    assert mean_step_s(marks[3:7]) is None
