"""Files of /sys and /proc, read again and again on open descriptors: a tenth of what opening them costs."""

import os
from itertools import islice
from pathlib import Path

_MOST_BYTES = 4096
_MOST_OPEN = 512


class Files:
    """Reads below one folder, `/` outside of tests. Not thread-safe: each lane has its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, int] = {}

    def read(self, path: str) -> str | None:
        """Return the beginning of a file; None where there is none, or it does not tell."""
        known = self._open.get(path)
        if known is not None:
            try:
                return _text(os.pread(known, _MOST_BYTES, 0))
            except OSError:
                # What it was of is gone, or has come again as another one.
                os.close(self._open.pop(path))
        try:
            descriptor = os.open(self._path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            text = _text(os.pread(descriptor, _MOST_BYTES, 0))
        except OSError:
            os.close(descriptor)
            return None
        if len(self._open) < _MOST_OPEN:
            self._open[path] = descriptor
        else:
            os.close(descriptor)
        return text

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None where it holds none."""
        return number_of(self.read(path))

    def names(self, path: str, most: int = 64) -> list[str]:
        """Return what is in a folder, in order; empty where there is none."""
        try:
            with os.scandir(self._path(path)) as entries:
                return sorted(entry.name for entry in islice(entries, most))
        except (OSError, ValueError):
            return []

    def target(self, path: str) -> str:
        """Return the last name of where a link leads; "" where it is none."""
        try:
            return self._path(path).readlink().name
        except (OSError, ValueError):
            return ""

    def exists(self, path: str) -> bool:
        """Return whether there is something of this name."""
        try:
            return os.path.lexists(self._path(path))
        except (OSError, ValueError):
            return False

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def number_of(text: str | None) -> int | None:
    """Return the number that a text is; None for any other, however long its digits go on."""
    word = "" if text is None else text.strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None


def table_of(text: str | None) -> dict[str, int]:
    """Return lines of a name and a number; others are passed over."""
    rows = (line.split() for line in (text or "").splitlines()[:64])
    return {row[0]: number for row in rows if len(row) == 2 and (number := number_of(row[1])) is not None}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
