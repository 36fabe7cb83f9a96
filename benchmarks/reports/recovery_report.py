"""Figures of the recovery benchmark as a table and as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One system at one size."""

    kind: str
    size: int
    system: str
    recoveries_ms: tuple[float, ...]
    """Empty when it did not recover."""

    @property
    def median_ms(self) -> float | None:
        """The median."""
        return statistics.median(self.recoveries_ms) if self.recoveries_ms else None


def to_table(rows: Sequence[Row], *, has_head: bool = True) -> str:
    """Return a markdown table; the last column is each system's median / ours of the same fault and size."""
    ours = {(row.kind, row.size): row.median_ms for row in rows if row.system == "unbroken"}
    lines = []
    if has_head:
        lines = [
            "| fault | N | system | median ms | min | max | faults | / unbroken |",
            "|---|--:|---|--:|--:|--:|--:|--:|",
        ]
    for row in rows:
        median, own = row.median_ms, ours.get((row.kind, row.size))
        if median is None:
            lines.append(f"| {row.kind} | {row.size} | {row.system} | did not recover | | | 0 | |")
            continue
        ratio = f"{median / own:.1f}" if own else ""
        low, high = min(row.recoveries_ms), max(row.recoveries_ms)
        count = len(row.recoveries_ms)
        lines.append(
            f"| {row.kind} | {row.size} | {row.system} | {median:.1f} | {low:.1f} | {high:.1f} | {count} | {ratio} |"
        )
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    """Return every figure, and what machine it is from."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
    figures = [
        {"kind": row.kind, "size": row.size, "system": row.system, "recoveries_ms": row.recoveries_ms} for row in rows
    ]
    return json.dumps({"machine": machine, "rows": figures}, indent=2)
