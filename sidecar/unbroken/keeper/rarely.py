"""Keeps what workers cause out of the log, but for one line of a kind in a few seconds."""

import threading
import time

_EVERY_S = 10.0


class Rarely:
    """Used by all threads of a keeper."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said_s: dict[str, float] = {}

    def may_say(self, kind: str) -> bool:
        """Return whether a line is due; `kind` is one of a few words of ours."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._said_s.get(kind, now_s - _EVERY_S) < _EVERY_S:
                return False
            self._said_s[kind] = now_s
            return True
