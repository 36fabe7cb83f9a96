"""A pause before the next try of an `initialize` that keeps raising: under `install()` nothing limits the tries."""

import logging
import time
from collections.abc import Callable

from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.state import FrozenState

FIRST_PAUSE_S = 0.1
"""After the first exception; doubled after each further one in a row, up to the longest pause."""
LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


class PatientInitialize(Initialize):
    """Calls a script's plug-in; after exceptions in a row, a pause later.

    The pause is part of the iteration: whatever ends that, ends the pause.
    """

    def __init__(
        self, plugin: Initialize, longest_s: float = LONGEST_PAUSE_S, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._plugin = plugin
        self._longest_s = longest_s
        self._sleep = sleep
        self._num_failed = 0
        """Exceptions in a row, and iterations since the first of them that ended before the plug-in had returned."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return what the plug-in returns; raises what it raises."""
        try:
            self._pause()
            state = self._plugin(state)
        except BaseException as error:
            if self._num_failed or isinstance(error, Exception):
                # All ranks may fail alike: the first ends the pause of the others, and the pauses of all must grow.
                self._num_failed += 1
            raise
        self._num_failed = 0
        return state

    def _pause(self) -> None:
        if not self._num_failed:
            return
        # No larger exponent: the number may grow for days.
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failed - 1, 32), self._longest_s)
        logger.warning("initialize failed %dx in a row: called again in %.1f s", self._num_failed, pause_s)
        self._sleep(pause_s)
