"""The memory as a storage of torch.distributed.checkpoint, for code that calls `save` or `load` itself."""

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from unbroken.memory.arena import Saved, Skipped, arena_of, checked_step
from unbroken.memory.place import read_place
from unbroken.memory.recording import recorder
from unbroken.memory.restoring import Chosen, Restoration
from unbroken.memory.shard import refuse_no_state, shard_of_plan
from unbroken_core.vocabulary.checkpoints import LoadSource


class Writer(StorageWriter):
    """`dcp.save(state, storage_writer=Writer(step))`, once for each save.

    Each rank keeps all that it has, so that it needs no other rank to restore it. `result` says afterwards whether this
    rank has saved; a rank that has not raises nothing, as with `Checkpointer`.
    """

    def __init__(self, step: int) -> None:
        self.step = checked_step(step)
        self.result: Saved | Skipped | None = None
        # Of the iteration in which the save was begun: its thread may live on into the next one.
        self._place = read_place()
        self._plan: SavePlan | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        self.result = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remember all that this rank has: the global plan leaves out what another one has as well."""
        self._plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave them as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy into a slot."""
        arena = arena_of(self._place)
        if arena is None:
            self.result = Skipped(self.step, "this process belongs to no job with a keeper")
        else:
            self.result = arena.write(self._place, self.step, shard_of_plan(self._plan or plan, planner))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: each slot says what it holds."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here."""
        return False


class Reader(StorageReader):
    """`reader = Reader(state)`, then `dcp.load(state, storage_reader=reader)`.

    All ranks of the default group make it together, and agree on `step`: the newest that all can read whole. It is None
    when there is none; then there is nothing to load. `close` it afterwards.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Raises TypeError for what is no dictionary."""
        refuse_no_state("Reader", state)
        place = read_place()
        self._arena = arena_of(place)
        self._restoration = Restoration(self._arena, place)
        self._chosen: Chosen | None = self._restoration.choose(state, None)

    @property
    def step(self) -> int | None:
        """The step that all ranks can read."""
        return None if self._chosen is None else self._chosen.moment.step

    def close(self) -> None:
        """Unmap the slots; what was loaded stays."""
        self._chosen = None
        self._restoration.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what this rank reads from. Raises ValueError when there is nothing."""
        return self._need().contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what a plan wants, before anything is overwritten. Raises UnreadableError."""
        self._need().contents.verify(plan)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave them as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy out of the slots."""
        chosen = self._need()
        chosen.contents.read(plan, planner)
        if self._arena is not None:
            self._arena.loaded(self._restoration.load(LoadSource.MEMORY, chosen.moment))
        if (noting := recorder()) is not None:
            noting.loaded(read_place(), "memory", chosen.moment.step)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here."""
        return False

    def _need(self) -> Chosen:
        if self._chosen is None:
            raise ValueError("reader: no checkpoint in memory can be read by all ranks (`step` is None)")
        return self._chosen
