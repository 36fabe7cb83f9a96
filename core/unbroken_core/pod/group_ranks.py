"""The ranks of a process group as a short text, "0-7" or "3-1019:8" (every eighth), as worker and coordinator share it.

The groups of a parallel layout are runs of ranks with a step, so that 1,024 of them are one word.
"""

import re
from collections.abc import Iterable

from unbroken_core.protocol.bounds import MAX_GROUP_TEXT

_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", re.ASCII)


def rank_text(ranks: Iterable[int]) -> str:
    """Return these ranks as text; "" where that would be longer than a message may have it."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    length = first = 0
    while first < len(ordered):
        last = _end_of_run(ordered, first)
        parts.append(_part(ordered[first], ordered[last], last - first))
        length += len(parts[-1]) + 1
        if length > MAX_GROUP_TEXT:
            return ""
        first = last + 1
    return ",".join(parts)


def rank_runs(text: str) -> tuple[range, ...]:
    """Return the ranks that a text names; () for "" and for what is no such text. It comes from a job."""
    runs: list[range] = []
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            return ()
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if step < 1 or last < first or (runs and first <= runs[-1][-1]):
            return ()
        runs.append(range(first, last + 1, step))
    return tuple(runs)


def _end_of_run(ordered: list[int], first: int) -> int:
    """Return the index of the last of the ranks that follow each other with one step."""
    last = first + 1
    if last >= len(ordered):
        return first
    step = ordered[last] - ordered[first]
    while last + 1 < len(ordered) and ordered[last + 1] - ordered[last] == step:
        last += 1
    # Two with a wide step between them may be the ends of two runs.
    return last if step == 1 or last > first + 1 or last + 1 == len(ordered) else first


def _part(first: int, last: int, num_steps: int) -> str:
    if not num_steps:
        return f"{first}"
    step = (last - first) // num_steps
    return f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}"
