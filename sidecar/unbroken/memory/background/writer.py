"""The process that writes one rank's parts. It lives as long as its worker, and until what it began is done.

order ──> has ──> plan ──> bytes out of the slot, verified ──> read ──> slot free ──> fsync ──> part
                   ^                                             │       ^                        │
rank 0:   all have ┘                                    all read ┴───────┘        all parts ──────┴──> whole
"""

import fcntl
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unbroken.memory.background.epochs import Epoch, Failure, sync, write_json
from unbroken.memory.background.news import DiskNews, on_disk
from unbroken.memory.background.orders import TAKEN, WriteOrder, receive
from unbroken.memory.background.parts import write_part
from unbroken.memory.background.plans import describe
from unbroken.memory.background.publishing import Publisher, digest, innermost
from unbroken.memory.sources import DiffersError, NoDigestsError, Source, adopt_source
from unbroken_core.pod.memory_messages import MAX_MEASURED_S
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
_LOOK_S = 0.2
PLAN_S = 60.0
"""How long a rank waits for all others to say what they have."""
_HOLD_S = 5.0
"""How long its slot is not written meanwhile. Ranks that are late save on: soon no step in memory is that of all."""
_BEGIN_S = 5.0
"""How long its slot is not written after it was read, for others that have not begun, whose workers keep theirs."""
_READ_S = 600.0
"""The same, while others read theirs. These skip saves: if this one did not, soon no step would be that of all."""
_DIGESTS_S = 120.0
_LINGER_S = 60.0
"""How long the process of rank 0 waits for parts of others once its worker has ended."""


_OVERWRITTEN = "its slot was written again, or void, before it was read"


class NotWrittenError(Exception):
    """A part was not written; the message says why."""


class _Loan:
    """The worker's slot: kept from being written, but not for long before it is read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._until_s = time.monotonic() + _HOLD_S
        self._is_kept = True

    def wait(self, seconds: float) -> None:
        """Wait a little; let the worker write the slot if that has come to too long."""
        if self._is_kept and time.monotonic() > self._until_s:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._is_kept = False
        time.sleep(seconds)

    def keep(self, source: Source) -> None:
        """Keep it until it is read. Raises NotWrittenError: it was written meanwhile."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotWrittenError(_OVERWRITTEN) from None
        if not source.is_sealed():
            raise NotWrittenError(_OVERWRITTEN)


