"""Several calls of wrapped functions, one after the other and inside of each other."""

import os
import threading
import time

import torch.distributed as dist

from unbroken import inprocess

from .script import HANG_S, end_without_haste, my_rank, note, start, total


def calls_twice() -> None:
    """Calls the wrapped function again, first with the group still there, then without."""
    end_without_haste()

    @inprocess.Wrapper()
    def train(name: str) -> None:
        start()
        note(name)

    train("first")
    refused = []
    for _ in range(2):
        try:
            train("second")
        except (ValueError, inprocess.exception.RestartError) as error:
            refused.append(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
    note("second", refused=refused, threads=[thread.name for thread in threading.enumerate()])


def wrapped_inside_a_group() -> None:
    """A wrapped function, called twice inside of another one that has made the process group; rank 1 raises in it."""

    @inprocess.Wrapper()
    def part(call: inprocess.CallWrapper, number: int) -> float:
        if my_rank() == 1 and call.iteration == number:
            raise ValueError("injected inside")
        return total()

    @inprocess.Wrapper()
    def whole(call: inprocess.CallWrapper) -> list[float]:
        start()
        return [part(number=0), total(), part(number=1), float(call.iteration)]

    note("returned", value=whole())


def wrapped_inside() -> None:
    """Two wrapped functions in turn inside of a third; rank 1 raises in the second, TEST_ATTEMPTS times."""
    attempts = int(os.environ["TEST_ATTEMPTS"])

    class Named(inprocess.initialize.Initialize, inprocess.finalize.Finalize):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            note("called", plugin=self.name, iteration=state.iteration)
            return state

    @inprocess.Wrapper(initialize=Named("first begins"), finalize=Named("first ends"))
    def first(call: inprocess.CallWrapper) -> float:
        world = start()
        dist.destroy_process_group()
        return world + call.iteration

    @inprocess.Wrapper(initialize=Named("second begins"), finalize=Named("second ends"))
    def second(call: inprocess.CallWrapper) -> float:
        world = start()
        if my_rank() == 1 and call.iteration < attempts:
            raise ValueError("injected inside")
        world += total()
        dist.destroy_process_group()
        return world

    @inprocess.Wrapper(finalize=Named("outer ends"))
    def both() -> list[float]:
        try:
            return [first(), second()]
        except Exception:
            note("seen outside")
        except BaseException:
            note("swallowed")
        time.sleep(HANG_S)
        return []

    note("returned", value=both())
