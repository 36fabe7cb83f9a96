"""What the process of rank 0 does for all: it plans, makes checkpoints whole, and removes old ones."""

import hashlib
import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from unbroken.memory.background.epochs import MARK, Epoch, Failure, sync, write_json
from unbroken.memory.background.parts import Row
from unbroken.memory.background.plans import PlanError, WritePlan, decide
from unbroken.memory.new_state.places import PLACES

logger = logging.getLogger(__name__)


class Publisher:
    """Of one epoch."""

    def __init__(self, epoch: Epoch, world_size: int, keep: int) -> None:
        self._epoch, self._world_size, self._keep = epoch, world_size, keep
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._decision: WritePlan | None = None
        self._problem = ""
        """Why there is none."""
        self.newest = -1
        """The newest step that was made whole."""
        self.newest_at_s = 0.0
        """When, on the monotonic clock."""
        self.num_given_up = 0
        self.problem = ""
        """Why the last step that was given up is not whole; "" once a later one is."""
        self._failed: set[int] = set()
        self._noted: set[int] = set()
        """Those that were given up where nothing could be written about it."""

    @property
    def is_waiting(self) -> bool:
        """Whether parts of other ranks may come."""
        return bool(self._epoch.steps())

    def turn(self) -> None:
        """Do what can be done now. Raises OSError; FileNotFoundError where another iteration has begun."""
        self._plan()
        failed = set(self._epoch.failed_steps())
        self._count(failed)
        for step in reversed(self._epoch.steps()):
            if step in failed:
                self._give_up(step, "")
            elif step < self.newest:
                logger.warning("checkpoint for the disk given up, since a later one is whole: step=%d", step)
                self._epoch.void(self._epoch.parts(step))
                self.num_given_up += 1
            elif len(self._parts(step)) == self._world_size:
                try:
                    self._publish(step)
                except FileNotFoundError:
                    raise
                except Exception as error:  # torch says RuntimeError where a disk is full.
                    if self._epoch.is_whole(step):
                        raise
                    self._give_up(step, str(innermost(error)))
        self._count(set(self._epoch.failed_steps()))
        self._epoch.forget_failures()

    def _count(self, failed: set[int]) -> None:
        """Count each step that ranks have given up once. `failed`: all whose marks are there."""
        fresh, self._failed = failed - self._failed, failed
        for step in sorted(fresh):
            self._count_one(step, self._epoch.failure(step))

    def note(self, step: int, failure: Failure, error: OSError) -> None:
        """Take that a step is given up, which could not be written into the folder."""
        if step not in self._noted:
            logger.warning("other ranks are not told that step %d is given up: %s", step, error)
            self._noted.add(step)
            self._count_one(step, failure)

    def _count_one(self, step: int, failure: Failure | None) -> None:
        self.num_given_up += 1
        if step > self.newest:
            self.problem = f"step {step} was given up by {failure}"

    def _give_up(self, step: int, reason: str) -> None:
        """Tell all ranks, whose parts would be in vain, unless one has told it; give their room back."""
        if reason:
            try:
                self._epoch.fail(step, Failure(0, reason))
            except OSError as error:
                self.note(step, Failure(0, reason), error)
        self._epoch.void(self._epoch.parts(step))
        logger.warning("checkpoint for the disk given up: step=%d: %s", step, self._epoch.failure(step) or reason)

    def _plan(self) -> None:
        folder = self._epoch.work / "has"
        with os.scandir(folder) as entries:
            found = {
                entry.name: (entry.name, entry.stat().st_mtime_ns, entry.stat().st_size)
                for entry in entries
                if not entry.name.startswith(".")
            }
        names = [f"{rank}.json" for rank in range(self._world_size)]
        if any(name not in found for name in names):
            return
        seen = tuple(found[name] for name in names)
        if seen == self._seen:
            return
        contents = [(folder / name).read_bytes() for name in names]
        try:
            self._decision, self._problem = decide(contents), ""
        except PlanError as error:
            logger.error("no checkpoints on the disk: %s", error)
            self._decision, self._problem = None, str(error)
        self._seen = seen
        for rank, content in enumerate(contents):
            indices = None if self._decision is None else self._decision.of_rank[rank]
            plan_id = "" if self._decision is None else self._decision.plan_id
            plan = {"plan": plan_id, "has": digest(content), "indices": indices, "problem": self._problem}
            write_json(self._epoch.work / "plan" / f"{rank}.json", plan)

    def _parts(self, step: int) -> list[Path]:
        paths = (self._epoch.part(step, rank) for rank in range(self._world_size))
        return [path for path in paths if path.exists()]

    def _publish(self, step: int) -> None:
        folder, decision = self._epoch.parts(step), self._decision
        parts = [json.loads(path.read_bytes()) for path in self._parts(step)]
        rows: list[Row] = [tuple(row) for part in parts for row in part["rows"]]
        keys = {(name, None if offset is None else tuple(offset)) for name, offset, *_ in rows}
        if decision is None or any(part["plan"] != decision.plan_id for part in parts) or keys != decision.keys:
            raise PlanError("its ranks' states differ in form")
        FileSystemWriter(folder).finish(replace(decision.metadata), [[_result(row) for row in rows]])
        if decision.places:
            write_json(folder / PLACES, decision.places)
        write_json(folder / MARK, {**self._epoch.mark, "step": step, "world_size": self._world_size})
        for path in self._parts(step):
            path.unlink()
        self._epoch.forget_readers(step)
        sync(folder)
        self._epoch.publish(step)
        self.newest, self.newest_at_s = max(self.newest, step), time.monotonic()
        if step == self.newest:
            self.problem = ""
        sync(self._epoch.folder)
        logger.info("checkpoint on the disk: step=%d folder=%s", step, self._epoch.whole(step))
        self._epoch.retain(self._keep, step)


def innermost(error: BaseException) -> BaseException:
    """Return the error of the operating system behind another one, if there is one: it says what is wrong.

    One that was raised `from None` says it better.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return error


def digest(content: bytes) -> str:
    """Return what names a content: enough to see that it is not another one."""
    return hashlib.sha256(content).hexdigest()[:32]


def _result(row: Row) -> WriteResult:
    name, offset, path, start, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset))
    return WriteResult(index, length, _StorageInfo(path, start, length))
