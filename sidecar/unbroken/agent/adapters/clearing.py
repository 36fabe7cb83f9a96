"""Clears the way for the agent's own files, in a folder that its trainer may write as well."""

import contextlib
import secrets
import shutil
from pathlib import Path


def clear(path: Path) -> None:
    """Take whatever has this name away: a file, a pipe, a link, or a folder of any depth."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    path.rename(aside)
    # What is left of a folder that is too deep to be removed has another name, and does no harm.
    with contextlib.suppress(RecursionError, OSError):
        shutil.rmtree(aside, ignore_errors=True)
