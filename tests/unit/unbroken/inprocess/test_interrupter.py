"""Who ends a function, when the main thread is quicker than the one that ends it."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from unbroken.inprocess.abort import Abort
from unbroken.inprocess.interruption import interrupter
from unbroken.inprocess.interruption.gate import Gate
from unbroken.inprocess.interruption.interrupter import Interrupter
from unbroken.inprocess.state import FrozenState, Mode
from unbroken.inprocess.torch_state.leftovers import Leftovers


@dataclass
class Call:
    """A call whose function runs."""

    iteration: int = 0

    @property
    def state(self) -> FrozenState:
        return FrozenState(rank=0, world_size=2, active_rank=0, iteration=self.iteration, mode=Mode.ACTIVE)


class Noting(Abort):
    """Notes the iterations that it is called for, and lets the main thread move on meanwhile, where that is wanted."""

    def __init__(self, call: Call, *, does_move_on: bool) -> None:
        self.iterations: list[int] = []
        self._call = call
        self._does_move_on = does_move_on

    def __call__(self, state: FrozenState) -> FrozenState:
        self.iterations.append(state.iteration)
        self._call.iteration += self._does_move_on
        return state


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate with the main thread inside."""
    gate = Gate()
    gate.install()
    gate.left.clear()
    yield gate
    gate.uninstall()


@pytest.mark.parametrize(("does_move_on", "num_freed"), [(True, 0), (False, 1)])
def test_connections_of_the_next_iteration_are_left_alone(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, does_move_on: bool, num_freed: int
) -> None:
    """2.13: the main thread may be in it when the other one looks whether it has left."""
    freed: list[int] = []

    def free() -> None:
        freed.append(call.iteration)
        gate.left.set()

    monkeypatch.setattr(interrupter, "free_sockets", free)
    call = Call()
    abort = Noting(call, does_move_on=does_move_on)
    Interrupter(gate, Leftovers(), call, lambda: [abort])._stop_function(0)
    assert (abort.iterations, freed) == ([0], [0] * num_freed)


def test_iteration_that_the_main_thread_has_left_is_not_aborted_later(gate: Gate) -> None:
    """2.10: it has aborted it itself, and is in the next."""
    call = Call()
    abort = Noting(call, does_move_on=True)
    late = Interrupter(gate, Leftovers(), call, lambda: [abort])
    late.abort_once(0)
    late.abort_once(0)
    assert abort.iterations == [0]
    late.abort_once(1)
    assert abort.iterations == [0, 1]
