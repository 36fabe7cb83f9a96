"""Writes what one rank has to write of a checkpoint, out of its slot."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from unbroken.memory.background.plans import Key, key_of, local_plan
from unbroken.memory.sources import Source

Row = tuple[str, list[int] | None, str, int, int]
"""Name, where the part begins (None: an object), file, and where in the file it lies: start, length."""


class _SlotPlanner(DefaultSavePlanner):
    """Finds tensors in a slot."""

    def __init__(self, source: Source, check: Callable[[], None]) -> None:
        super().__init__()
        self._source, self._check = source, check
        self._entries: dict[Key, Any] = {(one.name, one.offsets): one for one in source.layout.entries}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what lies in the slot."""
        self._check()
        if write_item.type is WriteItemType.BYTE_IO:
            file = io.BytesIO()
            torch.save(self._source.objects[write_item.index.fqn], file)
            return file
        return self._source.tensor(self._entries[key_of(write_item.index)])


def write_part(
    source: Source, has: dict[str, Any], indices: Sequence[int], folder: Path, rank: int, *, check: Callable[[], None]
) -> list[Row]:
    """Write some of what a slot holds; return where it lies. Raises UnreadableError, OSError, PlanError.

    `check`: called before each tensor; what it raises ends this.
    """
    whole = local_plan(has)
    plan = SavePlan([whole.items[index] for index in indices])
    entries = source.layout.entries
    # Each byte is what was sealed, or is not written.
    source.verify((entries[index].start, entries[index].num_bytes) for index in indices if index < len(entries))
    writer = FileSystemWriter(folder, sync_files=False)
    plan = replace(plan, storage_data=writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank].storage_data)
    results = writer.write_data(plan, _SlotPlanner(source, check)).value() if plan.items else []
    return [
        (one.index.fqn, None if one.index.offset is None else list(one.index.offset), one.storage_data.relative_path,
         one.storage_data.offset, one.storage_data.length)
        for one in results
    ]  # fmt: skip
