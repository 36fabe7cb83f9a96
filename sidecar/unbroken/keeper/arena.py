"""The slots of one pod, and those that pods of this job have left on the same host."""

import fcntl
import itertools
import logging
import os
import shutil
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.digests import digest_slot, open_slot, read_digests, read_slot_head, write_digests, write_whole
from unbroken.keeper.rarely import Rarely
from unbroken_core.pod.memory_messages import Found, FoundSlot, NoRoom, Reserved
from unbroken_core.pod.memory_slots import (
    EMPTY,
    NUM_SLOTS,
    PINNED_NAME,
    Head,
    Moment,
    SlotState,
    digests_name,
    pack_head,
    slot_name,
    voided,
)
from unbroken_core.vocabulary.checkpoints import Load
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_MAX_FOLDERS = 1000
COPIES = "copies"
"""Folder, below a pod's own, for copies of other pods' checkpoints."""
FETCHED = "fetched"
"""Folder, below a pod's own, for parts of other pods' checkpoints, for the time of a restore."""
MAX_COPY_SLOTS = 4096
_SPARE_BYTES = 1 << 20
"""Left on the tmpfs for the files of digests."""


@dataclass(frozen=True)
class SealedSlot:
    """A slot on this host that holds a whole checkpoint of this job."""

    path: Path
    head: Head


