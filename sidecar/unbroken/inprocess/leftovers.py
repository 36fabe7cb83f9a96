"""What an iteration leaves behind: old groups and stores, and garbage in cycles."""

import gc
import sys
import threading
from typing import Any

from unbroken.inprocess.groups import Undertaker, is_on_a_device

MAX_COLLECTIONS = 3
GOODBYE_S = 5.0
BURY_AFTER_S = 1.0

_freezes: list[bool] = []
"""Whether each freeze of this process can be undone."""


class Leftovers:
    """Kept while the next iteration is made ready, freed while the others make theirs."""

    def __init__(self) -> None:
        self._undertaker = Undertaker()
        self._objects: list[Any] = []
        """Groups of the last iteration, until the garbage is collected."""
        self._lock = threading.Lock()
        self._late_groups: list[Any] = []
        """Groups that are to be destroyed when the iteration that begins has come up."""
        self._late_stores: list[Any] = []
        self._is_garbage_left = False
        self._does_freeze = False

    def keep(self, objects: list[Any]) -> None:
        """Hold on to these until `collect`: what drops the last reference to a group waits for its slow end."""
        self._objects += objects

    def bury(self, objects: list[Any]) -> None:
        """Destroy these in the background, BURY_AFTER_S from now."""
        self._undertaker.bury(objects, BURY_AFTER_S)

    def put_off(self, stores: list[Any]) -> None:
        """Destroy these in the background, BURY_AFTER_S after the next `settle`.

        A store is closed with the GIL held: nobody could join the others meanwhile.
        """
        with self._lock:
            self._late_stores += stores

    def settle(self) -> None:
        """Destroy in the background what was put off, from any thread; does not wait for anything."""
        if not (self._late_groups or self._late_stores):
            return
        with self._lock:
            groups, self._late_groups = self._late_groups, []
            stores, self._late_stores = self._late_stores, []
        self._undertaker.bury(groups, may_wait=False)
        self._undertaker.bury(stores, BURY_AFTER_S, may_wait=False)

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

    def collect(self) -> None:
        """Free what the last iteration left in cycles, then let its groups go at the next `settle`."""
        if not self._is_garbage_left:
            return
        self._is_garbage_left = False
        sys.last_value = sys.last_traceback = None  # an interactive user's copies pin everything
        for _ in range(MAX_COLLECTIONS):
            if not gc.collect():
                break
        groups, self._objects = self._objects, []
        if not is_on_a_device():
            # Not now: to start and to end threads takes the processor from those that everybody waits for.
            with self._lock:
                groups, self._late_groups = self._late_groups, groups
        self._undertaker.bury(groups)

    def close(self) -> None:
        """Destroy all that is left; waits for it for at most GOODBYE_S."""
        groups, self._objects = self._objects, []
        self._undertaker.bury(groups)
        self.settle()
        self._undertaker.join(GOODBYE_S)
        if self._does_freeze:
            self._does_freeze = False
            gc.unfreeze()
