"""Where this worker stands: its pod, its place in it, and the iteration of the job. Read from the environment."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from unbroken import restored_to
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Restore
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

_LIMITS = ("UNBROKEN_MEMORY_LIMIT", "UNBROKEN_MEMORY")
"""One of them is set in a job with memory: by the job, or by the user of the standalone mode."""


@dataclass(frozen=True)
class WorkerInfo:
    """One worker in one iteration."""

    folder: Path | None
    """The pod's folder, with the keeper's socket; None outside of a job with memory for checkpoints."""
    local_rank: int
    term: int
    iteration: int
    rank: int
    world_size: int
    restore: Restore | None = None
    """What the coordinator says all ranks go back to; None: it has not said."""


def is_available() -> bool:
    """Return whether this process belongs to a job with memory for checkpoints; without it, all saves are skipped."""
    return read_place().folder is not None


def read_place(environment: Mapping[str, str] | None = None) -> WorkerInfo:
    """Return the place that wrapper, launcher or agent have exported; a lone process without them."""
    source = os.environ if environment is None else environment
    told = restored_to.told.restore if environment is None else None
    has_memory = any(source.get(name) for name in _LIMITS)
    folder = (source.get("UNBROKEN_POD_FOLDER") or source.get("UNBROKEN_DIR", "")) if has_memory else ""
    return WorkerInfo(
        folder=Path(folder) if folder else None,
        local_rank=_number(source, "UNBROKEN_LOCAL_RANK", "LOCAL_RANK"),
        term=_number(source, "UNBROKEN_TERM"),
        iteration=_number(source, "TORCHELASTIC_RESTART_COUNT"),
        rank=_number(source, "RANK"),
        world_size=max(_number(source, "WORLD_SIZE"), 1),
        restore=_restore(source[restored_to.VARIABLE]) if restored_to.VARIABLE in source else told,
    )


@lru_cache(maxsize=1)
def _restore(text: str) -> Restore | None:
    """Read what was exported; a place is read at each save."""
    if not text:
        return None
    try:
        restore: Restore = wire.decode(text, Restore)
    except WireError as error:
        logger.warning("UNBROKEN_RESTORE cannot be read: %s", error)
        return None
    return restore


def read_every(environment: Mapping[str, str] | None = None) -> int:
    """Return the steps between two checkpoints that the job's spec names; 1 where it names none."""
    return max(_number(os.environ if environment is None else environment, "UNBROKEN_MEMORY_EVERY"), 1)


def num_processors(environment: Mapping[str, str] | None = None) -> int:
    """Return how many processors this worker has, if it shares them with the other workers of its pod; 1 at least."""
    source = os.environ if environment is None else environment
    num_workers = max(_number(source, "LOCAL_WORLD_SIZE", "UNBROKEN_RANKS_PER_POD"), 1)
    return max(len(os.sched_getaffinity(0)) // num_workers, 1)


def _number(source: Mapping[str, str], *names: str) -> int:
    text = next((source[name] for name in names if source.get(name)), "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0
