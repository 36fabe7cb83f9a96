"""Plug-in: what to do at the start of every iteration."""

import abc

from unbroken.inprocess.exception import RestartAbort
from unbroken.inprocess.state import FrozenState


class Initialize(abc.ABC):
    """Runs in the main thread at the start of every iteration, before the health check and the function.

    An Exception restarts the iteration on all workers; a BaseException such as RestartAbort ends the call here.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""


class RetryController(Initialize):
    """Ends the call with RestartAbort when an iteration must not start.

    Args:
        max_iterations: how many iterations may run; None means without limit.
        min_world_size: fewest living workers, spares included.
        min_active_world_size: fewest active workers.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise RestartAbort when a limit is passed."""
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(
                f"RetryController.max_iterations: want an iteration below {self.max_iterations}, got {state.iteration}"
            )
        if state.world_size < self.min_world_size:
            raise RestartAbort(
                f"RetryController.min_world_size: want at least {self.min_world_size}, got {state.world_size}"
            )
        active_world_size = state.active_world_size or 0
        if active_world_size < self.min_active_world_size:
            raise RestartAbort(
                f"RetryController.min_active_world_size: want at least {self.min_active_world_size}, "
                f"got {active_world_size}"
            )
        return state
