"""What rounds there have been, for a rendezvous that is started again: by run, number and size of the newest one.

Nodes that were in them know as well. But one that is new may come first, and must not begin a second world.
"""

import json
import logging
import os
from pathlib import Path

from unbroken_core.errors import InputError
from unbroken_core.torchrun_rounds.messages import MAX_NODES

logger = logging.getLogger(__name__)

Past = dict[str, tuple[int, int]]


def read_past(text: str, where: str) -> Past:
    """Read JSON as `PastFile` writes it. Raises InputError that says where it stands."""
    try:
        data = json.loads(text)
        past = {str(run_id): (int(number), int(size)) for run_id, (number, size) in data.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f'{where}: want {{"RUN": [ROUND, NODES]}}, got {text[:80]!r}') from error
    if any(not (number >= 0 and 0 < size <= MAX_NODES) for number, size in past.values()):
        raise InputError(f"{where}: want rounds from 0, of 1 to {MAX_NODES} nodes, got {text[:80]!r}")
    return past


class PastFile:
    """Keeps it in a file that outlives the process. An error is logged only: the nodes know it, too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Past:
        """Return nothing where there is no file, or one that cannot be read."""
        try:
            return read_past(self._path.read_text(), str(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, InputError, UnicodeDecodeError) as error:
            logger.warning("rounds not known: %s", error)
            return {}

    def write(self, past: Past) -> None:
        """Take the place of what was there, or leave it as it is."""
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(past) + "\n")
            part.replace(self._path)
        except OSError as error:
            logger.warning("rounds not kept: file=%s error=%s", self._path, error)
