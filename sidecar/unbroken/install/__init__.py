"""Copies the packages that workers need into a folder, from where any image with Python and torch can import them.

Pure Python only, and always of the version that the agent has. Nothing else belongs here: packages of others are in
the user's image, or are not.
"""

import shutil
import tempfile
from pathlib import Path

import unbroken
import unbroken_core
from unbroken_core.vocabulary.errors import InputError

_PACKAGES = (unbroken, unbroken_core)
_SUFFIXES = (".py", ".typed")


def install(folder: Path) -> list[Path]:
    """Put both packages into `folder`, each at once and whole; repeating it is harmless. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_copy(Path(package.__path__[0]), folder) for package in _PACKAGES]
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"{where} cannot be written: {error.strerror}") from error


def _copy(source: Path, folder: Path) -> Path:
    """Copy one package under another name first, so that a reader never sees half of it."""
    target = folder / source.name
    fresh = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=folder))
    try:
        for path in sorted(source.rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                copy = fresh / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        for path in [fresh, *fresh.rglob("*")]:
            # Other users of the pod read it as well.
            path.chmod(0o755 if path.is_dir() else 0o644)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _swap(fresh: Path, target: Path) -> None:
    """Put a folder in the place of another; what was there ends up under the fresh one's name."""
    if not target.exists():
        fresh.rename(target)
        return
    old = fresh.with_name(f"{fresh.name}.old")
    target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
