"""A process whose async_save hangs when its iteration ends, or has just begun; the next save works, and it ends.

python -m tests.integration.inprocess.workloads.hung_save FOLDER process|thread writing|starting
"""

import multiprocessing
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.waiting import wait_until
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from unbroken.inprocess.torch_state import caches

LIMIT_S = 240.0
FOLDER, KIND, STATE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class Hangs(FileSystemWriter):
    """Writes to a disk that does not answer."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Say that it has come so far, and wait for ever."""
        (FOLDER / "hangs").touch()
        threading.Event().wait()


def save(name: str, kind: type[FileSystemWriter]) -> Any:
    """Begin to write a checkpoint."""
    return async_save(
        {"weights": torch.ones(4)},
        storage_writer=kind(FOLDER / name),
        async_checkpointer_type=AsyncCheckpointerType(KIND),
    )


def main() -> None:
    """Leave one save behind, as a restart does, and make another."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{FOLDER / 'store'}", rank=0, world_size=1)
    hung = save("hung", Hangs)
    if STATE == "writing":
        wait_until((FOLDER / "hangs").exists, "a save that hangs", LIMIT_S)
    else:
        wait_until(lambda: bool(multiprocessing.active_children()), "a process that starts", LIMIT_S)
    caches.empty_all()
    if KIND == "process":
        assert isinstance(hung.exception(LIMIT_S), Exception)
    assert executor._CHECKPOINT_PROCESS is None
    save("next", FileSystemWriter).result(LIMIT_S)
    assert not (FOLDER / "hung" / ".metadata").exists()
    assert (FOLDER / "next" / ".metadata").exists()
    (FOLDER / "saved").touch()


if __name__ == "__main__":
    main()
