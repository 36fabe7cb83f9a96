"""The folder on a tmpfs in which keepers have their slots where no kubelet gives them one; it ends with the job."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unbroken.folders import lock_folder, sweep
from unbroken_core.vocabulary.errors import InputError

TMPFS = Path("/dev/shm")
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_MAX_BYTES = 1 << 50


def read_size(option: str, text: str) -> int:
    """Return the bytes of a size such as 512Mi. Raises InputError."""
    match = re.fullmatch(r"([1-9][0-9]{0,15})(Ki|Mi|Gi|Ti|)", text)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < size <= _MAX_BYTES:
        raise InputError(f"{option}: want bytes, or a number with Ki, Mi, Gi or Ti, such as 2Gi, got {text[:100]!r}")
    return size


@contextmanager
def memory_folder(option: str, is_wanted: bool, tmpfs: Path = TMPFS) -> Iterator[Path | None]:
    """Make a folder for one job, and remove it at the end. None when it is not wanted. Raises InputError.

    What killed jobs of this user have left is removed first: nobody else would free that memory.
    """
    if not is_wanted:
        yield None
        return
    base = tmpfs / f"unbroken-{os.getuid()}"
    lock = None
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.lstat().st_uid != os.getuid() or base.lstat().st_mode & 0o077 or base.is_symlink():
            raise InputError(f"{option}: {base} must be a folder of user {os.getuid()} with mode 700")
        sweep(base)
        while lock is None:
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            lock = lock_folder(folder)
    except OSError as error:
        raise InputError(f"{option}: needs a tmpfs at {tmpfs}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
