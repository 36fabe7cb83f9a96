"""What the tests of frameworks have shown, for docs/matrix.md: `make matrix` collects it."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

_RECOVERED = re.compile(
    r"recovered \d+: rung ([a-z-]+)(?:, .+? took over)?(?:, (\d+) -> (\d+) ranks?)? in ([0-9.]+) (ms|s) \("
)


@dataclass(frozen=True)
class Recovery:
    """One of a job, as `unbroken run` tells it."""

    rung: str
    seconds: float
    sizes: tuple[int, int] | None
    """World size before and after; None when it stayed."""


def recoveries(text: str) -> list[Recovery]:
    """Return the recoveries of a job in their order, from its output."""
    return [
        Recovery(rung, float(number) / (1000 if unit == "ms" else 1), (int(old), int(new)) if old else None)
        for rung, old, new, number, unit in _RECOVERED.findall(text)
    ]


def note(what: str, scenario: str, exactness: str, recovery: Recovery | None = None) -> None:
    """Add a cell to the file that UNBROKEN_MATRIX names, if any. Call it once the comparison has been made."""
    path = os.environ.get("UNBROKEN_MATRIX")
    if path:
        seen = None if recovery is None else {"rung": recovery.rung, "seconds": recovery.seconds}
        row = {"what": what, "scenario": scenario, "exactness": exactness, "recovery": seen}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
