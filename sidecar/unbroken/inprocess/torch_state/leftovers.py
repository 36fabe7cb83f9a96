"""What an iteration leaves behind: old groups and stores, and garbage in cycles."""

import gc
import logging
import sys
from typing import Any

from unbroken.inprocess.torch_state.deferred_destroyer import DeferredDestroyer
from unbroken.inprocess.torch_state.groups import holds_device

logger = logging.getLogger(__name__)

MAX_COLLECTIONS = 3
DEVICE_WAIT_S = 1.0
"""How long to wait for the device's memory; after an error of NCCL, torch's watchdog keeps it for a minute."""
CLOSE_TIMEOUT_S = 5.0
DESTROY_AFTER_S = 1.0

_freezes: list[bool] = []
"""Whether each freeze of this process can be undone."""


class Leftovers:
    """What is kept while the next iteration is prepared, and freed while the other ranks prepare theirs."""

    def __init__(self) -> None:
        self._destroyer = DeferredDestroyer()
        self._objects: list[Any] = []
        """Groups of the last iteration, until they are destroyed in the background."""
        self._is_garbage_left = False
        self._does_freeze = False

    def keep(self, objects: list[Any]) -> None:
        """Keep these until `collect`: dropping the last reference to a group waits for its slow end."""
        self._objects += objects

    def destroy(self, objects: list[Any], after_s: float = DESTROY_AFTER_S) -> None:
        """Destroy these in the background after a delay, in which the next iteration can begin.

        A store is closed with the GIL held: this rank could not join the others meanwhile.
        """
        self._destroyer.destroy(objects, after_s)

    def freeze(self) -> None:
        """Exclude the objects that exist before the function first runs from later collections (70 ms with torch).

        Only once: garbage of later iterations must stay collectable. Objects that were frozen before (by the process
        from which this one was forked) stay frozen at the end, and these with them.
        """
        is_first = gc.get_freeze_count() == 0
        if gc.isenabled() and (is_first or not _freezes):
            gc.collect()
            gc.freeze()
            self._does_freeze = is_first
            _freezes.append(is_first)

    def expect_garbage(self) -> None:
        """Let the next `collect` collect: a function was left."""
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
        self._destroy_all()
        return True

    def close(self) -> None:
        """Destroy all that is left; waits at most CLOSE_TIMEOUT_S."""
        self._destroy_all()
        self._destroyer.join(CLOSE_TIMEOUT_S)
        if self._does_freeze:
            self._does_freeze = False
            gc.unfreeze()

    def _destroy_all(self) -> None:
        objects, self._objects = self._objects, []
        wait_s = DEVICE_WAIT_S if any(map(holds_device, objects)) else 0.0
        if not self._destroyer.destroy(objects, wait_s=wait_s) and wait_s > 0:
            logger.warning("old groups may still hold memory of their device: waited=%gs", wait_s)
