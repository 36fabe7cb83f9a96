"""The sending side of one peer's WebSocket."""

import asyncio
import struct

_MAX_UNSENT_BYTES = 1 << 20
"""Of what waits for an agent, or twice the largest frame: one question about 100,000 workers is larger than this."""
_CLOSE_NORMAL = struct.pack(">BBH", 0x88, 2, 1000)


def text_frame(text: str) -> bytes:
    """Return a WebSocket frame of a server (RFC 6455, 5.2: final, text, not masked)."""
    data = text.encode()
    if len(data) < 126:
        return struct.pack(">BB", 0x81, len(data)) + data
    if len(data) < 1 << 16:
        return struct.pack(">BBH", 0x81, 126, len(data)) + data
    return struct.pack(">BBQ", 0x81, 127, len(data)) + data


class FrameWriter:
    """Writes whole frames to the transport, whose buffer is this connection's queue.

    Nothing is awaited: a slow agent costs the others nothing, and a frame for all is encoded once.
    """

    def __init__(self, session: str, pod: str, transport: asyncio.WriteTransport, now_s: float) -> None:
        self.session = session
        self.pod = pod
        self.received_at_s = now_s
        self.is_member = False
        """Whether it was welcomed to the job."""
        self._transport = transport
        self._limit_bytes = _MAX_UNSENT_BYTES

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False, and break the connection, when the agent does not read."""
        if self._transport.is_closing():
            return True
        # It would never get through: the agent comes back, and is sent the same.
        self._limit_bytes = max(self._limit_bytes, 2 * len(frame))
        if self._transport.get_write_buffer_size() + len(frame) > self._limit_bytes:
            self._transport.abort()
            return False
        self._transport.write(frame)
        return True

    def close(self) -> None:
        """Close after what was sent."""
        if not self._transport.is_closing():
            self._transport.write(_CLOSE_NORMAL)
            self._transport.close()