class Arena:
    """Used by all threads of a keeper. Its methods may be repeated, and may be cut off anywhere.

    In a pod the root is a volume that the trainer writes, often as another user, sometimes as root. So the keeper
    reaches its folder only through a descriptor, believes no file there, and looks at no other folder.
    """

    def __init__(self, config: KeeperConfig) -> None:
        """Take the pod's folder. Raises InputError when it cannot be used, or another keeper has it."""
        self._config = config
        self.folder = config.root / config.pod_uid
        try:
            config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._is_shared = bool(config.root.stat().st_mode & 0o022)
            self._lock: int | None = _open_folder(self.folder)
            os.fchmod(self._lock, 0o755 if self._is_shared else 0o700)
        except OSError as error:
            raise InputError(f"UNBROKEN_MEMORY_DIR: {self.folder} cannot be used: {error.strerror}") from error
        if not _lock(self._lock, self.folder):
            os.close(self._lock)
            raise InputError(f"UNBROKEN_MEMORY_DIR: another keeper has {self.folder}")
        self._inside = Path(f"/proc/self/fd/{self._lock}")
        self._folders: dict[str, int] = {}
        """Descriptors of the folders within it, by name."""
        self.num_copies = 0
        """On so many other pods checkpoints are copied."""
        self.give_way: Callable[[], bool] = lambda: False
        """Removes one copy of which nobody is in need; returns False where there is none. Asked when room is short."""
        self._promised: dict[Path, int] = {}
        """Bytes that a file may take while it is filled."""
        self.job = config.job
        """Digest of the job's uid, as heads have it."""
        self._allocation = threading.Lock()
        self._digestion = threading.Lock()
        """Held by one of those who wait for all digests, so that they do not all digest the same."""
        self._rarely = Rarely()
        parts = itertools.chain(self._inside.glob(".*.digests.*"), self._inside.glob(f".{PINNED_NAME}*"))
        for part in itertools.islice(parts, _MAX_FOLDERS):
            # A keeper was killed while it wrote.
            part.unlink(missing_ok=True)
        if (self._inside / COPIES).exists():
            # What an earlier keeper took counts, whether this one is asked to take more or not.
            self.open_copies()
        if (self._inside / FETCHED).exists():
            # What an earlier keeper had fetched would not be counted before the first fetch, and nobody asks for it.
            try:
                self.open_fetched()
            except OSError as error:
                logger.warning("%s cannot be emptied: %s", self.folder / FETCHED, error.strerror)

    def close(self) -> None:
        """Let another keeper take the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for descriptor in self._folders.values():
            os.close(descriptor)
        self._folders.clear()

    def reached(self, path: Path) -> Path:
        """Return the path by which the keeper opens a slot: its own folder may have been moved away meanwhile."""
        if path.parent == self.folder:
            return self._inside / path.name
        inner = self._folders.get(path.parent.name) if path.parent.parent == self.folder else None
        return path if inner is None else Path(f"/proc/self/fd/{inner}", path.name)

    def tell_pinned(self, name: str, order: tuple[int, int, int] | None, for_s: float = 0.0) -> None:
        """Have workers keep this step, (iteration, term, step), while there is no keeper that does; None: no step.

        `name`: of the file that says so. `for_s`: how long, where it is not for good.
        """
        path = self._inside / name
        try:
            if order is None:
                path.unlink(missing_ok=True)
            else:
                end = (int(time.monotonic() + for_s),) if for_s else ()
                write_whole(path, " ".join(map(str, (*order, *end))))
        except OSError as error:
            if self._rarely.may_say("pinned"):
                logger.warning("%s cannot be written: %s", self.folder / name, error.strerror)

    # ------------------------------------------------------------------------------------------------------ allocation

    def reserve(self, local_rank: int, num_bytes: int) -> Reserved | NoRoom:
        """Give both slots of a place so many bytes, all allocated: whoever writes them can neither fail nor pay."""
        answer = self._reserve(local_rank, num_bytes)
        while isinstance(answer, NoRoom) and self.give_way():
            answer = self._reserve(local_rank, num_bytes)
        return answer

    def _reserve(self, local_rank: int, num_bytes: int) -> Reserved | NoRoom:
        size = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        paths = [self.folder / slot_name(local_rank, index) for index in range(NUM_SLOTS)]
        with self._allocation:
            growth = sum(max(size - _allocated_bytes(self.reached(path)), 0) for path in paths)
            problem = self._why_no_room(growth)
            if problem:
                return self._no_room(size, growth, problem)
            for path in paths:
                error = self._allocate(path, size)
                if error:
                    return self._no_room(size, growth, error)
        return Reserved(tuple(map(str, paths)), self._config.job.hex())

    def allocate_copy(self, path: Path, size: int) -> str:
        """Give the slot of a copy so many bytes; return why it cannot be, "" when it is done."""
        size = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        with self._allocation:
            growth = max(size - _allocated_bytes(self.reached(path)), 0)
            problem = self._why_no_room(growth)
            return f"{problem}{self._advice(size, growth, 1)}" if problem else self._allocate(path, size)

    @contextmanager
    def making(self, path: Path, growth: int) -> Iterator[str]:
        """Keep room for a file that grows by so many bytes; yield why there is none, "" if there is."""
        problem = self._promise(path, growth)
        while problem and self.give_way():
            problem = self._promise(path, growth)
        try:
            yield problem
        finally:
            with self._allocation:
                self._promised.pop(path, None)

    def _promise(self, path: Path, growth: int) -> str:
        with self._allocation:
            problem = self._why_no_room(growth)
            if problem:
                return f"{problem}{self._advice(0, growth)}"
            self._promised[path] = _allocated_bytes(self.reached(path)) + growth
        return ""

    def is_over_limit(self, growth: int) -> bool:
        """Return whether so many bytes more are too many for this pod, whatever else its file system holds."""
        return self._is_over_limit(self.used_bytes() + growth)

    def _is_over_limit(self, num_bytes: int) -> bool:
        # A volume that holds more than its limit has its pod evicted: the files of digests count, too.
        return num_bytes > self._config.limit_bytes - self._spare_bytes

    @property
    def _spare_bytes(self) -> int:
        """What of the limit is kept from slots."""
        return _SPARE_BYTES if self._is_shared else 0

    def _needed_bytes(self, size: int, growth: int, at_least: int = 0) -> int:
        """Return a limit that is enough for all slots, if the largest has so many bytes, and for what is wanted now.

        `at_least`: so many copies, also where the keeper was not told of them yet.
        """
        largest = max(
            [size, *(_allocated_bytes(self.reached(path)) for path in (*self.own_slots(), *self.copy_slots()))]
        )
        # A pod keeps as many copies as it has: each member of a ring does.
        num_slots = NUM_SLOTS + (NUM_SLOTS + 1) * max(self.num_copies, at_least)
        for_all = largest * self._config.ranks_per_pod * num_slots
        return max(for_all, self.used_bytes() + growth) + self._spare_bytes

    def _advice(self, size: int, growth: int, at_least: int = 0) -> str:
        """Return what to say of the limit where there is no room; "" where it is not the limit that is too small."""
        if not self.is_over_limit(growth):
            return ""
        return f"; its limit is {self._config.limit_bytes}, {self._needed_bytes(size, growth, at_least)} are enough"

    def _why_no_room(self, growth: int) -> str:
        """Return why so many bytes more cannot be had, "" if they can."""
        used = self.used_bytes()
        if self._is_over_limit(used + growth):
            return f"its slots have {used} bytes, and {growth} more are wanted"
        free = _free_bytes(self._inside)
        if growth > max(free - _SPARE_BYTES, 0):
            return f"the file system at {self.folder} has {free} bytes left, {growth + _SPARE_BYTES} wanted"
        return ""

    def used_bytes(self) -> int:
        """Return what this pod's slots take."""
        paths = (*self.own_slots(), *self.copy_slots(), *self._slots_in(FETCHED))
        promised = dict(self._promised)
        return sum(max(_allocated_bytes(self.reached(path)), promised.get(path, 0)) for path in paths)

    def own_slots(self) -> list[Path]:
        """Return the slots of this pod's workers, whether they are there or not."""
        places = range(self._config.ranks_per_pod)
        return [self.folder / slot_name(place, index) for place in places for index in range(NUM_SLOTS)]

    def open_copies(self) -> Path:
        """Make the folder for copies of other pods' checkpoints, and return it. Raises OSError."""
        return self._open_inner(COPIES)

    def open_fetched(self) -> Path:
        """Make the folder for what is fetched from other pods, empty, and return it. Raises OSError."""
        folder = self._open_inner(FETCHED)
        for name in self.names_in(FETCHED):
            with suppress(OSError):  # No file: a trainer that is root has made it.
                self.reached(folder / name).unlink(missing_ok=True)
        return folder

    def _open_inner(self, name: str) -> Path:
        if name not in self._folders:
            descriptor = _open_folder(self._inside / name)
            os.fchmod(descriptor, 0o755 if self._is_shared else 0o700)
            self._folders[name] = descriptor
        return self.folder / name

    @property
    def file_mode(self) -> int:
        """Of a slot that workers map: they may run as another user."""
        return 0o666 if self._is_shared else 0o600

    def copy_slots(self) -> list[Path]:
        """Return the slots of copies, at most MAX_COPY_SLOTS."""
        return self._slots_in(COPIES)

    def names_in(self, folder: str) -> list[str]:
        """Return the names of files in a folder within this pod's own, so many that all slots are among them."""
        descriptor = self._folders.get(folder)
        if descriptor is None:
            return []
        # Not the descriptor itself: all threads would share how far it is read, and one find nothing beside another.
        with os.scandir(f"/proc/self/fd/{descriptor}") as entries:
            return sorted(entry.name for entry in itertools.islice(entries, 4 * MAX_COPY_SLOTS))

    def _slots_in(self, folder: str) -> list[Path]:
        names = [name for name in self.names_in(folder) if name.endswith(".slot")]
        return [self.folder / folder / name for name in names[:MAX_COPY_SLOTS]]

    def _allocate(self, path: Path, size: int) -> str:
        """Extend one slot; return why it cannot be, "" when it is done."""
        reached = self.reached(path)
        try:
            descriptor = _open_own(reached)
        except OSError as error:
            return f"{path}: cannot be made: {error.strerror}"
        try:
            os.fchmod(descriptor, self.file_mode)
            before = os.fstat(descriptor).st_size
            if _allocated_bytes(reached) >= size:
                return ""
            try:
                # From the start: whoever truncates a slot leaves holes.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                os.ftruncate(descriptor, before)
                return f"{path}: {size} bytes cannot be allocated: {error.strerror}"
            if before == 0:
                os.pwrite(descriptor, pack_head(EMPTY) * 2, 0)
        finally:
            os.close(descriptor)
        return ""

    def _no_room(self, size: int, growth: int, detail: str) -> NoRoom:
        needed = self._needed_bytes(size, growth)
        if self._rarely.may_say("no room"):
            logger.warning("no room: needed_bytes=%d limit_bytes=%d: %s", needed, self._config.limit_bytes, detail)
        return NoRoom(needed, self._config.limit_bytes, detail)

    # --------------------------------------------------------------------------------------------------------- digests

    def digest(self, path: Path) -> str:
        """Digest a slot unless it was; return what is wrong with it, "" when it can be read or holds nothing."""
        reached = self.reached(path)
        head = read_slot_head(reached)
        if head is None or head.state is not SlotState.SEALED:
            return ""
        if head.content_bytes > self._config.limit_bytes:
            return f"has {head.content_bytes} bytes, where the limit is {self._config.limit_bytes}"
        target = reached.with_name(digests_name(path.name))
        found = read_digests(target, head)
        if found is None:
            found = digest_slot(reached)
            if found is None:
                return ""
            write_digests(target, found)
            if found.problem and self._rarely.may_say("checkpoint refused"):
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
            elif read_slot_head(self.reached(sealed.path)) == head:
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
        others = [path for folder in self._other_folders() for path in sorted(folder.glob("*.slot"))]
        paths = [*self.own_slots(), *self.copy_slots(), *others]
        found = [SealedSlot(path, head) for path in paths if (head := read_slot_head(self.reached(path))) is not None]
        mine = [one for one in found if one.head.state is SlotState.SEALED and one.head.job == self._config.job]
        return sorted(mine, key=lambda one: one.head.moment.order, reverse=True)

    def _other_folders(self) -> list[Path]:
        """Return those of other pods of this host; none where others could have made them."""
        if self._is_shared:
            return []
        try:
            entries = sorted(self._config.root.iterdir())[:_MAX_FOLDERS]
        except OSError:
            return []
        return [entry for entry in entries if entry != self.folder and entry.is_dir()]

    # ------------------------------------------------------------------------------------------------- what is over

    def void(self, load: Load) -> None:
        """All ranks of an iteration went back to this: what is newer in earlier ones is void."""
        for sealed in self.sealed():
            moment = sealed.head.moment
            # A script may go back within an iteration, too.
            is_now = sealed.path.parent == self.folder and moment.order[:2] == (load.iteration, load.term)
            if load.voids(*moment.order) or (is_now and moment.order > load.of_order):
                descriptor = open_slot(self.reached(sealed.path), os.O_RDWR)
                try:
                    os.pwrite(descriptor, pack_head(voided(sealed.head)) * 2, 0)
                finally:
                    os.close(descriptor)

    def drop_left_folders(self) -> None:
        """Remove what ended pods have left, once a newer checkpoint is whole without it."""
        left = {folder: lock for folder in self._other_folders() if (lock := self._take(folder)) is not None}
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
            path = self.reached(sealed.path)
            digests = read_digests(path.with_name(digests_name(path.name)), sealed.head)
            if sealed.path.parent not in left and digests is not None and not digests.problem:
                ranks[sealed.head.moment, sealed.head.world_size].add(sealed.head.rank)
        whole = [moment for (moment, world_size), held in ranks.items() if len(held) == world_size]
        return max(whole, key=lambda moment: moment.order, default=None)


def _open_folder(folder: Path) -> int:
    """Return a descriptor of this very folder, made if it is missing. Raises OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            # A link would lead the keeper, and what it allocates, elsewhere.
            folder.unlink()
            folder.mkdir(mode=0o700)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(descriptor: int, folder: Path) -> bool:
    """Return whether nobody else has the folder, and it was not removed meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == folder.lstat().st_ino
    except OSError:
        return False


def _open_own(path: Path) -> int:
    """Return a descriptor of a slot that this user has made; a file of another kind is replaced. Raises OSError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            # Somebody else's pages are somebody else's to pay for, and to take away.
            path.unlink()
    except FileNotFoundError:
        pass
    return open_slot(path, os.O_RDWR | os.O_CREAT)


def _allocated_bytes(path: Path) -> int:
    """Return the bytes of a file that have pages; 0 for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return min(status.st_blocks * 512, status.st_size) if stat.S_ISREG(status.st_mode) else 0


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
