"""What an iteration leaves behind: old groups and stores, and garbage in cycles."""

import gc
import logging
import sys
from typing import Any

from unbroken.inprocess.torch_state.groups import Undertaker, holds_device

logger = logging.getLogger(__name__)

MAX_COLLECTIONS = 3
DEVICE_WAIT_S = 1.0
"""The function is to find the device's memory free; after an error of NCCL, torch's watchdog keeps it for a minute."""
GOODBYE_S = 5.0
BURY_AFTER_S = 1.0

_freezes: list[bool] = []
"""Whether each freeze of this process can be undone."""


class Leftovers:
    """Kept while the next iteration is made ready, freed while the others make theirs."""

    def __init__(self) -> None:
        self._undertaker = Undertaker()
        self._objects: list[Any] = []
        """Groups of the last iteration, until they are destroyed in the background."""
        self._is_garbage_left = False
        self._does_freeze = False

    def keep(self, objects: list[Any]) -> None:
        """Hold on to these until `collect`: what drops the last reference to a group waits for its slow end."""
        self._objects += objects

    def bury(self, objects: list[Any], after_s: float = BURY_AFTER_S) -> None:
        """Destroy these in the background, when the iteration that begins has come up, or after another time.

        A store is closed with the GIL held: nobody could join the others meanwhile.
        """
        self._undertaker.bury(objects, after_s)

    def freeze(self) -> None:
        """Spare every later collection the objects that exist before the function first runs (70 ms with torch).

        Only once: what a later iteration leaves behind must stay collectable. What others have frozen before (the
        process that this one was forked from) stays frozen at the end, and this with it.
        """
        is_first = gc.get_freeze_count() == 0
        if gc.isenabled() and (is_first or not _freezes):
            gc.collect()
            gc.freeze()
            self._does_freeze = is_first
            _freezes.append(is_first)

    def expect_garbage(self) -> None:
        """Let the next `collect` do its work: a function was left."""
        self._is_garbage_left = True

    def collect(self) -> bool:
        """Free what the last iteration left in cycles, then let its groups go; return whether a function was left."""
        if not self._is_garbage_left:
            return False
        self._is_garbage_left = False
        sys.last_value = sys.last_traceback = None  # an interactive user's copies pin everything
        for _ in range(MAX_COLLECTIONS):
            if not gc.collect():
                break
        self._bury_all()
        return True

    def close(self) -> None:
        """Destroy all that is left; waits for it for at most GOODBYE_S."""
        self._bury_all()
        self._undertaker.join(GOODBYE_S)
        if self._does_freeze:
            self._does_freeze = False
            gc.unfreeze()

    def _bury_all(self) -> None:
        objects, self._objects = self._objects, []
        wait_s = DEVICE_WAIT_S if any(map(holds_device, objects)) else 0.0
        if not self._undertaker.bury(objects, wait_s=wait_s) and wait_s > 0:
            logger.warning("old groups may still hold memory of their device: waited=%gs", wait_s)
