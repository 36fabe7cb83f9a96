"""How much one answer may cost before its body is known to be bounded: a head, no interim answers, few wake-ups.

aiohttp bounds each line and the number of fields. Interim answers (1xx), answers that nobody has asked for, and a body
that comes byte by byte it takes for as long as the time-out allows, and each of them costs the loop that serves all.
"""

import asyncio
from typing import Any

import aiohttp
from aiohttp.client_exceptions import ServerDisconnectedError
from aiohttp.client_proto import ResponseHandler

MAX_HEAD_BYTES = 64 << 10
SLICE_BYTES = 4 << 10
"""So much is parsed before it is looked whether more of it is wanted."""
SMALL_BYTES = 1 << 10
NUM_SMALL = 16
"""So many pieces of an answer may be small; after each further one the connection is not read for REST_S."""
REST_S = 0.1


class BoundedAnswer(ResponseHandler):
    """One connection to a rendezvous."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._has_head = False
        self._num_head_bytes = 0
        self._num_small = 0
        self._resting: asyncio.TimerHandle | None = None

    def set_response_params(self, **parameters: Any) -> None:
        """Begin the next answer."""
        self._has_head, self._num_head_bytes, self._num_small = False, 0, 0
        super().set_response_params(**parameters)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take the head of an answer, the one that was asked for."""
        if self._exception is not None:
            return
        if data[0].code < 200:
            self._refuse(f"it sent an interim answer ({data[0].code}), which was not asked for")
        elif self._has_head:
            self._refuse("it sent a second answer to one request")
        else:
            self._has_head = True
            super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Take a piece, as far as it is wanted."""
        for start in range(0, max(len(data), 1), SLICE_BYTES):
            super().data_received(data[start : start + SLICE_BYTES])
            if self.transport is None or self._exception is not None:
                return
            if not self._has_head:
                self._num_head_bytes += min(len(data) - start, SLICE_BYTES)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self._refuse(f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
        if 0 < len(data) < SMALL_BYTES:
            self._num_small += 1
            if self._num_small > NUM_SMALL and self._resting is None and self.transport is not None:
                self.transport.pause_reading()
                self._resting = self._loop.call_later(REST_S, self._go_on)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on reading, which each read of the body asks for, but not while it rests."""
        super().resume_reading(resume_parser)
        if self._resting is not None and self.transport is not None:
            self.transport.pause_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the timer."""
        if self._resting is not None:
            self._resting.cancel()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        self._resting = None
        if self.transport is not None and not self._reading_paused:
            self.transport.resume_reading()

    def _refuse(self, why: str) -> None:
        self.set_exception(ServerDisconnectedError(why))
        if self.transport is not None:
            self.transport.abort()


def bounded_connector() -> aiohttp.TCPConnector:
    """Return what connects to rendezvous, as many as there are."""
    connector = aiohttp.TCPConnector(limit=0)
    loop = asyncio.get_running_loop()
    connector._factory = lambda: BoundedAnswer(loop)  # type: ignore[assignment] # it takes no other way
    return connector
