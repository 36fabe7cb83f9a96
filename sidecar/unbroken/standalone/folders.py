"""Folders that belong to whoever has them locked. Standard library only: workers import it."""

import fcntl
import os
import shutil
from pathlib import Path


def lock_folder(folder: Path) -> int | None:
    """Return a descriptor that locks the folder for as long as any process has it; None when somebody else has it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it before may have removed it meanwhile.
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def sweep(base: Path) -> None:
    """Remove the folders of processes that were killed: nobody has them locked."""
    for folder in base.iterdir():
        if folder.is_dir() and (descriptor := lock_folder(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
