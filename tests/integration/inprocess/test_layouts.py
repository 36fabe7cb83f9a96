"""Every kind of training, while each process gets other ranks in worlds of other sizes: nothing of the former stays.

What is saved is compared, bit for bit, with a run in which each iteration has new processes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.matrix import note

from unbroken_core.vocabulary.reasons import Cause, JobPhase

from .agent_double import AgentDouble, Policy
from .forked import MUCH_OF_TORCH

pytestmark = [pytest.mark.first, pytest.mark.timeout(900)]
LIMIT_S = 400.0

SCENARIOS = {
    "first": (0, 1, 2, 3),
    "same rank": (0, 1, 2, 3),
    "other rank": (3, 2, 1, 0),
    "smaller world": (2, 0),
    "larger world": (1, 0, 3, 2),
    "spare took over": (1, 0, 4, 2),
}
"""Local rank of each worker, in the order of their ranks; one iteration after the other. Worker 4 is a spare until 3 is
killed in the iteration before the last."""
VICTIM = 3
KINDS = (
    "DDP",
    "FSDP2",
    "FSDP2 of even shards",
    "HSDP",
    "TP",
    "TP+FSDP",
    "DCP async_save",
    "compile+collective",
    "DeviceMesh slices",
    "DTensor ops",
    "pipeline",
)


@dataclass(frozen=True)
class Saved:
    """What one rank said of one kind in one iteration."""

    begun: str
    trained: str
    read: str


def run(folder: Path, kinds: str, policy: Policy, victim: int | None = None) -> Any:
    """Train these kinds in one layout after the other; return the job, whose events say what was saved."""
    folder.mkdir()
    variables = {"TEST_CHECKPOINTS": str(folder / "checkpoints"), "TEST_KINDS": kinds}
    variables["TEST_ITERATIONS"] = str(len(policy.layouts))
    if victim is not None:
        variables["TEST_VICTIM"] = f"{len(policy.layouts) - 2} {victim}"
    with AgentDouble(folder, "layouts", policy, variables, MUCH_OF_TORCH) as job:
        job.wait_for(lambda: has_ended(job, victim), "the end", LIMIT_S)
        assert job.events("failed") == []
        assert job.phase is JobPhase.COMPLETE
        return job


def has_ended(job: Any, victim: int | None) -> bool:
    """Return whether the job is complete, or cannot become so any more."""
    lost = {local_rank - 1000 for local_rank in list(job.workers) if local_rank >= 1000}
    return job.phase is JobPhase.COMPLETE or bool(job.events("failed")) or bool(lost - {victim})


def fresh(folder: Path, kinds: str, layouts: tuple[tuple[int, ...], ...]) -> Any:
    """Do the same with new processes in each iteration."""
    return run(folder, kinds, Policy(4, 5, layouts=layouts, does_renew=True, does_respawn=True))


def by_cell(job: Any) -> dict[tuple[str, str], dict[int, Saved]]:
    """Return what each rank said last, by kind and scenario: after a new process came, it is said again."""
    scenarios = list(SCENARIOS)
    cells: dict[tuple[str, str], dict[int, Saved]] = {}
    for event in job.events("saved"):
        found = event.values
        cell = cells.setdefault((found["kind"], scenarios[found["number"]]), {})
        cell[event.rank] = Saved(found["begun"], found["trained"], found["read"])
    return cells


def misread(cells: dict[tuple[str, str], dict[int, Saved]]) -> list[tuple[str, str]]:
    """Return where the file, read back, is not what was trained."""
    return [cell for cell, ranks in cells.items() if any(one.trained != one.read for one in ranks.values())]


def test_what_is_saved_after_any_change_of_ranks_is_what_new_processes_save(tmp_path: Path) -> None:
    layouts, kinds = tuple(SCENARIOS.values()), ",".join(KINDS)
    job = run(tmp_path / "changing", kinds, Policy(4, 5, layouts=layouts), VICTIM)
    seen, wanted = by_cell(job), by_cell(fresh(tmp_path / "fresh", kinds, layouts))
    assert len(seen) == len(KINDS) * len(SCENARIOS)
    assert misread(seen) == []
    assert seen.keys() == wanted.keys()
    assert [cell for cell in seen if seen[cell] != wanted[cell]] == []
    # The processes lived through it all: no answer was found by starting them again.
    pids = {(event.values["local"], event.values["pid"]) for event in job.events("saved")}
    assert len(pids) == 5
    assert {cause for _, cause in job.faults()} == {Cause.EXCEPTION}
    assert "outlives its iteration" not in job.output()
    for kind, scenario in seen:
        note(kind, scenario, "bit for bit")


@pytest.mark.nightly
def test_compiled_code_with_shards_in_it_is_right_for_other_ranks_too(tmp_path: Path) -> None:
    """The compiler keeps meshes in cycles through C++. They may be a script's, so a new process comes."""
    layouts = tuple(SCENARIOS.values())[:3]
    job = run(tmp_path / "changing", "compile+TP", Policy(4, 5, layouts=layouts, does_respawn=True))
    seen, wanted = by_cell(job), by_cell(fresh(tmp_path / "fresh", "compile+TP", layouts))
    assert list(seen) == [("compile+TP", scenario) for scenario in list(SCENARIOS)[:3]]
    assert seen == wanted
    assert misread(seen) == []
    assert {cause for _, cause in job.faults()} <= {Cause.EXCEPTION, Cause.STALE_STATE, Cause.PROCESS_EXIT}
