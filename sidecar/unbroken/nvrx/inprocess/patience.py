"""A pause before the next try of what keeps raising: under `install()` nothing limits the tries.

raises ──> paused, ever longer ──> raises ...
                              └──> returns, or runs on: no pause any more
"""

import logging
import time
from collections.abc import Callable

from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.state import FrozenState

FIRST_PAUSE_S = 0.1
"""After the first exception of `initialize`; doubled after each further one in a row, up to the longest pause."""
LONGEST_PAUSE_S = 5.0
QUICK_S = 1.0
"""A function that raises sooner is no training that broke."""
NUM_QUICK = 8
"""Such ends in a row without a pause."""
LONGEST_OF_FUNCTION_S = 1.0
"""The extension itself takes longer for a restart."""

logger = logging.getLogger(__name__)


class PatientInitialize(Initialize):
    """Calls a script's plug-in, if there is one; after exceptions in a row, a pause later.

    The pause is part of the iteration: whatever ends that, ends the pause.
    """

    def __init__(
        self,
        plugin: Initialize | None,
        longest_s: float = LONGEST_PAUSE_S,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plugin = plugin
        self._longest_s = longest_s
        self._sleep = sleep
        self._clock = clock
        self._num_failed = 0
        """Exceptions in a row, and iterations since the first of them that ended before the plug-in had returned."""
        self._num_quick = 0
        """Iterations in a row whose function ended at once, since the first in which it raised here."""
        self._begun_s: float | None = None
        """When the function was called; None while it was not."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return what the plug-in returns; raises what it raises."""
        self._begun_s = None
        try:
            self._pause()
            state = state if self._plugin is None else self._plugin(state)
        except BaseException as error:
            if self._num_failed or isinstance(error, Exception):
                # All ranks may fail alike: the first ends the pause of the others, and the pauses of all must grow.
                self._num_failed += 1
            raise
        self._num_failed = 0
        self._begun_s = self._clock()
        return state

    def note_end(self, state: FrozenState) -> None:
        """Remember how the function was left."""
        if self._begun_s is None:
            return
        is_quick = self._clock() - self._begun_s < QUICK_S
        has_raised = self._num_quick > 0 or state.fn_exception is not None
        self._num_quick = self._num_quick + 1 if is_quick and has_raised else 0

    def _pause(self) -> None:
        if self._num_failed:
            pause_s = _growing_s(self._num_failed, self._longest_s)
            logger.warning("initialize failed %dx in a row: called again in %.1f s", self._num_failed, pause_s)
        elif self._num_quick >= NUM_QUICK:
            pause_s = _growing_s(self._num_quick - NUM_QUICK + 1, min(LONGEST_OF_FUNCTION_S, self._longest_s))
            logger.warning("the function ended at once %dx in a row: called in %.1f s", self._num_quick, pause_s)
        else:
            return
        self._sleep(pause_s)


def _growing_s(count: int, longest_s: float) -> float:
    # No larger exponent: the number may grow for days.
    return min(FIRST_PAUSE_S * 2.0 ** min(count - 1, 32), longest_s)
