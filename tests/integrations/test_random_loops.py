"""Loops of 2 and 3 ranks with options and faults that are drawn from a seed: each step is that of a calm training.

UNBROKEN_RANDOM_LOOPS is the number of seeds of DDP and of FSDP2, or two numbers `first:last`.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "jobs" / "random_loop.py"
LIMIT_S = 280.0
LAYOUTS = ((2, 1), (2, 2), (3, 1))
"""Ranks, and the pods that have them."""
PLACES = ("begin", "load", "step", "forward", "stepped", "save", "end")
KINDS = ("exception", "exception", "kill", "exit")

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(LIMIT_S + 20)]


def seeds() -> range:
    """Return those to try."""
    first, _, last = os.environ.get("UNBROKEN_RANDOM_LOOPS", "1").rpartition(":")
    return range(int(first or 0), int(last))


def draw_faults(chance: random.Random, num_ranks: int, steps: int) -> list[list[dict[str, Any]]]:
    """Return one that surely comes, with a checkpoint to go back to, and two for each of some later iterations."""

    def one(place: str, time: int) -> dict[str, Any]:
        ranks = chance.choice([[chance.randrange(num_ranks)], [chance.randrange(num_ranks)], list(range(num_ranks))])
        return {"place": place, "time": time, "kind": chance.choice(KINDS), "ranks": ranks}

    sure = one(chance.choice(("step", "stepped")), chance.randint(5, steps))
    later = ([one(chance.choice(PLACES), chance.randint(1, 4)) for _ in range(2)] for _ in range(chance.randint(1, 4)))
    return [[sure], *later]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("seed", seeds())
def test_each_step_of_each_rank_is_that_of_a_calm_training(is_sharded: bool, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{seed} {is_sharded}")
    num_ranks, num_pods = chance.choice(LAYOUTS)
    chosen = {
        "is_sharded": is_sharded,
        "steps": chance.randint(6, 15),
        "parts": chance.choice((1, 1, 2)),
        "share": chance.choice((2, 3)),
        "every": chance.choice((1, 1, 2, 3)),
        "optimizer": chance.choice(("AdamW", "RMSprop", "RAdam", "Adagrad", "NAdam", "ASGD")),
    }
    faults = draw_faults(chance, num_ranks, int(chosen["steps"]))
    words = [f"--pods={num_pods}", f"--ranks-per-pod={num_ranks // num_pods}", "--memory=16Mi", str(JOB)]
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", *words],
        cwd=tmp_path,
        env={
            **os.environ,
            **{"PYTHONPATH": os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)])},
            **{"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", "PYTHONSAFEPATH": "1", "TEST_OUT": str(tmp_path)},
            **{"TEST_CHOSEN": json.dumps(chosen), "TEST_FAULTS": json.dumps(faults)},
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    drawn = (seed, num_ranks, num_pods, chosen, faults)
    assert done.returncode == 0, (drawn, (done.stdout + done.stderr)[-8000:])
    rows = [json.loads(line) for file in tmp_path.glob("notes-*") for line in file.read_text().splitlines()]
    steps = [(iteration, (rank, step), made) for kind, iteration, rank, step, *made in rows if kind == "step"]
    calm = {place: made for iteration, place, made in steps if iteration == "calm"}
    broken = [(iteration, place, made) for iteration, place, made in steps if iteration != "calm"]
    assert len(calm) == num_ranks * int(chosen["steps"])
    assert [row for row in rows if row[0] == "fault"], drawn
    assert {place for _, place, _ in broken} == set(calm), drawn
    assert [(iteration, place) for iteration, place, made in broken if made != calm[place]] == [], drawn
