"""This user's folder for standalone jobs, and those in it that belong to the process that holds their lock.

Standard library only: workers import it.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError

_MAX_FOLDER_CHARACTERS = 50
"""The path of a Unix socket has 107 bytes at most."""


def user_folder() -> Path:
    """Return this user's folder, and make it if needed. Raises InputError when others may write to it."""
    chosen = tempfile.gettempdir()
    parent = Path(chosen if len(chosen) <= _MAX_FOLDER_CHARACTERS else "/tmp")
    folder = parent / f"unbroken-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}; set TMPDIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(
            f"{folder}: must be a folder of user {os.getuid()} with mode 700, but has owner {found.st_uid} and mode "
            f"{stat.S_IMODE(found.st_mode):o}; set TMPDIR"
        )
    return folder


def kept_secret(name: str) -> str:
    """Return this user's secret of that name on this host: random, made by who asks first. Raises InputError."""
    path = user_folder() / f"{name}.secret"
    made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        if not path.exists():
            descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            try:
                # Unlike a rename this takes nobody else's away.
                os.link(made, path)
            except FileExistsError:
                pass
            finally:
                made.unlink()
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be kept: {error}") from error


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
