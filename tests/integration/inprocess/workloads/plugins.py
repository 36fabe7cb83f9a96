"""Plug-ins of the wrapper, and ends that they bring about."""

import os

from unbroken import inprocess

from .script import bind_no_port_twice, note, one_fault, tell_outcome


class Noting(inprocess.initialize.Initialize, inprocess.finalize.Finalize, inprocess.health_check.HealthCheck):
    """Notes its calls; raises where TEST_FAIL says `<name>@<iteration>` and this is rank 1."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        fault = None if state.fn_exception is None else type(state.fn_exception).__name__
        note("called", plugin=self.name, iteration=state.iteration, fault=fault, at=state.active_rank)
        if os.environ.get("TEST_FAIL") == f"{self.name}@{state.iteration}" and state.active_rank == 1:
            raise OSError(f"{self.name} fails")
        return state


class NotingEnd(inprocess.completion.Completion, inprocess.terminate.Terminate, inprocess.abort.Abort):
    """Notes its calls; as an abort it raises where TEST_FAIL says abort."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        note("called", plugin=self.name, iteration=state.iteration, fault=None, at=state.active_rank)
        if os.environ.get("TEST_FAIL") == self.name:
            raise OSError(f"{self.name} fails")
        return state


def plugins() -> None:
    """All plug-ins; rank 1 raises in the first iteration."""

    @inprocess.Wrapper(
        initialize=Noting("initialize"),
        abort=inprocess.Compose(NotingEnd("abort"), inprocess.abort.AbortTorchDistributed()),
        finalize=Noting("finalize"),
        health_check=Noting("health_check"),
        completion=NotingEnd("completion"),
        terminate=NotingEnd("terminate"),
    )
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    tell_outcome(train)


def health_fails_after_fault() -> None:
    """As `plugins`; rank 1's health check fails only after the fault, as its finalize does."""

    class HealthAfterFault(Noting):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            return state if state.fn_exception is None else super().__call__(state)

    @inprocess.Wrapper(
        finalize=Noting("finalize"), health_check=HealthAfterFault("health_check"), terminate=NotingEnd("terminate")
    )
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    tell_outcome(train)


def limited() -> None:
    """Fails for ever, under a RetryController of four iterations."""
    bind_no_port_twice()

    @inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=4))
    def train() -> None:
        note("ran")
        raise ValueError("always")

    try:
        train()
    except inprocess.exception.RestartAbort as error:
        note("aborted", text=str(error))


def plan_is_too_large() -> None:
    """Asks for one active rank in a job of two."""

    @inprocess.Wrapper(rank_assignment=inprocess.rank_assignment.MaxActiveWorldSize(1))
    def train() -> None:
        note("ran")

    try:
        train()
    except inprocess.exception.RestartAbort as error:
        note("aborted", text=str(error))
