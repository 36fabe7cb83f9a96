"""What a keeper tells its agent, for the coordinator: which shards can be read here, and what was loaded."""

import fcntl
import hashlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unbroken.keeper.arena import COPIES, Arena, SealedSlot
from unbroken.keeper.copies import owners_of
from unbroken.keeper.digests import open_slot, read_digests
from unbroken_core.pod.memory_messages import NoRoom
from unbroken_core.pod.memory_slots import Head, digests_name
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_DETAIL
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.vocabulary.checkpoints import (
    MAX_COPIES_TOLD,
    MAX_LOADS,
    Copy,
    Held,
    Holding,
    Key,
    Load,
    LoadSource,
    OnDisk,
)
from unbroken_core.vocabulary.errors import WireError

Shard = tuple[int, str, str]
"""As in Holding."""

logger = logging.getLogger(__name__)

_LOADS = "loads"
_MAX_LOADS_BYTES = 1 << 20
_MAX_HOLDINGS = 4 * MAX_RANKS_PER_POD
_MAX_DIGESTED = 4096


def arena_name(root: Path) -> str:
    """Return a name for the memory that a folder lies in: the same in all pods that share it, and in no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        status = root.stat()
    except OSError:
        boot, status = "", None
    place = str(root) if status is None else f"{status.st_dev}:{status.st_ino}"
    return hashlib.sha256(f"{boot}:{place}".encode()).hexdigest()[:32]


def shard_of(head: Head, data: str) -> Shard:
    """Return what is told of one shard."""
    return head.rank, head.layout_digest.hex(), data


class Telling:
    """Used by all threads of a keeper. What it knows lies in files."""

    def __init__(self, arena: Arena, root: Path) -> None:
        self._arena = arena
        self._name = arena_name(root)
        self._news = threading.Condition()
        self._version = 1
        self._digests: dict[tuple[Path, Head], str] = {}
        self._loads = self._read_loads()
        self._port = 0
        self._problems: tuple[tuple[str, str], ...] = ()
        self._pinned: tuple[Key, ...] = ()
        self._disk: OnDisk | None = None
        self._no_room: dict[int, NoRoom] = {}
        """By the local ranks whose slots could not be made."""

    def changed(self) -> None:
        """What can be read has changed."""
        with self._news:
            self._version += 1
            self._news.notify_all()

    def set_port(self, port: int) -> None:
        """Other keepers reach this one now."""
        self._port = port
        self.changed()

    def set_problems(self, problems: tuple[tuple[str, str], ...]) -> None:
        """These pods have not the newest checkpoints of this one."""
        if problems != self._problems:
            self._problems = problems
            self.changed()

    def set_room(self, local_rank: int, problem: NoRoom | None) -> None:
        """This worker's slots were made; `problem`: why they were not."""
        with self._news:
            known = self._no_room.get(local_rank)
            if problem is None:
                self._no_room.pop(local_rank, None)
            elif known is None or known.needed_bytes != problem.needed_bytes:
                # What is free, in its detail, may be another number each time that a worker asks.
                self._no_room[local_rank] = problem
            is_news = self._no_room.get(local_rank) is not known
        if is_news:
            self.changed()

    def set_pinned(self, pinned: tuple[Key, ...]) -> None:
        """What can be read of these steps is not overwritten any more."""
        if pinned != self._pinned:
            self._pinned = pinned
            self.changed()

    def set_disk(self, disk: OnDisk) -> bool:
        """This is on the disk; return whether no later iteration has told of it."""
        with self._news:
            known = self._disk
            if known is not None and (disk.iteration, disk.term) < (known.iteration, known.term):
                return False
            self._disk = disk
        if disk != known:
            self.changed()
        return True

    def load_of(self, iteration: int, term: int) -> Load | None:
        """Return what an iteration began with, if that is known."""
        return next((one for one in self._loads if (one.iteration, one.term) == (iteration, term)), None)

    def wait(self, known: int, limit_s: float) -> int:
        """Return the version, at once if it is newer than the one that is known, else after a while."""
        with self._news:
            self._news.wait_for(lambda: self._version != known, limit_s)
            return self._version

    def loaded(self, load: Load) -> None:
        """All ranks of an iteration went back to this: what is newer in earlier ones is void, and freed."""
        with self._news:
            epoch = (load.iteration, load.term)
            others = [one for one in self._loads if (one.iteration, one.term) != epoch]
            before = [one for one in self._loads if (one.iteration, one.term) == epoch]
            # Each worker says what it could not read itself.
            refused = {step: why for one in (*before, load) for step, why in reversed(one.refused)}
            load = Load(
                load.term, load.iteration, load.source, load.of_term, load.of_iteration, load.step,
                tuple(sorted(refused.items(), reverse=True))[:4], max(one.reached for one in (*before, load)),
            )  # fmt: skip
            self._loads = tuple(sorted([*others, load], key=lambda one: (one.iteration, one.term)))[-MAX_LOADS:]
            self._write_loads()
        if load.source is LoadSource.MEMORY:
            self._arena.void(load)
        self.changed()

    def held(self) -> Held:
        """Return all that can be read here: in this pod's memory, and in that of pods that have ended."""
        # Before anything is looked at: what is found of these stays.
        pinned = self._pinned
        by_moment: defaultdict[tuple[Path, int, int, int, int], list[Shard]] = defaultdict(list)
        is_left: dict[Path, bool] = {self._arena.folder: True}
        copies = []
        for sealed in self._arena.sealed():
            folder, head = sealed.path.parent, sealed.head
            if folder == self._arena.folder / COPIES:
                copies.append(sealed)
                continue
            if folder not in is_left:
                is_left[folder] = _is_left(folder)
            data = self._digest(sealed) if is_left[folder] else None
            if data is not None:
                key = (folder, head.moment.term, head.moment.iteration, head.moment.step, head.world_size)
                by_moment[key].append(shard_of(head, data))
        # A pod of an earlier start may have left two copies of a rank's shard; one is enough.
        holdings = [
            Holding(folder.name, term, iteration, step, world_size, _cut({one[0]: one for one in shards}))
            for (folder, term, iteration, step, world_size), shards in by_moment.items()
        ]
        held = Held(self._name, tuple(holdings[:_MAX_HOLDINGS]), self._loads)
        held = replace(held, copies=self._copied(copies), port=self._port, problems=self._problems, pinned=pinned)
        with self._news:
            no_room = next(iter(self._no_room.values()), None)
        return replace(held, disk=self._disk, no_room="" if no_room is None else no_room.text[:MAX_DETAIL])

    def _copied(self, copies: list[SealedSlot]) -> tuple[Copy, ...]:
        """Return what is kept for other pods, the newest steps of each first."""
        owners = owners_of(self._arena)
        found: defaultdict[str, defaultdict[tuple[int, int, int, int], dict[int, Shard]]]
        found = defaultdict(lambda: defaultdict(dict))
        for sealed in copies:
            owner, data = owners.get(sealed.path.name.partition("-")[0]), self._digest(sealed)
            if owner is not None and data:
                moment = sealed.head.moment
                key = (moment.iteration, moment.term, moment.step, sealed.head.world_size)
                found[owner][key][sealed.head.rank] = shard_of(sealed.head, data)
        newest = [
            Copy(owner, term, iteration, step, world_size, _cut(steps[iteration, term, step, world_size]))
            for owner, steps in sorted(found.items())
            for iteration, term, step, world_size in sorted(steps, reverse=True)
        ]
        return tuple(newest[:MAX_COPIES_TOLD])

    def _digest(self, sealed: SealedSlot) -> str | None:
        """Return a digest of the data; "" before the keeper has made it, None of what must not be read."""
        # All of the head: a copy bears the number of its owner's slot, and the owner has two that count alike.
        place = (sealed.path, sealed.head)
        if place not in self._digests:
            path = self._arena.reached(sealed.path)
            found = read_digests(path.with_name(digests_name(path.name)), sealed.head)
            if found is None:
                return ""
            if found.problem:
                return None
            if len(self._digests) >= _MAX_DIGESTED:
                self._digests.clear()
            self._digests[place] = hashlib.sha256(repr(found.checksums).encode()).hexdigest()[:16]
        return self._digests[place]

    def _read_loads(self) -> tuple[Load, ...]:
        path = self._arena.reached(self._arena.folder / _LOADS)
        try:
            descriptor = open_slot(path, os.O_RDONLY)
        except OSError:
            return ()
        try:
            held: Held = wire.decode(os.read(descriptor, _MAX_LOADS_BYTES), Held)
        except (OSError, WireError) as error:
            logger.warning("what was loaded is not known: file=%s error=%s", path, error)
            return ()
        finally:
            os.close(descriptor)
        return held.loads

    def _write_loads(self) -> None:
        path = self._arena.reached(self._arena.folder / _LOADS)
        part = path.with_name(f".{_LOADS}")
        try:
            part.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o600), "w") as file:
                file.write(wire.encode(Held(self._name, (), self._loads)))
            part.replace(path)
        except OSError as error:
            logger.warning("what was loaded is not kept: file=%s error=%s", path, error)


def _cut(shards: Mapping[int, Shard]) -> tuple[Shard, ...]:
    """Return no more shards than a pod has ranks: a trainer may write anything into the heads of its slots."""
    return tuple(shards.values())[:MAX_RANKS_PER_POD]


def _is_left(folder: Path) -> bool:
    """Return whether no keeper lives that tells of this folder itself."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
