"""Write docs/matrix.md from what a run of its tests has noted: `make matrix`.

Environment: UNBROKEN_MATRIX, the file with the notes. A cell that is missing (its test failed) is an error, and nothing
is written.
"""

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.integration.inprocess.test_layouts import KINDS, SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "matrix.md"
FRAMEWORKS = {
    "fsdp2": "FSDP2 and a loop of one's own",
    "hf": "Hugging Face's Trainer",
    "accelerate_job": "Accelerate and a loop of one's own",
    "lightning_job": "Lightning",
    "torchtitan_job": "torchtitan's Trainer",
}
"""Title by the name of its job."""
FAULTS = {"exception": "exception", "kill": "SIGKILL", "hang": "hang", "shrink": "2 -> 1 rank", "grow": "1 -> 2 ranks"}
LAYOUTS = tuple(SCENARIOS)[1:]
PACKAGES = ("torch", "transformers", "accelerate", "lightning")
ELSEWHERE = {"torchtitan": ROOT / "requirements-integrations-torchtitan.lock"}
"""Package that has an environment of its own, by the lock that this was made from."""
HEAD = """\
# What was compared, and how exactly

Written by `make matrix` from a run of the tests; a failed comparison leaves no page. Tried with {releases} on CPUs,
over gloo.

## Frameworks

Jobs of 2 ranks under `unbroken run`, with a checkpoint in memory after each step, compared with a job without a fault.
The time is from the fault until all ranks have made a step again, as the job itself tells it: for a hang with the soft
timeout of 6 s. New processes find the framework imported (`UNBROKEN_PREIMPORT`, as each page says). The machine was
shared: times are no benchmark.

"""
LAYOUT_HEAD = """\
## Kinds of parallelism

4 ranks in the same processes, and a fifth that takes over; each is compared with new processes in the same layout,
all parameters and the files read back (`tests/integration/inprocess/test_layouts.py`).

"""


def main() -> int:
    """Write the page."""
    notes = Path(os.environ["UNBROKEN_MATRIX"])
    rows = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()] if notes.exists() else []
    try:
        text = page(rows, {name: metadata.version(name) for name in PACKAGES} | _elsewhere())
    except KeyError as error:
        print(f"matrix: {TARGET.name} is not written: {error.args[0]}", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"matrix: wrote {TARGET.relative_to(ROOT)}")
    return 0


def page(rows: Sequence[Mapping[str, Any]], releases: Mapping[str, str]) -> str:
    """Return the page. Raises KeyError for a cell that is missing."""
    cells = {(row["what"], row["scenario"]): row for row in rows}
    if missing := [cell for cell in _wanted() if cell not in cells]:
        raise KeyError("no run showed " + "; ".join(f"{what} x {scenario}" for what, scenario in missing[:5]))
    named = ", ".join(f"{name} {release}" for name, release in releases.items())
    text = _wrapped(HEAD.format(releases=named))
    text += "| |" + "".join(f" {title} |" for title in FAULTS.values()) + "\n" + "|---|" + "---|" * len(FAULTS) + "\n"
    for what, title in FRAMEWORKS.items():
        text += f"| {title} |" + "".join(f" {_cell(cells[what, fault])} |" for fault in FAULTS) + "\n"
    text += "\n" + _wrapped(LAYOUT_HEAD)
    text += "| |" + "".join(f" {name} |" for name in LAYOUTS) + "\n" + "|---|" + "---|" * len(LAYOUTS) + "\n"
    for kind in KINDS:
        text += f"| {kind} |" + "".join(f" {_cell(cells[kind, name])} |" for name in LAYOUTS) + "\n"
    return text


def _elsewhere() -> dict[str, str]:
    """Return version by package, as the locks of other environments say."""
    found = {}
    for name, lock in ELSEWHERE.items():
        line = next(line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}=="))
        found[name] = line.removeprefix(f"{name}==").split()[0]
    return found


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, 100) for part in text.split("\n\n"))


def _wanted() -> list[tuple[str, str]]:
    frameworks = [(what, fault) for what in FRAMEWORKS for fault in FAULTS]
    return frameworks + [(kind, layout) for kind in KINDS for layout in LAYOUTS]


def _cell(row: Mapping[str, Any]) -> str:
    recovery = row["recovery"]
    if recovery is None:
        return str(row["exactness"])
    seconds = recovery["seconds"]
    took = f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    return f"{row['exactness']}; {took}, {recovery['rung']}"


if __name__ == "__main__":
    sys.exit(main())
