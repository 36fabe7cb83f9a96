"""Logs what the function raises: the same traceback twice at most, since a mistake in a script comes back each time."""

import hashlib
import logging
import traceback

logger = logging.getLogger(__name__)

_SHOWN = 2


class RepeatedError:
    """The errors of one call, in its main thread."""

    def __init__(self) -> None:
        self._digest = b""
        self._count = 0

    def log(self, error: BaseException, iteration: int, rank: int | None) -> None:
        """Log an error with its traceback, or only that it is the same as before; `rank` is None for a spare."""
        digest = _digest(error)
        self._count = self._count + 1 if digest == self._digest else 1
        self._digest = digest
        if self._count <= _SHOWN:
            logger.error("function raised: iteration=%d rank=%s", iteration, rank, exc_info=error)
            return
        name = type(error).__name__
        logger.error(
            "function raised: iteration=%d rank=%s: %s, same as before (%dx)", iteration, rank, name, self._count
        )


def _digest(error: BaseException) -> bytes:
    """Return what tells this error from others: its type, and the lines that raised it; numbers in texts may differ."""
    lines = [f"{type(error).__module__}.{type(error).__qualname__}"]
    lines += [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__, limit=-64)]
    return hashlib.blake2b("\n".join(lines).encode(errors="replace")).digest()
