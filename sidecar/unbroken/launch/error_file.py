"""Error files of workers: torch's `record` format, ours, or plain text."""

import json
from pathlib import Path
from typing import Any

MAX_ERROR_CHARACTERS = 1000
_MAX_FILE_BYTES = 1 << 20


def read_error(path: Path) -> str:
    """Return the first line of the error in a file; "" when there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return first_line(text)
    return first_line(_message(data).encode(errors="replace").decode())


def _message(data: Any) -> str:
    """Find the text: {"message": {"message": text, ...}} as torch writes it, {"message": text}, or a bare text."""
    for _ in range(3):
        if not isinstance(data, dict):
            break
        data = data.get("message", "")
    return data if isinstance(data, str) else ""


def first_line(text: str) -> str:
    """Return the first line that is not blank, shortened."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()[:MAX_ERROR_CHARACTERS]
    return ""
