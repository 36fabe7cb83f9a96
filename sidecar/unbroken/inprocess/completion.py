"""Plug-in: what to do when the job is done."""

import abc

from unbroken.inprocess.state import FrozenState


class Completion(abc.ABC):
    """Runs in the main thread once the function is done on all workers, before the wrapped call returns.

    An exception in it is logged and changes nothing.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""
