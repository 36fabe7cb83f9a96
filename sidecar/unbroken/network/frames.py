"""Reads text frames from a WebSocket, and says why a frame is refused. Does not look into messages."""

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from unbroken.network.refusals import Refusal
from unbroken_core.vocabulary.errors import WireError


class MessageRefused(WireError):
    """A refused message; its connection is closed."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


async def next_text(connection: web.WebSocketResponse, timeout_s: float | None, max_bytes: int) -> str | None:
    """Return the next message, or None at the end.

    `max_bytes` is what the connection was made with. Raises MessageRefused, and asyncio.TimeoutError after `timeout_s`.
    """
    frame = await connection.receive(timeout_s)
    if frame.type is WSMsgType.TEXT:
        return str(frame.data)
    if frame.type is WSMsgType.BINARY:
        raise MessageRefused(Refusal.MALFORMED, "frame: want text, got binary")
    error = frame.data if frame.type is WSMsgType.ERROR else None
    if isinstance(error, WebSocketError) and error.code == WSCloseCode.MESSAGE_TOO_BIG:
        raise MessageRefused(Refusal.TOO_LARGE, f"message: want at most {max_bytes} bytes, got more")
    return None
