"""The slots of one pod, and those that pods of this job have left on the same host."""

import fcntl
import logging
import os
import shutil
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from unbroken.folders import lock_folder
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.digests import digest_slot, open_slot, read_digests, read_slot_head, write_digests
from unbroken_core.errors import InputError
from unbroken_core.pod.memory_messages import Found, FoundSlot, NoRoom, Reserved
from unbroken_core.pod.memory_slots import (
    EMPTY,
    NUM_SLOTS,
    Head,
    Moment,
    SlotState,
    digests_name,
    pack_head,
    slot_name,
    voided,
)

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_MAX_FOLDERS = 1000
_SPARE_BYTES = 1 << 20
"""Left on the tmpfs for the files of digests."""


@dataclass(frozen=True)
class SealedSlot:
    """A slot on this host that holds a whole checkpoint of this job."""

    path: Path
    head: Head


class Arena:
    """Used by all threads of a keeper. Its methods may be repeated, and may be cut off anywhere."""

    def __init__(self, config: KeeperConfig) -> None:
        """Take the pod's folder. Raises InputError when it cannot be used, or another keeper has it."""
        self._config = config
        self.folder = config.root / config.pod_uid
        try:
            config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            # As the root: in a pod the trainer often runs as another user.
            self.folder.chmod(config.root.stat().st_mode & 0o777)
        except OSError as error:
            raise InputError(f"UNBROKEN_MEMORY_DIR: {self.folder} cannot be used: {error.strerror}") from error
        if self._lock is None:
            raise InputError(f"UNBROKEN_MEMORY_DIR: another keeper has {self.folder}")
        for part in self.folder.glob(".*.digests.*"):
            # A keeper was killed while it wrote.
            part.unlink(missing_ok=True)
        self._allocation = threading.Lock()
        self._digestion = threading.Lock()
        """Held by one of those who wait for all digests, so that they do not all digest the same."""

    def close(self) -> None:
        """Let another keeper take the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------------------------------ allocation

    def reserve(self, local_rank: int, num_bytes: int) -> Reserved | NoRoom:
        """Give both slots of a place so many bytes, all allocated: whoever writes them can neither fail nor pay."""
        size = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        paths = [self.folder / slot_name(local_rank, index) for index in range(NUM_SLOTS)]
        with self._allocation:
            growth = sum(max(size - _size_of(path), 0) for path in paths)
            used = sum(_size_of(path) for path in self.folder.glob("*.slot"))
            if used + growth > self._config.limit_bytes:
                return self._no_room(size, f"its slots have {used} bytes, and {growth} more are wanted")
            free = _free_bytes(self.folder)
            if growth > max(free - _SPARE_BYTES, 0):
                return self._no_room(size, f"the file system at {self.folder} has {free} bytes left, {growth} wanted")
            for path in paths:
                error = self._allocate(path, size)
                if error:
                    return self._no_room(size, error)
        return Reserved(tuple(map(str, paths)), self._config.job.hex())

    def _allocate(self, path: Path, size: int) -> str:
        """Extend one slot; return why it cannot be, "" when it is done."""
        present = _size_of(path)
        if present >= size:
            return ""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o666 & (self.folder.stat().st_mode & 0o666 | 0o600))
            try:
                os.posix_fallocate(descriptor, present, size - present)
            except OSError as error:
                os.ftruncate(descriptor, present)
                return f"{path}: {size - present} bytes cannot be allocated: {error.strerror}"
            if present == 0:
                os.pwrite(descriptor, pack_head(EMPTY) * 2, 0)
        finally:
            os.close(descriptor)
        return ""

    def _no_room(self, size: int, detail: str) -> NoRoom:
        needed = NUM_SLOTS * size * self._config.ranks_per_pod
        logger.warning("no room: needed_bytes=%d limit_bytes=%d: %s", needed, self._config.limit_bytes, detail)
        return NoRoom(needed, self._config.limit_bytes, detail)

    # --------------------------------------------------------------------------------------------------------- digests

    def digest(self, path: Path) -> str:
        """Digest a slot unless it was; return what is wrong with it, "" when it can be read or holds nothing."""
        head = read_slot_head(path)
        if head is None or head.state is not SlotState.SEALED:
            return ""
        target = path.with_name(digests_name(path.name))
        found = read_digests(target, head)
        if found is None:
            found = digest_slot(path)
            if found is None:
                return ""
            write_digests(target, found)
            if found.problem:
                logger.error("checkpoint refused: slot=%s step=%d: %s", path, head.moment.step, found.problem)
        return found.problem

    def find(self) -> Found:
        """Return all that can be read on this host, the newest first, once it is digested."""
        bad: list[str] = []
        slots: list[FoundSlot] = []
        for sealed in self.sealed():
            head = sealed.head
            try:
                # Not in turn with the thread that digests in the background: that one may wait long for a processor.
                with self._digestion:
                    problem = self.digest(sealed.path)
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            if problem:
                bad.append(f"{sealed.path.name}, step {head.moment.step} of rank {head.rank}: {problem}")
            elif read_slot_head(sealed.path) == head:
                moment = head.moment
                slots.append(
                    FoundSlot(
                        str(sealed.path), head.serial, moment.term, moment.iteration, moment.step, head.rank,
                        head.world_size, head.layout_digest.hex(),
                    )
                )  # fmt: skip
        return Found(tuple(slots), tuple(bad[:100]))

    def sealed(self) -> list[SealedSlot]:
        """Return the sealed slots of this job on this host, the newest first."""
        paths = [path for folder in self._folders() for path in sorted(folder.glob("*.slot"))]
        found = [SealedSlot(path, head) for path in paths if (head := read_slot_head(path)) is not None]
        mine = [one for one in found if one.head.state is SlotState.SEALED and one.head.job == self._config.job]
        return sorted(mine, key=lambda one: one.head.moment.order, reverse=True)

    def _folders(self) -> list[Path]:
        try:
            return [entry for entry in sorted(self._config.root.iterdir())[:_MAX_FOLDERS] if entry.is_dir()]
        except OSError:
            return []

    # ------------------------------------------------------------------------------------------------- what is over

    def void_newer(self, restored: Moment) -> None:
        """All ranks went back to this checkpoint: what is newer belongs to a timeline that is over."""
        for sealed in self.sealed():
            if sealed.head.moment.order > restored.order:
                descriptor = open_slot(sealed.path, os.O_RDWR)
                try:
                    os.pwrite(descriptor, pack_head(voided(sealed.head)) * 2, 0)
                finally:
                    os.close(descriptor)

    def drop_left_folders(self) -> None:
        """Remove what ended pods have left, once a newer checkpoint is whole without it."""
        left = {folder: lock for folder in self._folders() if (lock := self._take(folder)) is not None}
        try:
            complete = self._newest_complete(set(left))
            if complete is None:
                return
            for folder in left:
                moments = [one.head.moment.order for one in self.sealed() if one.path.parent == folder]
                if all(order < complete.order for order in moments):
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            for lock in left.values():
                os.close(lock)

    def _take(self, folder: Path) -> int | None:
        """Lock the folder of a pod that has ended; None for one that lives."""
        if folder == self.folder:
            return None
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _newest_complete(self, left: set[Path]) -> Moment | None:
        """Return the newest checkpoint of which the living pods of this host hold every rank, digested."""
        ranks: defaultdict[tuple[Moment, int], set[int]] = defaultdict(set)
        for sealed in self.sealed():
            digests = read_digests(sealed.path.with_name(digests_name(sealed.path.name)), sealed.head)
            if sealed.path.parent not in left and digests is not None and not digests.problem:
                ranks[sealed.head.moment, sealed.head.world_size].add(sealed.head.rank)
        whole = [moment for (moment, world_size), held in ranks.items() if len(held) == world_size]
        return max(whole, key=lambda moment: moment.order, default=None)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
