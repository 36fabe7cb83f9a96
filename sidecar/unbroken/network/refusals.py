"""Refused requests and messages: counted by reason, and logged once per peer and minute, to bound the log."""

import logging
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_MAX_PEERS = 1024
_MAX_LINES = 20
"""Of one reason in that time: addresses are cheap."""


class Refusal(str, Enum):
    """Reason of a refusal; values are metric labels."""

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    """A sound token whose bearer asks for what is not its own: another pod's place, or to speak as the operator."""
    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    OUT_OF_PLACE = "out-of-place"
    IMPOSSIBLE = "impossible"
    """A sound message of a member that cannot be: an iteration that was never given out, a worker that no pod has."""
    OVERFLOW = "overflow"
    SILENT = "silent"
    NO_MEMBER = "no-member"
    """A sound agent that may not join: of another job, another protocol, or another number of workers."""
    TOO_FAST = "too-fast"
    """An agent that sends too much: it is read more slowly. Or an address that tries wrong tokens: it is cut off."""
    TOO_MANY = "too-many"
    """More connections without a token, or with that of one pod, than may be open."""

    __str__ = str.__str__


class Refusals:
    """Counts and logs."""

    def __init__(self) -> None:
        self.counts: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self._logged_at_s: dict[tuple[str, Refusal], float] = {}
        self._lines: dict[Refusal, tuple[float, int]] = {}
        """Since when so many lines were written."""
        self.unauthorized_peer = ""
        """The peer that last came without the job's token; "" for none. Another replaces it after _LOG_EVERY_S."""
        self._unauthorized_at_s = -_LOG_EVERY_S
        self._listener: Callable[[], None] = lambda: None

    def on_unauthorized(self, listener: Callable[[], None]) -> None:
        """Call `listener` when `unauthorized_peer` changes, for another peer at most once a minute."""
        self._listener = listener

    def note_authorized(self, peer: str) -> None:
        """Note that a peer has come with the token."""
        if peer == self.unauthorized_peer:
            self.unauthorized_peer = ""
            self._listener()

    def note(self, reason: Refusal, peer: str, detail: str, now_s: float) -> None:
        """Count one refusal; `peer` is the address that it came from."""
        self.counts[reason] += 1
        if (
            reason is Refusal.UNAUTHORIZED
            and peer != self.unauthorized_peer
            and now_s - self._unauthorized_at_s >= _LOG_EVERY_S
        ):
            self.unauthorized_peer, self._unauthorized_at_s = peer, now_s
            self._listener()
        key = (peer, reason)
        if now_s - self._logged_at_s.get(key, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return
        if len(self._logged_at_s) >= _MAX_PEERS:
            self._logged_at_s.clear()
        self._logged_at_s[key] = now_s
        since_s, num = self._lines.get(reason, (now_s, 0))
        if now_s - since_s >= _LOG_EVERY_S:
            since_s, num = now_s, 0
        self._lines[reason] = (since_s, num + 1)
        if num > _MAX_LINES:
            return
        if num == _MAX_LINES:
            logger.warning("refused: reason=%s: more peers; they are only counted for a minute", reason)
            return
        logger.warning("refused: reason=%s peer=%s detail=%s", reason, peer, detail)
