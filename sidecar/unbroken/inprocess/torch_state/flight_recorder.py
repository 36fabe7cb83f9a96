"""torch's flight recorder: the collectives that each rank was in when an iteration was ended, as files."""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from unbroken.inprocess.state import FrozenState

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "UNBROKEN_FLIGHT_RECORDER_DIR"
KEPT_DUMPS = 8
"""Of each process: a job that restarts for ever must not fill the disk."""
DUMP_TIMEOUT_S = 2.0


class FlightRecorder:
    """Writes `iteration-<n>/rank_<active rank>`, a folder for torchfrtrace an iteration.

    Off without a folder. What cannot be written is logged; a restart never fails for it, nor waits longer than
    DUMP_TIMEOUT_S.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._written: deque[Path] = deque()

    @property
    def folder(self) -> Path | None:
        """The folder that was given, else that of UNBROKEN_FLIGHT_RECORDER_DIR."""
        folder = self._folder or os.environ.get(FOLDER_VARIABLE)
        return Path(folder) if folder else None

    def dump(self, state: FrozenState) -> None:
        """Write what torch has recorded in this process, if there is a folder for it and a rank to name it by."""
        folder = self.folder
        if folder is None or state.active_rank is None or "torch.distributed" not in sys.modules:
            return
        path = folder / f"iteration-{state.iteration}" / f"rank_{state.active_rank}"
        # torch takes locks for it that a thread may hold which hangs in NCCL.
        thread = threading.Thread(target=self._write, args=(path,), name="unbroken-flight-recorder", daemon=True)
        thread.start()
        thread.join(DUMP_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("flight recorder not written in time: file=%s timeout=%gs", path, DUMP_TIMEOUT_S)

    def _write(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.part")
        try:
            content = _recorded()
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except Exception as error:
            logger.warning("flight recorder not written: file=%s error=%s", path, error)
            return
        self._written.append(path)
        while len(self._written) > KEPT_DUMPS:
            _remove(self._written.popleft())


def _recorded() -> bytes:
    """Return torch's records, pickled by it, without stacks. Raises AttributeError where this torch has none."""
    import torch._C._distributed_c10d as c10d  # noqa: PLC0415 - the package's import must stay cheap

    # Before torch 2.9 there was a recorder of NCCL only.
    dump: Any = getattr(c10d, "_dump_fr_trace", None) or getattr(c10d, "_dump_nccl_trace")  # noqa: B009 - not in all stubs
    # Looking up the names for its stacks takes seconds the first time; those of a hang are in the rank's log anyway.
    content: bytes = dump(includeStackTraces=False)
    return content


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
        # The other ranks' dumps may still be in it.
        path.parent.rmdir()
