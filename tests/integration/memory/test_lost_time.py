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
@pytest.mark.parametrize(
    "system",
    [
        "unbroken-memory",
        pytest.param("unbroken-disk", marks=pytest.mark.nightly),
        pytest.param("unbroken-process", marks=pytest.mark.nightly),
    ],
)
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
    assert set(row["terms"]) == {"progress", "checkpoint", "redo", "detect", "restart", "waiting"}
    assert set(row["phases"]) == {"restart", "join", "model", "restore", "redo"}
    (fault,) = row["faults"]
    for parts in (fault["terms"], fault["phases"]):
        assert sum(parts.values()) == pytest.approx(fault["lost_s"], abs=0.001)
    # It said so while it recovered: nothing else ends `detect`.
    assert fault["is_known"]
    assert fault["terms"]["redo"] > 0 < fault["terms"]["progress"]
    assert f"| exception | {system} |" in done.stdout


WORDS = [
    ("step", 4, 0, 10), ("step", 4, 1, 11), ("fault", 5, 1, 12), ("entered", -1, 1, 14), ("entered", -1, 0, 15),
    ("joined", -1, 0, 16), ("joined", -1, 1, 16), ("built", -1, 0, 18), ("built", -1, 1, 19),
    ("restored", 3, 0, 20), ("restored", 3, 1, 22), ("step", 4, 0, 23), ("step", 4, 1, 23),
    ("step", 5, 0, 25), ("step", 5, 1, 26), ("fault", 8, 1, 27), ("step", 8, 0, 28),
]  # fmt: skip
PHASES = {"restart": 4.0, "join": 1.0, "model": 3.0, "restore": 3.0, "redo": 4.0}


@pytest.mark.parametrize(
    ("more", "terms", "is_known"),
    [
        pytest.param(
            [("known", -1, -1, 13)], {"progress": 3, "redo": 2, "detect": 1, "restart": 9}, True, id="a fault"
        ),
        pytest.param([], {"progress": 3, "redo": 2, "restart": 10}, False, id="nobody said when it was known"),
        pytest.param(
            [("known", -1, -1, 40)], {"progress": 3, "redo": 2, "restart": 10}, False, id="known of a later one"
        ),
        pytest.param(
            [("known", -1, -1, 24)], {"progress": 3, "redo": 2, "detect": 10}, True, id="its line was read too late"
        ),
        pytest.param(
            [("known", -1, -1, 13), ("saved", 4, 1, 11.5), ("saved", 4, 0, 24)],
            {"progress": 2, "redo": 1.5, "checkpoint": 1.5, "detect": 1, "restart": 9},
            True,
            id="checkpoints after steps",
        ),
        pytest.param(
            [("known", -1, -1, 13), ("created", -1, -1, 13.25), ("started", -1, 0, 13.5), ("started", -1, 1, 13.75)],
            {"progress": 3, "redo": 2, "detect": 1, "waiting": 0.75, "restart": 8.25},
            True,
            id="pods were created again",
        ),
        pytest.param(
            [("known", -1, -1, 13), ("started", -1, 1, 13.75)],
            {"progress": 3, "redo": 2, "detect": 1, "restart": 9},
            True,
            id="a process that starts is no wait for a pod",
        ),
    ],
)
def test_every_second_from_the_last_step_to_the_next_new_one_is_in_one_term(
    monkeypatch: pytest.MonkeyPatch, more: list[tuple[str, int, int, float]], terms: dict[str, float], is_known: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from reports.lost_time_terms import TERMS, Recovery, recoveries
    from systems.lost_time_job import Mark

    marks = [Mark(name, step, rank, round(at_s * 10**9)) for name, step, rank, at_s in [*WORDS, *more]]
    want = {term: float(terms.get(term, 0)) for term in TERMS}
    assert sum(want.values()) == 15
    # The second one did not come back: one rank alone has made its step.
    assert recoveries(marks, [5, 8]) == [Recovery(15.0, 1, want, PHASES, is_known)]


def test_a_step_is_timed_where_nothing_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from reports.lost_time_terms import mean_step_s
    from systems.lost_time_job import Mark

    words = [
        ("step", 4, 0, 10), ("step", 4, 1, 11), ("saved", 4, 0, 11), ("step", 5, 0, 12), ("fault", 6, 1, 13),
        ("entered", -1, 0, 14), ("restored", 3, 0, 20), ("step", 4, 0, 22), ("step", 5, 0, 26), ("step", 6, 0, 29),
    ]  # fmt: skip
    marks = [Mark(name, step, rank, at_s * 10**9) for name, step, rank, at_s in words]
    assert mean_step_s(marks) == 3.0
    assert mean_step_s(marks[4:8]) is None
