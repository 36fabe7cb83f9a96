"""Messages on asyncio streams, one per line."""

import asyncio
from typing import Any

from unbroken.standalone.messages import MAX_LINE_BYTES
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import WireError


async def read_message(reader: asyncio.StreamReader, expected: Any, timeout_s: float | None = None) -> Any:
    """Return the next message, None at the end of the stream. Raises WireError and asyncio.TimeoutError."""
    try:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), timeout_s)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError as error:
        raise WireError(f"line: want at most {MAX_LINE_BYTES} bytes, got more") from error
    return wire.decode(line[:-1], expected)


def write_message(writer: asyncio.StreamWriter, message: object) -> None:
    """Send a message, unless the connection is closing."""
    if not writer.is_closing():
        writer.write(wire.encode(message).encode() + b"\n")
