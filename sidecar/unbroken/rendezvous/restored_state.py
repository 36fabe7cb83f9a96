"""State that a restarted rendezvous restores: from the operator, and from a file that outlives its container.

The agents know as well, as long as one of them is left. When all pods and the rendezvous are replaced at once, only
this keeps a term from being used twice, and what its recoveries have cost from being forgotten.
"""

import logging
import os
from pathlib import Path

from unbroken_core.protocol.messages import Earlier
from unbroken_core.vocabulary.reasons import Rung

logger = logging.getLogger(__name__)

_NAME = "term"


class TermFile:
    """The highest term and iteration of this pod. Errors are only logged: agents and operator know both."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._written = (0, -1)

    def read(self) -> tuple[int, int]:
        """Return term and iteration, (0, -1) if there are none."""
        try:
            term, *rest = map(int, self._path.read_text().split())
        except FileNotFoundError:
            return 0, -1
        except (OSError, ValueError) as error:
            logger.warning("term not known: file=%s error=%s", self._path, error)
            return 0, -1
        return term, rest[0] if rest else -1

    def write(self, term: int, iteration: int) -> None:
        """Keep both numbers, or neither; they never fall."""
        present = (max(term, self._written[0]), max(iteration, self._written[1]))
        if present == self._written:
            return
        self._written = present
        part = self._path.with_name(f"{_NAME}.{os.getpid()}")
        try:
            part.write_text("{} {}\n".format(*present))
            part.replace(self._path)
        except OSError as error:
            logger.warning("term not kept: file=%s error=%s", self._path, error)


def uses_on_clock(earlier: Earlier, now_s: float) -> list[tuple[Rung, float]]:
    """Return the used rungs with their times on the clock of `now_s`, oldest first."""
    return sorted(((use.rung, now_s - max(use.ago_s, 0.0)) for use in earlier.uses), key=lambda item: item[1])
