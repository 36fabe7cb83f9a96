"""Findings on purpose: a file in the pod's folder that the watch reads, in a pod that allows faults.

Each has an end, on the clock that all processes of a host share. One that is over is passed over, and dropped when the
next one is written. Those who write take turns.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken_core.pod.fault_orders import FINDINGS, FaultOrder, read_order, write_order
from unbroken_core.vocabulary.errors import InputError

MAX_FINDINGS = 8
_MAX_BYTES = 64 << 10
_NAME = "fault-findings.json"
_LOCK = "fault-findings.lock"
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The trainer may put anything in the place of a file, also a pipe that nobody writes to."""


@dataclass(frozen=True)
class OrderedFinding:
    """One order, and until when it counts, in seconds of CLOCK_MONOTONIC."""

    order: FaultOrder
    until_s: float


def read_findings(folder: Path, now_s: float) -> tuple[OrderedFinding, ...]:
    """Return what counts now. Whatever else the file holds, as a trainer may write it, counts as nothing."""
    try:
        items = json.loads(_read(folder))
    except (OSError, ValueError, RecursionError):
        return ()
    found: list[OrderedFinding] = []
    for item in items[:MAX_FINDINGS] if isinstance(items, list) else ():
        with contextlib.suppress(InputError, ValueError, TypeError, LookupError, ArithmeticError):
            order, until_s = read_order(item[0]), float(item[1])
            if order.kind in FINDINGS and now_s < until_s <= now_s + order.seconds:
                found.append(OrderedFinding(order, until_s))
    return tuple(found)


def _read(folder: Path) -> bytes:
    with os.fdopen(os.open(folder / _NAME, os.O_RDONLY | _FLAGS), "rb") as file:
        return file.read(_MAX_BYTES) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""


def add_finding(folder: Path, order: FaultOrder, clock: Callable[[], float] = time.monotonic) -> str:
    """Let the watch find this for a while; return what it will say. Raises InputError."""
    with _turn(folder):
        # Only now: by an earlier look at the clock, what another has just written would end too late to count.
        now_s = clock()
        active = read_findings(folder, now_s)
        if any(each.order.id == order.id for each in active):
            return "this order was carried out before; nothing was done again"
        if len(active) >= MAX_FINDINGS:
            raise InputError(
                f"{order.kind}: want at most {MAX_FINDINGS} findings on purpose at a time; nothing was done"
            )
        _write(folder, (*active, OrderedFinding(order, now_s + order.seconds)))
    return f"{order.kind}: the watch finds it within seconds, for {order.seconds:g} s; nothing is broken"


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Keep others from writing between this look and this write. Raises InputError."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; nothing was done") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(folder: Path, found: Sequence[OrderedFinding]) -> None:
    items = [[write_order(each.order), each.until_s] for each in found]
    part = folder / f"{_NAME}.{os.getpid()}"
    try:
        part.write_text(json.dumps(items))
        part.replace(folder / _NAME)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; nothing was done") from error
