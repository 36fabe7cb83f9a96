"""Plug-in: what to do when this worker leaves for good."""

import abc

from unbroken.inprocess.state import FrozenState


class Terminate(abc.ABC):
    """Runs in the main thread when this worker leaves for good, before the error reaches the caller.

    An exception in it replaces that error, which stays its cause.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""
