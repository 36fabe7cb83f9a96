"""Plug-in: bring the process into a state in which the function may start again."""

import abc
import datetime
from collections.abc import Callable, Mapping
from typing import Any

from unbroken.inprocess.bounded import call_bounded
from unbroken.inprocess.state import FrozenState


class Finalize(abc.ABC):
    """Runs in the main thread after the function was left, before the health check.

    An exception in it ends the call: there is no restart on this worker.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""


class ThreadedFinalize(Finalize):
    """Calls `fn` in a thread of its own, on this worker's CUDA device where CUDA is in use.

    Raises TimeoutError when it takes longer than `timeout`, and whatever `fn` raises.
    """

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = args or ()
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run `fn` to its end, or to the timeout."""
        device = _current_device()

        def run() -> None:
            if device is not None:
                import torch  # noqa: PLC0415 - only where CUDA is in use already

                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = type(self).__name__
        call_bounded(run, self.timeout, f"{name}-{state.rank}", f"{name}: want {self.fn!r} to end")
        return state


def _current_device() -> int | None:
    """Return the CUDA device of the calling thread; None when CUDA was not initialised."""
    import torch  # noqa: PLC0415 - the package's import must stay cheap

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    return torch.cuda.current_device()
