"""The rounds that a restarted rendezvous must know: number and size of the newest one, by run.

Nodes that were in them know as well. But one that is new may come first, and must not begin a second world.
"""

import json
import logging
import os
from pathlib import Path

from unbroken_core.torchrun_rounds.messages import MAX_NODES
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

KnownRounds = dict[str, tuple[int, int]]


def read_known_rounds(text: str, where: str) -> KnownRounds:
    """Read JSON as `KnownRoundsFile` writes it. Raises InputError that names `where`."""
    try:
        data = json.loads(text)
        past = {str(run_id): (int(number), int(size)) for run_id, (number, size) in data.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f'{where}: want {{"RUN": [ROUND, NODES]}}, got {text[:80]!r}') from error
    if any(not (number >= 0 and 0 < size <= MAX_NODES) for number, size in past.values()):
        raise InputError(f"{where}: want rounds from 0, of 1 to {MAX_NODES} nodes, got {text[:80]!r}")
    return past


class KnownRoundsFile:
    """Keeps them in a file that outlives the process. Errors are only logged: the nodes know them as well."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KnownRounds:
        """Return no rounds if there is no file or it cannot be read."""
        try:
            return read_known_rounds(self._path.read_text(), str(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, InputError, UnicodeDecodeError) as error:
            logger.warning("rounds not known: %s", error)
            return {}

    def write(self, past: KnownRounds) -> None:
        """Replace the content as a whole, or leave it."""
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(past) + "\n")
            part.replace(self._path)
        except OSError as error:
            logger.warning("rounds not kept: file=%s error=%s", self._path, error)
