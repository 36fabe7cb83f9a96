"""Findings on purpose: a file in the pod's folder that the watch reads, in a pod that allows faults.

Each has an end, on the clock that all processes of a host share. One that is over is passed over, and dropped when the
next one is written.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken_core.pod.fault_orders import FINDINGS, FaultOrder, read_order, write_order
from unbroken_core.vocabulary.errors import InputError

MAX_FINDINGS = 8
_MAX_BYTES = 64 << 10
_NAME = "fault-findings.json"


@dataclass(frozen=True)
class OrderedFinding:
    """One order, and until when it counts, in seconds of CLOCK_MONOTONIC."""

    order: FaultOrder
    until_s: float


def read_findings(folder: Path, now_s: float) -> tuple[OrderedFinding, ...]:
    """Return what counts now. Whatever else the file holds, as a trainer may write it, counts as nothing."""
    try:
        with (folder / _NAME).open("rb") as file:
            items = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return ()
    found: list[OrderedFinding] = []
    for item in items[:MAX_FINDINGS] if isinstance(items, list) else ():
        with contextlib.suppress(InputError, ValueError, TypeError, LookupError, ArithmeticError):
            order, until_s = read_order(item[0]), float(item[1])
            if order.kind in FINDINGS and now_s < until_s <= now_s + order.seconds:
                found.append(OrderedFinding(order, until_s))
    return tuple(found)


def add_finding(folder: Path, order: FaultOrder, now_s: float) -> str:
    """Let the watch find this for a while; return what it will say. Raises InputError."""
    active = read_findings(folder, now_s)
    if any(each.order.id == order.id for each in active):
        return "this order was carried out before; nothing was done again"
    if len(active) >= MAX_FINDINGS:
        raise InputError(f"{order.kind}: want at most {MAX_FINDINGS} findings on purpose at a time; nothing was done")
    _write(folder, (*active, OrderedFinding(order, now_s + order.seconds)))
    return f"{order.kind}: the watch finds it within seconds, for {order.seconds:g} s; nothing is broken"


def _write(folder: Path, found: Sequence[OrderedFinding]) -> None:
    items = [[write_order(each.order), each.until_s] for each in found]
    part = folder / f"{_NAME}.{os.getpid()}"
    try:
        part.write_text(json.dumps(items))
        part.replace(folder / _NAME)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; nothing was done") from error
