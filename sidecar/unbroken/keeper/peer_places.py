"""Which connections to the keeper's port may stay: those without a certificate take no place of those with one.

accept ──> stranger ──certificate of the job──> member ──> ends
              │ full                               │ full
              └── of the address that holds most   └── of the pod that holds most: its oldest is closed

Each connection is served by a thread of its own, which is woken by the end of its socket.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from unbroken.network.strangers import Strangers

MAX_STRANGERS = 64
"""A handshake takes milliseconds; the pods of a job come one by one."""
MAX_MEMBERS = 256


class PeerPlace:
    """Of one connection."""

    def __init__(self, plain: socket.socket, address: str) -> None:
        """Raises OSError: no descriptor is left."""
        # The handshake takes the descriptor away from `plain`.
        self._handle = plain.dup()
        self.address = address
        self.is_lost = False
        """Whether another connection has its place."""

    def lose(self) -> None:
        """Wake the thread that serves it, with an end of the connection."""
        self.is_lost = True
        with contextlib.suppress(OSError):
            self._handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the descriptor."""
        self._handle.close()


class PeerPlaces:
    """Used by all threads of a server."""

    def __init__(self, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is told what was closed and why."""
        self._on_refused = on_refused
        self._guard = threading.Lock()
        self._strangers: Strangers[PeerPlace] = Strangers(MAX_STRANGERS)
        self._members: Strangers[PeerPlace] = Strangers(MAX_MEMBERS)
        """By the pod that their certificate names."""

    def come(self, plain: socket.socket, address: str) -> PeerPlace | None:
        """Return the place of a connection that was just accepted; None where there is none. Raises OSError."""
        place = PeerPlace(plain, address)
        with self._guard:
            loser = self._strangers.add(place, address, time.monotonic())
            if loser is not None:
                loser.lose()
        if loser is not None:
            self._on_refused(f"without a certificate, from {loser.address}: want {MAX_STRANGERS} at most")
        if loser is place:
            place.close()
            return None
        return place

    def admit(self, place: PeerPlace, pod_uid: str) -> bool:
        """Note that a connection has shown a certificate; False if it has lost its place."""
        with self._guard:
            if place.is_lost:
                return False
            self._strangers.remove(place)
            loser = self._members.add(place, pod_uid, time.monotonic())
            if loser is not None:
                loser.lose()
        if loser is not None:
            self._on_refused(f"of a pod of this job, at {loser.address}: want {MAX_MEMBERS} of all pods at most")
        return loser is not place

    def leave(self, place: PeerPlace) -> None:
        """Note that a connection has ended."""
        with self._guard:
            self._strangers.remove(place)
            self._members.remove(place)
            place.close()

    def spare_a_descriptor(self) -> None:
        """Close one stranger: the process has no descriptor left."""
        with self._guard:
            oldest = self._strangers.oldest()
            if oldest is None:
                return
            self._strangers.remove(oldest)
            oldest.lose()
        self._on_refused(f"without a certificate, from {oldest.address}: no file descriptor is left")