class _Check:
    """Whether a step that is being written may still become whole: else its slot is free for another one."""

    def __init__(self, epoch: Epoch, step: int) -> None:
        self._epoch, self._step = epoch, step
        self._looked_s = time.monotonic()

    def __call__(self) -> None:
        """Look from time to time. Raises NotWrittenError."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        if why := _why_vain(self._epoch, self._step):
            raise NotWrittenError(why)
        self._looked_s = time.monotonic()


class DiskWriter:
    """One process."""

    def __init__(self, connection: socket.socket, folder: Path | None = None) -> None:
        """`folder`: the pod's, with its keeper's socket; without it nobody is told what is on the disk."""
        self._connection = connection
        self._news = DiskNews(folder)
        self._every = 1
        self._loaded: int | None = None
        self._told: tuple[int, int, str] | None = None
        self._said: tuple[type[Exception], int | None] | None = None
        """The last problem of the folder that was logged."""
        self._publisher: Publisher | None = None
        self._epoch: Epoch | None = None

    def run(self) -> None:
        """Write what is ordered until the worker has ended."""
        self._say_free()
        while True:
            is_waiting = self._publisher is not None and self._publisher.is_waiting
            if select.select([self._connection], [], [], _LOOK_S if is_waiting else None)[0]:
                try:
                    received = receive(self._connection)
                except ConnectionError:
                    break  # The worker has ended, and has not read the last answer.
                except WireError as error:
                    logger.error("order of the worker cannot be read: %s", error)
                    break
                if received is None:
                    break
                self._take(*received)
            self._publish()
            self._sweep()
        until_s = time.monotonic() + _LINGER_S
        while self._publisher is not None and self._publisher.is_waiting and time.monotonic() < until_s:
            self._publish()
            time.sleep(_LOOK_S)
        self._sweep()

    def _take(self, order: WriteOrder, descriptors: list[int]) -> None:
        if order.given_up:
            self._give_up(order, order.given_up)
            return
        began_s = time.monotonic()
        try:
            written = self._write(order, descriptors)
        except Exception as error:  # torch says RuntimeError where a disk is full.
            if isinstance(error, DiffersError):
                self._news.differs()
            self._give_up(order, _why_vain(_epoch_of(order), order.step) or str(innermost(error)))
        else:
            logger.info(
                "written to the disk: step=%d rank=%d bytes=%d seconds=%.1f",
                *(order.step, order.rank, written, time.monotonic() - began_s),
            )
        finally:
            self._release(descriptors)
            self._say_free()

    def _write(self, order: WriteOrder, descriptors: list[int]) -> int:
        """Write a part; return its bytes."""
        epoch = _epoch_of(order)
        # Anew with each order: a keeper that was started again knows nothing of it.
        self._told = None
        if epoch != self._epoch or (order.rank == 0 and self._publisher is None):
            # None: the folder was away, and is back.
            self._enter(epoch, order)
        with os.fdopen(os.dup(descriptors[1]), "rb") as file:
            file.seek(0)
            names = json.load(file)
        loan = _Loan(descriptors[0])
        with _opened(order, descriptors[0], loan) as source:
            # Else what is read may be another checkpoint, which is no fault of the memory.
            loan.keep(source)
            has = describe(source.layout.entries, list(source.objects), names, source.places)
            content = write_json(epoch.work / "has" / f"{order.rank}.json", has)
            plan = self._wait_for(lambda: _read_plan(epoch, order, digest(content)), PLAN_S, "other ranks", loan)
            if plan["indices"] is None:
                raise NotWrittenError(str(plan["problem"]))
            loan.keep(source)
            folder = epoch.parts(order.step)
            folder.mkdir(exist_ok=True)
            epoch.begin_reading(order.step, order.rank)
            rows = write_part(source, has, plan["indices"], folder, order.rank, check=_Check(epoch, order.step))
            if not source.is_sealed():
                raise NotWrittenError("its slot was void before it was read")
            self._wait_for_readers(epoch, order)
        self._release(descriptors)
        for name in sorted({row[2] for row in rows}):
            sync(folder / name)
        sync(folder)
        write_json(epoch.part(order.step, order.rank), {"plan": plan["plan"], "rows": rows})
        return sum(row[4] for row in rows)

    def _give_up(self, order: WriteOrder, reason: str) -> None:
        """Give back the room of what was written in vain; tell the other ranks, who would wait for it."""
        # The worker has logged why it gives one up.
        level = logging.DEBUG if order.given_up else logging.WARNING
        logger.log(level, "not written to the disk: step=%d rank=%d: %s", order.step, order.rank, reason)
        epoch = _epoch_of(order)
        if not epoch.why_void() and epoch.failure(order.step) is None:
            self._news.failed()
        try:
            # First: nobody waits for it, also where nothing can be written about it.
            epoch.forget_reading(order.step, order.rank)
            for path in epoch.parts(order.step).glob(f"__{order.rank}_*"):
                path.unlink(missing_ok=True)
            epoch.fail(order.step, Failure(order.rank, reason))
        except OSError as error:
            if self._publisher is not None and epoch == self._epoch:
                self._publisher.note(order.step, Failure(order.rank, reason), error)
            else:
                logger.warning("other ranks are not told that step %d is given up: %s", order.step, error)

    def _enter(self, epoch: Epoch, order: WriteOrder) -> None:
        if why_void := epoch.why_void():
            raise NotWrittenError(why_void)
        self._epoch, self._every, self._loaded = epoch, order.every, order.loaded
        self._publisher = Publisher(epoch, order.world_size, order.keep) if order.rank == 0 else None

    def _publish(self) -> None:
        if self._publisher is None or self._epoch is None:
            return
        publisher = self._publisher
        try:
            publisher.turn()
            self._said = None
        except FileNotFoundError as error:
            publisher.problem = self._epoch.why_void() or str(error)
            logger.warning("no more checkpoints of this iteration on the disk: %s", publisher.problem)
            self._publisher = None
        except (OSError, ValueError) as error:
            # Once: it may come back at each turn.
            problem = (type(error), getattr(error, "errno", None))
            if problem != self._said:
                logger.warning("checkpoint not made whole on the disk: %s", error)
            self._said = problem
        self._tell(publisher)

    def _tell(self, publisher: Publisher) -> None:
        """Tell the keeper what has changed."""
        state = (publisher.newest, publisher.num_given_up, publisher.problem)
        if self._epoch is None or state == self._told:
            return
        self._told = state
        at_most = None if self._loaded is None else max(self._loaded, publisher.newest)
        found = on_disk(self._epoch, self._every, publisher.num_given_up, publisher.problem, at_most)
        is_ours = found.step == publisher.newest >= 0
        age_s = min(time.monotonic() - publisher.newest_at_s, MAX_MEASURED_S)
        self._news.tell(found, age_s if is_ours else -1.0)

    def _sweep(self) -> None:
        """Remove what is void: it may take long, so no slot is held meanwhile."""
        if self._epoch is not None and self._publisher is not None:
            self._epoch.sweep()

    def _wait_for(self, look: Callable[[], Json | None], seconds: float, whom: str, loan: _Loan) -> Json:
        until_s = time.monotonic() + seconds
        while True:
            self._publish()
            found = look()
            if found is not None:
                return found
            if time.monotonic() > until_s:
                raise NotWrittenError(f"waited {seconds:.0f} s for {whom}")
            loan.wait(_LOOK_S)

    def _wait_for_readers(self, epoch: Epoch, order: WriteOrder) -> None:
        """Keep the slot from being written until no rank reads its own any more, or the worker has ended."""
        began_s = time.monotonic()
        if order.rank != 0:
            epoch.end_reading(order.step, order.rank)
        while True:
            self._publish()
            waited_s = time.monotonic() - began_s
            is_read = epoch.is_read_elsewhere(order.step, order.rank, order.world_size, may_begin=waited_s < _BEGIN_S)
            if not is_read or waited_s > _READ_S or self._has_worker_ended():
                break
            time.sleep(_LOOK_S)
        if order.rank == 0:
            epoch.end_reading(order.step, 0)

    def _has_worker_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, 0)
        return bool(poll.poll(0))

    def _release(self, descriptors: list[int]) -> None:
        """Let the worker write the slot again."""
        if not descriptors:
            return
        # Who was forked by the worker while it kept the slot has the same lock.
        fcntl.flock(descriptors[0], fcntl.LOCK_UN)
        for descriptor in descriptors:
            os.close(descriptor)
        descriptors.clear()

    def _say_free(self) -> None:
        """Let the worker order the next one: in the queue nobody would let go of its slot while the disk is slow."""
        try:
            self._connection.send(TAKEN, socket.MSG_DONTWAIT)
        except OSError:
            return  # The worker has ended.


@contextmanager
def _opened(order: WriteOrder, descriptor: int, loan: _Loan) -> Iterator[Source]:
    """Open a slot once its keeper has digested it."""
    until_s = time.monotonic() + _DIGESTS_S
    while True:
        try:
            source = adopt_source(Path(order.path), descriptor, order.serial)
            break
        except NoDigestsError:
            if time.monotonic() > until_s:
                raise
        loan.wait(0.05)
    try:
        yield source
    finally:
        source.close()


def _epoch_of(order: WriteOrder) -> Epoch:
    return Epoch(Path(order.folder), order.job, order.iteration, order.term, order.nonce)


def _why_vain(epoch: Epoch, step: int) -> str:
    """Return why a step never becomes whole; "" as long as it may."""
    failure = epoch.failure(step)
    return epoch.why_void() or ("" if failure is None else f"the step was given up by {failure}")


def _read_plan(epoch: Epoch, order: WriteOrder, has: str) -> Json | None:
    """Return what a rank that has this writes; None where it is not decided. Raises NotWrittenError."""
    if why := _why_vain(epoch, order.step):
        raise NotWrittenError(why)
    try:
        plan = json.loads((epoch.work / "plan" / f"{order.rank}.json").read_bytes())
    except FileNotFoundError:
        return None
    return plan if plan.get("has") == has else None
