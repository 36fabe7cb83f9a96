"""How tests wait: for a condition, never for a time. All polling of this test suite is here.

The limits are for machines that are busy with other things; nobody waits that long for what comes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
LIMIT_S = 90.0
_POLL_S = 0.02
"""Between two looks at the condition, which alone ends the wait."""


def wait_until(
    look: Callable[[], T | None], what: str, limit_s: float = LIMIT_S, describe: Callable[[], str] = lambda: ""
) -> T:
    """Return the first result that is true; fails with `what`, and what `describe` says then, when none comes."""
    until_s = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > until_s:
            pytest.fail(f"want {what} within {limit_s:g} s, got {found!r}\n{describe()}")
        time.sleep(_POLL_S)
    return found


def inode_of(path: Path) -> int | None:
    """Return what tells a file from others that come in its place; None while there is none of this name."""
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


async def eventually(
    look: Callable[[], Awaitable[T | None]],
    what: str,
    limit_s: float = LIMIT_S,
    describe: Callable[[], str] = lambda: "",
    pause_s: float = _POLL_S,
) -> T:
    """Do the same in a coroutine; a look that does not end in time fails as well. Looks that cost much want a pause."""
    found: T | None = None
    try:
        async with asyncio.timeout(limit_s):
            while not (found := await look()):
                await asyncio.sleep(pause_s)
            return found
    except TimeoutError:
        pytest.fail(f"want {what} within {limit_s:g} s, got {found!r}\n{describe()}")
