"""Logs what the function raises: the same traceback twice at most, since a mistake in a script comes back each time."""

import hashlib
import logging
import traceback
from types import TracebackType

logger = logging.getLogger(__name__)

_SHOWN = 2
_OWN_FOLDER = __file__.rpartition("/")[0].rpartition("/")[0] + "/"


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
            shown = (type(error), error, _from_script(error))
            logger.error("function raised: iteration=%d rank=%s", iteration, rank, exc_info=shown)
            return
        name = type(error).__name__
        logger.error(
            "function raised: iteration=%d rank=%s: %s, same as before (%dx)", iteration, rank, name, self._count
        )


def _from_script(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the script on; all of it where the library itself raised."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        step = step.tb_next
    return error.__traceback__ if step is None else step


def _digest(error: BaseException) -> bytes:
    """Return what tells this error from others: its type, and the lines that raised it; numbers in texts may differ."""
    lines = [f"{type(error).__module__}.{type(error).__qualname__}"]
    lines += [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__, limit=-64)]
    return hashlib.blake2b("\n".join(lines).encode(errors="replace")).digest()
