"""Singletons of training frameworks, by doubles with their names: Accelerate's states, Lightning's rank."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state import caches
from unbroken.inprocess.torch_state.renewal import RankLayout, TorchState

STATES = ("PartialState", "AcceleratorState", "GradientState")


def accelerate_with(shared: dict[str, dict[str, int]], names: tuple[str, ...] = STATES) -> ModuleType:
    """Return a module with these states, each of which has a dictionary for the whole process."""
    module = ModuleType("accelerate.state")
    for name in names:
        setattr(module, name, SimpleNamespace(_reset_state=shared[name].clear))
    return module


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """States of a process that was rank 2."""
    found = {name: {"process_index": 2} for name in STATES}
    monkeypatch.setattr(caches, "MEMORIES", tuple(one for one in caches.MEMORIES if "accelerate" in one.module))
    monkeypatch.setitem(sys.modules, "accelerate.state", accelerate_with(found))
    return found


def test_the_states_of_accelerate_are_empty_after_an_iteration(shared: dict[str, dict[str, int]]) -> None:
    assert caches.empty_all() == ([], [])
    assert shared == {name: {} for name in STATES}


def test_an_accelerate_whose_states_cannot_be_emptied_gets_a_new_process_with_a_new_rank(
    shared: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", accelerate_with(shared, STATES[1:]))
    state = TorchState()
    state.take(RankLayout(2, 3))
    state.empty()
    state.take(RankLayout(2, 3))
    state.empty()
    with pytest.raises(StaleStateError, match=r"accelerate\.state\.PartialState\._reset_state"):
        state.take(RankLayout(0, 2))


def test_lightning_learns_the_rank_of_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("lightning_utilities.core.rank_zero")
    module.rank_zero_only = SimpleNamespace(rank=2)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    TorchState().take(RankLayout(0, 2))
    assert module.rank_zero_only.rank == 0
    del module.rank_zero_only.rank
    TorchState().take(RankLayout(1, 2))
    assert not hasattr(module.rank_zero_only, "rank")
