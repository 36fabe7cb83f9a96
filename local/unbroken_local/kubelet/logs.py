"""Reading container logs: whole, the last lines, or on and on while the container runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

BLOCK_BYTES = 64 << 10
FOLLOW_PAUSE_S = 0.15


def tail_offset(path: Path, lines: int) -> int:
    """Return where the last `lines` lines of a file begin, in bytes."""
    with path.open("rb") as file:
        end = position = file.seek(0, 2)
        if lines <= 0:
            return end
        found, is_first = 0, True
        while position > 0:
            size = min(BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            index = len(block)
            if is_first and block.endswith(b"\n"):
                index -= 1  # The newline that ends the last line begins none.
            is_first = False
            while (index := block.rfind(b"\n", 0, index)) >= 0:
                found += 1
                if found == lines:
                    return position + index + 1
        return 0


def tail_text(path: Path, lines: int, limit_bytes: int) -> str:
    """Return the last lines as text, at most `limit_bytes`; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(tail_offset(path, lines), size - limit_bytes))
            return file.read(limit_bytes).decode(errors="replace")
    except OSError:
        return ""


async def read_log(
    path: Path, *, tail_lines: int | None, limit_bytes: int | None, is_live: Callable[[], bool] | None
) -> AsyncIterator[bytes]:
    """Yield a log in blocks; with `is_live` go on while it says so. Raises OSError."""
    with path.open("rb") as file:
        if tail_lines is not None:
            file.seek(tail_offset(path, tail_lines))
        left = limit_bytes if limit_bytes is not None else 1 << 62
        while left > 0:
            live_before = is_live is not None and is_live()  # Asked first: what comes before the end must be read.
            block = file.read(min(BLOCK_BYTES, left))
            if block:
                left -= len(block)
                yield block
            elif live_before:
                await asyncio.sleep(FOLLOW_PAUSE_S)
            else:
                return
