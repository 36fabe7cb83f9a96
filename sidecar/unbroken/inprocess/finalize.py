"""Plug-in: bring the process into a state in which the function may start again."""

import abc
import datetime
import threading
from collections.abc import Callable, Mapping
from typing import Any

from unbroken.inprocess.exception import TimeoutError  # noqa: A004 - the reference's name
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
        failures: list[BaseException] = []

        def run() -> None:
            try:
                if device is not None:
                    import torch  # noqa: PLC0415 - only where CUDA is in use already

                    torch.cuda.set_device(device)
                self.fn(*self.args, **self.kwargs)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name=f"{type(self).__name__}-{state.rank}", daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(
                f"ThreadedFinalize: want {self.fn!r} to end within {self.timeout.total_seconds():g} s, it still runs"
            )
        if failures:
            raise failures.pop()
        return state


def _current_device() -> int | None:
    """Return the CUDA device of the calling thread; None when CUDA was not initialised."""
    import torch  # noqa: PLC0415 - the package's import must stay cheap

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    return torch.cuda.current_device()
