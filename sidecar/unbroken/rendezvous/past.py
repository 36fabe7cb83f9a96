"""What a rendezvous knows of those before it: from the operator, and from a file that outlives its container.

The agents know as well, as long as one of them is left. When all pods and the rendezvous are replaced at once, only
this keeps a generation from being used twice, and what its recoveries have cost from being forgotten.
"""

import logging
import os
from pathlib import Path

from unbroken_core.messages import Earlier
from unbroken_core.reasons import Rung

logger = logging.getLogger(__name__)

_NAME = "generation"


class GenerationFile:
    """The highest generation used in this pod. An error is logged only: the agents and the operator know it, too."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._written = 0

    def read(self) -> int:
        """Return the generation, 0 when there is none."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            logger.warning("generation not known: file=%s error=%s", self._path, error)
            return 0

    def write(self, generation: int) -> None:
        """Keep a generation, all of it or none."""
        if generation == self._written:
            return
        self._written = generation
        part = self._path.with_name(f"{_NAME}.{os.getpid()}")
        try:
            part.write_text(f"{generation}\n")
            part.replace(self._path)
        except OSError as error:
            logger.warning("generation not kept: file=%s error=%s", self._path, error)


def uses_on_clock(earlier: Earlier, now_s: float) -> list[tuple[Rung, float]]:
    """Return the rungs that were used with their times on the clock of `now_s`, oldest first."""
    return sorted(((use.rung, now_s - max(use.ago_s, 0.0)) for use in earlier.uses), key=lambda item: item[1])
