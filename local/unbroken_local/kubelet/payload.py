"""The files of a volume, replaced all at once as a kubelet does it.

    KEY                   link to ..data/KEY
    ..data                link to the folder with the present content: one rename replaces all files together
    ..2026_11_21_x7f3a    that folder; the one before it is removed after the rename

Whoever opens one file after the other may see two contents; whoever opens `..data` first sees one.
"""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unbroken_core.vocabulary.errors import UnbrokenError

DATA = "..data"
_NEW_DATA = "..data_tmp"


class MountError(UnbrokenError):
    """A volume cannot be made (yet): the message names it."""


@dataclass(frozen=True)
class File:
    """One file of a volume."""

    path: str
    data: bytes
    mode: int


def write_files(folder: Path, files: list[File]) -> bool:
    """Make these the files of the volume; return whether anything was to be done. Raises MountError, OSError."""
    # Sources of a projected volume may name one path twice: the last one counts.
    wanted = {str(inside(file.path)): file for file in files}
    former = (folder / DATA).resolve() if (folder / DATA).is_symlink() else None
    if former is not None and _content(former) == {path: (file.data, file.mode) for path, file in wanted.items()}:
        return False
    name = tempfile.mkdtemp(prefix=time.strftime("..%Y_%m_%d_%H_%M_%S."), dir=folder)
    present = Path(name)
    present.chmod(0o755)
    for path, file in wanted.items():
        target = present / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(file.mode)
    link = folder / _NEW_DATA
    link.unlink(missing_ok=True)
    link.symlink_to(present.name)
    link.replace(folder / DATA)
    _link_entries(folder, {PurePosixPath(path).parts[0] for path in wanted})
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)
    return True


def keep_part(folder: Path, path: PurePosixPath) -> Path:
    """Return a copy of one entry of a volume, which stays as it is when the volume's content is replaced."""
    target = folder / path
    kept = Path(tempfile.mkdtemp(prefix="..part.", dir=folder))
    kept.chmod(0o755)
    copy = kept / target.name
    if target.is_dir():
        shutil.copytree(target, copy)
    else:
        shutil.copy2(target, copy)
    return copy


def is_payload(folder: Path) -> bool:
    """Return whether the folder's files are replaced together."""
    return (folder / DATA).is_symlink()


def inside(path: str) -> PurePosixPath:
    """Return the path. Raises MountError when it leads out of the volume."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise MountError(f"path: want one inside of the volume, got {path!r}")
    return relative


def _content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in folder.rglob("*")
        if path.is_file()
    }


def _link_entries(folder: Path, names: set[str]) -> None:
    """Add the names that are new, and take away those that are gone."""
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path(DATA) / name)
    for entry in os.scandir(folder):
        if not entry.name.startswith("..") and entry.name not in names:
            (folder / entry.name).unlink()
