"""Options that take a list in JSON: a file, or the text itself where it begins with [."""

import json
from pathlib import Path
from typing import Any

from unbroken_core.vocabulary.errors import InputError

_MAX_BYTES = 64 << 10


def read_json_list(option: str, given: str, what: str, most: int) -> list[Any]:
    """Return the list that an option names, of `most` items. Raises InputError that says where and what is wrong."""
    if not given.strip():
        raise InputError(f"{option}: want a list in JSON, or a file with one, got {given!r}; want [] for no {what}")
    text = given if given.lstrip().startswith("[") else _content(option, Path(given))
    if len(text) > _MAX_BYTES:
        raise InputError(f"{option}: want at most {_MAX_BYTES} bytes, got {len(text)}")

    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _value in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{option}: the key {twice[:80]!r} is in one object twice; want it once")
        return found

    try:
        data = json.loads(text, object_pairs_hook=without_twins)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{option}: want JSON, got {text[:80]!r}: {error}") from None
    if not isinstance(data, list) or len(data) > most:
        raise InputError(f"{option}: want a list of at most {most} {what}, got {text[:80]!r}")
    return data


def _content(option: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{option}: want a list in JSON, or a file with one, got {str(path)[:200]!r}: {error}"
        ) from None
