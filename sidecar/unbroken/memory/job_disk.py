"""Where a job writes checkpoints on a disk, for scripts that do not say it: `spec.memory.disk`, in the environment."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.memory.agreement import of_rank_0

logger = logging.getLogger(__name__)

KEEP = 3
"""So many stay where nobody says how many."""
_MAX_NUMBER = (1 << 31) - 1
_NO_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|~(/|$)|.*\0", re.DOTALL)
"""An address of a store, a home that only a shell finds: as a path it is a folder of this pod alone."""


@dataclass(frozen=True)
class JobDisk:
    """A folder, and what is written there."""

    folder: Path
    every: int | None
    """Steps between two checkpoints that are written in the background; None: none is."""
    keep: int


def checked_folder(name: str, folder: str | Path) -> Path:
    """Return a folder's whole path, which stays when the script goes elsewhere. Raises ValueError for what is none."""
    if folder == "" or _NO_PATH.match(str(folder)):
        raise ValueError(f"{name}: want the path of a folder that all ranks see, got {str(folder)[:200]!r}")
    return Path(folder).absolute()


def read_job_disk(environment: Mapping[str, str] | None = None) -> JobDisk | None:
    """Return what the job says; None where it says nothing."""
    source = os.environ if environment is None else environment
    folder = source.get("UNBROKEN_MEMORY_DISK", "")
    if not folder:
        return None
    every = _number(source, "UNBROKEN_MEMORY_DISK_EVERY")
    return JobDisk(
        checked_folder("UNBROKEN_MEMORY_DISK", folder), every, _number(source, "UNBROKEN_MEMORY_DISK_KEEP") or KEEP
    )


def agreed_job_disk() -> JobDisk | None:
    """Return what the job says to rank 0. A collective of all ranks.

    Pods of two templates may train together while one replaces the other: all ranks must write to one folder, or none.
    """
    own = read_job_disk()
    text = of_rank_0(_to_text(own))
    agreed = _from_text(text)
    if agreed != own:
        logger.warning("checkpoints on the disk: as rank 0 was told: %s, here it is %s", text, _to_text(own))
    return agreed


def _to_text(disk: JobDisk | None) -> str:
    return json.dumps(None if disk is None else [str(disk.folder), disk.every, disk.keep])


def _from_text(text: str) -> JobDisk | None:
    found = json.loads(text)
    return None if found is None else JobDisk(Path(found[0]), found[1], found[2])


def _number(source: Mapping[str, str], name: str) -> int | None:
    """Return a number from 1 on. Raises ValueError for what is none: a job must not train without what it asks for."""
    text = source.get(name, "")
    if not text:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= 10
    if not is_number or not 1 <= int(text) <= _MAX_NUMBER:
        raise ValueError(f"{name}: want a number from 1 to {_MAX_NUMBER}, got {text[:80]!r}")
    return int(text)
