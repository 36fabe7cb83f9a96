"""Where a worker finds what all ranks go back to."""

import os

import pytest

from unbroken import restored_to
from unbroken.memory import is_available
from unbroken.memory.place import num_processors, read_place
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Candidate, Restore

OLD, NEW = Restore((Candidate(1, 2, 3, 4),)), Restore((Candidate(1, 3, 5, 4),))


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> restored_to.Told:
    """Nothing, at first."""
    fresh = restored_to.Told()
    monkeypatch.setattr(restored_to, "told", fresh)
    monkeypatch.delenv(restored_to.VARIABLE, raising=False)
    return fresh


def test_wrapper_tells_the_process_it_is_in(told: restored_to.Told) -> None:
    assert read_place().restore is None
    told.restore = NEW
    assert read_place().restore == NEW
    assert read_place({}).restore is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, False, id="a process of no job"),
        pytest.param({"UNBROKEN_DIR": "/run/pod"}, False, id="a job without memory"),
        pytest.param({"UNBROKEN_DIR": "/run/pod", "UNBROKEN_MEMORY_LIMIT": "1000"}, True, id="a job with memory"),
        pytest.param({"UNBROKEN_POD_FOLDER": "/run/pod", "UNBROKEN_MEMORY": "1Mi"}, True, id="standalone"),
    ],
)
def test_process_knows_whether_its_job_has_memory_for_checkpoints(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], expected: bool
) -> None:
    for name in ("UNBROKEN_DIR", "UNBROKEN_POD_FOLDER", "UNBROKEN_MEMORY_LIMIT", "UNBROKEN_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert is_available() is expected


@pytest.mark.parametrize(
    ("text", "restore"),
    [
        pytest.param(wire.encode(OLD), OLD, id="told"),
        pytest.param("", None, id="told that there is nothing"),
        pytest.param("{", None, id="cannot be read"),
    ],
)
def test_variable_of_a_process_without_a_wrapper_counts_where_it_is_set(
    told: restored_to.Told, monkeypatch: pytest.MonkeyPatch, text: str, restore: Restore | None
) -> None:
    told.restore = NEW
    monkeypatch.setenv(restored_to.VARIABLE, text)
    assert read_place().restore == restore


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, 16, id="alone"),
        pytest.param({"LOCAL_WORLD_SIZE": "4"}, 4, id="as torchrun says"),
        pytest.param({"UNBROKEN_RANKS_PER_POD": "8"}, 2, id="as the job says"),
        pytest.param({"LOCAL_WORLD_SIZE": "5"}, 3, id="not a whole number each"),
        pytest.param({"LOCAL_WORLD_SIZE": "100"}, 1, id="more workers than processors"),
        pytest.param({"LOCAL_WORLD_SIZE": "none"}, 16, id="no number"),
    ],
)
def test_workers_of_a_pod_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert num_processors(values) == expected
