"""Keeps slots of this pod's own workers from being overwritten, as the coordinator says.

    protected       a lock of an open file (OFD) on the first byte: a worker whose older slot it is writes the newer one
                    again, since all ranks can go back to what is pinned, whoever is lost
    next_protected  flock, as while it is sent: a worker whose older slot it is skips that save

Locks end with the process that has them; a new keeper is told all of it anew. Until then workers keep both steps by
files that say which they are: those of a pod whose keeper has gone would save over what all others keep, and whether
that is the protected one by now or the next, only a coordinator knows.
"""

import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from unbroken.keeper.arena import Arena
from unbroken.keeper.digests import open_slot, read_slot_head
from unbroken_core.pod.memory_slots import COMING_NAME, HOLD_S, PIN_LOCK, PINNED_NAME, SlotState

Order = tuple[int, int, int]
"""(iteration, term, step)"""


class Pins:
    """Used by all threads of a keeper."""

    def __init__(self, arena: Arena, hold_s: float = HOLD_S) -> None:
        self._arena = arena
        self._hold_s = hold_s
        self._guard = threading.Lock()
        self._told: tuple[Order | None, Order | None] = (None, None)
        self._has_told = False
        """Whether the file is this keeper's, and no earlier one's."""
        self._following: Order | None = None
        self._held: dict[tuple[Path, bool], tuple[Order, int]] = {}
        """By slot, and whether it is protected: what is pinned, and the descriptor with the lock."""
        self._timer: threading.Timer | None = None

    def pin(self, safe: Order | None, following: Order | None, on_end: Callable[[], None] = lambda: None) -> None:
        """Pin the protected step, and the one that is to be the next, and no others. `on_end`: that took too long."""
        told = (safe, following)
        with self._guard:
            if told == self._told and self._has_told:
                return
            before = self._told if self._has_told else None
            self._told, self._has_told, self._following = told, True, following
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if following is not None:
                self._timer = threading.Timer(self._hold_s, self._end, (told, on_end))
                self._timer.daemon = True
                self._timer.start()
            self._settle()
            if before is None or safe != before[0]:
                self._arena.tell_pinned(PINNED_NAME, safe)
            if before is None or following != before[1]:
                self._arena.tell_pinned(COMING_NAME, following, self._hold_s)

    @property
    def following(self) -> Order | None:
        """The step that is to be protected next."""
        return self._following

    def is_sure(self, order: Order) -> bool:
        """Return whether every slot with this step is pinned; a worker may be about to write it."""
        with self._guard:
            pinned = {path for (path, _), (held, _lock) in self._held.items() if held == order}
            # Not `_told`: one that took too long is told, and pinned no more.
            is_named = order in (self._told[0], self._following)
            return is_named and {path for path, found in self._slots().items() if found == order} <= pinned

    def note(self) -> None:
        """Something was sealed, or is void by now."""
        with self._guard:
            self._settle()

    def _end(self, told: tuple[Order | None, Order | None], on_end: Callable[[], None]) -> None:
        with self._guard:
            if told != self._told:
                return
            self._following = None
            self._settle()
            self._arena.tell_pinned(COMING_NAME, None)
        on_end()

    def _settle(self) -> None:
        wanted = {(path, order == self._told[0]): order for path, order in self._slots().items()}
        ended = [place for place, (order, _lock) in self._held.items() if wanted.get(place) != order]
        for place in wanted.keys() - (self._held.keys() - set(ended)):
            lock = _lock(*place)
            if lock is not None and _order(place[0]) == wanted[place]:
                old = self._held.pop(place, None)
                self._held[place] = (wanted[place], lock)
                if old is not None:
                    os.close(old[1])
            elif lock is not None:
                os.close(lock)
        # After the new ones: what was to be protected, and is, stays pinned.
        for place in ended:
            if place in self._held and wanted.get(place) != self._held[place][0]:
                os.close(self._held.pop(place)[1])

    def _slots(self) -> dict[Path, Order]:
        names = {one for one in (self._told[0], self._following) if one is not None}
        if not names:
            return {}
        paths = (self._arena.reached(path) for path in self._arena.own_slots())
        return {path: order for path in paths if (order := _order(path)) is not None and order in names}


def _order(path: Path) -> Order | None:
    head = read_slot_head(path)
    return None if head is None or head.state is not SlotState.SEALED else head.moment.order


def _lock(path: Path, is_protected: bool) -> int | None:
    """Return a descriptor with the lock; None when a worker is writing the slot, or it is gone."""
    try:
        descriptor = open_slot(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if is_protected:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(PIN_LOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        else:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
