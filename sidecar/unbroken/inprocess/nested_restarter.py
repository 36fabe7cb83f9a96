"""Plug-ins that log the state of the in-process restarter, for tools that read it from the log of the job.

Rank `special_rank` speaks for all. The lines bear the reference's words: state=initialize, then stage=starting and
stage=completed of state=handling for each restart, and state=finalized or state=aborted at the end.
"""

import logging

from unbroken.inprocess.abort import Abort
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.terminate import Terminate

logger = logging.getLogger(__name__)


class _Speaker:
    def __init__(self, special_rank: int = 0) -> None:
        """`special_rank`: initial rank of the worker that logs."""
        self.special_rank = special_rank

    def _say(self, state: FrozenState, words: str) -> FrozenState:
        if state.initial_rank == self.special_rank:
            logger.info("active_rank=%s [NestedRestarter] name=[InProcess] %s", state.active_rank, words)
        return state


class NestedRestarterHandlingCompleted(_Speaker, Initialize):
    """For `initialize`: a restart has been handled; the first time, that the restarter is there."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__(special_rank)
        self._was_called = False

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log and return the state."""
        words = "state=handling stage=completed" if self._was_called else "state=initialize"
        self._was_called = True
        return self._say(state, words)


class NestedRestarterHandlingStarting(_Speaker, Abort):
    """For `abort`: a restart begins."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log and return the state."""
        return self._say(state, "state=handling stage=starting")


class NestedRestarterFinalized(_Speaker, Completion):
    """For `completion`: the job is done."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log and return the state."""
        return self._say(state, "state=finalized")


class NestedRestarterAborted(_Speaker, Terminate):
    """For `terminate`: this worker leaves for good."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log and return the state."""
        return self._say(state, "state=aborted")
