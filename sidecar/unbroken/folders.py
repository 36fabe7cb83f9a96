"""Folders that belong to the process that holds their lock. Standard library only: workers import it."""

import fcntl
import os
import shutil
from pathlib import Path


def lock_folder(folder: Path) -> int | None:
    """Return a descriptor that locks the folder while any process holds it; None when another process has the lock."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous owner may have removed the folder meanwhile.
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def sweep(base: Path) -> None:
    """Remove the folders of killed processes: those that are not locked."""
    for folder in base.iterdir():
        if folder.is_dir() and (descriptor := lock_folder(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
