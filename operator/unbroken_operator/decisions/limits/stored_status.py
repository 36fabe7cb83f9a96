"""Pure: what is believed of a status that is stored: whoever may write to `/status` may have put anything there.

The table is the one by which a status is written (`fitting`), with a few numbers and `accepted` beside it. What cannot
be is taken as absent: the next write replaces or removes it. A lie that could be true is believed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.protocol.bounds import MAX_CLAIMED, MAX_RANK_SECONDS, MAX_SECONDS
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_operator.decisions.limits.fitting import fitted, is_time

STORED_STATUS = "storedStatus"
"""Field of a job as it is held, and of no other: its status as it is stored, where not all of it is believed."""
MAX_ORDINAL = 1_000_000_000
"""No job replaces so many pods: one whose name has this number, or a higher one, is not known as the job's."""
MAX_NEXT_ORDINAL = MAX_ORDINAL // 2
"""The highest that is believed. Ordinals are counted on from it, and must not reach those of pods that nobody knows."""
MAX_FAULTS = 8
MAX_SHOWN = 80
"""Most faults that are reported for one status, and characters shown of each value."""
_NO_TIME = "0001-01-01T00:00:00Z"
_TRANSITION = "lastTransitionTime"
_ORDINAL = (0, MAX_NEXT_ORDINAL)
_COUNT = (0, MAX_CLAIMED)
_SECONDS = (0, MAX_SECONDS)
_RANK_SECONDS = (0, MAX_RANK_SECONDS)
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "status.nextPodOrdinal": _ORDINAL,
    "status.nextRendezvousOrdinal": _ORDINAL,
    "status.iteration": (-1, MAX_CLAIMED),
    "status.endedTerm": _COUNT,
    "status.rendezvous.term": _COUNT,
    "status.history.term": _COUNT,
    "status.history.iteration": _COUNT,
    "status.time.term": _COUNT,
    **{
        f"status.time.{name}Seconds": _SECONDS
        for name in ("progress", "checkpoint", "redo", "detect", "restart", "waiting", "suspended", "open")
    },
    **{f"status.time.{name}RankSeconds": _RANK_SECONDS for name in ("progress", "held", "wanted")},
}
"""Of numbers that a coordinator is told, or that pods are named after; tighter than what may be written."""
_BOUNDED = frozenset(path.split(".")[1] for path in _BOUNDS)
_LAYER = re.compile(r"[a-z0-9][a-z0-9-]*=[A-Za-z0-9][A-Za-z0-9._/-]*", re.ASCII)
_WANTED_ACCEPTED = f"ranksPerPod from 1 to {MAX_RANKS_PER_POD}, layers as NAME=LABEL, isInProcess"


@dataclass(frozen=True)
class StatusFault:
    """Why a field of a stored status is not believed."""

    field: str
    seen: str
    wanted: str


def believed(stored: Any) -> tuple[dict[str, Any], tuple[StatusFault, ...]]:
    """Return what is believed of a status, and what is wrong with the rest, the first few faults.

    A condition whose time cannot be stays, without that time: a job that is over must not start again.
    """
    status = stored if isinstance(stored, Mapping) else {}
    dropped: list[StatusFault] = []
    kept = {
        key: _bounded(f"status.{key}", value, dropped) if key in _BOUNDED else value for key, value in status.items()
    }
    kept = {key: value for key, value in kept.items() if value is not None}
    if "accepted" in kept and not _is_sound_accepted(kept["accepted"]):
        dropped.append(_fault("status.accepted", kept.pop("accepted"), _WANTED_ACCEPTED))
    if "time" in kept and not _is_possible(kept["time"]):
        dropped.append(_fault("status.time", kept.pop("time"), f"at most {MAX_SECONDS:.0f} s in all"))
    conditions = kept.get("conditions")
    timed = [_with_some_time(item) for item in conditions] if isinstance(conditions, list) else None
    found = fitted(kept if timed is None else {**kept, "conditions": timed})
    if "conditions" in found:
        found["conditions"] = [_without_no_time(item) for item in found["conditions"]]
    return found, (*dropped, *_differences("status", kept, found))[:MAX_FAULTS]


def _bounded(path: str, value: Any, dropped: list[StatusFault]) -> Any:
    """Return a value without the numbers in it that are out of bounds; None if it is one."""
    if isinstance(value, Mapping):
        inner = {key: _bounded(f"{path}.{key}", item, dropped) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not None}
    if isinstance(value, list):
        return [_bounded(path, item, dropped) for item in value]
    if path not in _BOUNDS or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    least, most = _BOUNDS[path]
    if least <= value <= most:
        return value
    dropped.append(_fault(path, value, f"from {least:.0f} to {most:.0f}"))
    return None


def _is_sound_accepted(accepted: Any) -> bool:
    """Whether some sound spec has these facts."""
    if not isinstance(accepted, Mapping):
        return False
    ranks, layers = accepted.get("ranksPerPod"), accepted.get("layers")
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS_PER_POD or not isinstance(layers, list):
        return False
    if not all(isinstance(layer, str) and _LAYER.fullmatch(layer) for layer in layers):
        return False
    names = [layer.partition("=")[0] for layer in layers]
    return len(set(names)) == len(names) and isinstance(accepted.get("isInProcess"), bool)


def _is_possible(time: Any) -> bool:
    """Whether a coordinator would take all of it together."""
    items = time.items() if isinstance(time, Mapping) else ()
    seconds = [value for key, value in items if _BOUNDS.get(f"status.time.{key}") is _SECONDS]
    return sum(value for value in seconds if isinstance(value, int | float)) <= MAX_SECONDS


def _with_some_time(condition: Any) -> Any:
    if not isinstance(condition, Mapping):
        return condition
    at = condition.get(_TRANSITION)
    return condition if isinstance(at, str) and is_time(at) else {**condition, _TRANSITION: _NO_TIME}


def _without_no_time(condition: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in condition.items() if (key, value) != (_TRANSITION, _NO_TIME)}


def _differences(where: str, seen: Any, found: Any) -> Iterator[StatusFault]:
    """Yield what does not fit the CRD's schema."""
    if seen == found:
        return
    if isinstance(seen, Mapping) and isinstance(found, Mapping):
        for key, value in seen.items():
            if key not in found:
                yield _fault(f"{where}.{key}", value, "what the CRD allows, times of RFC 3339")
            else:
                yield from _differences(f"{where}.{key}", value, found[key])
    elif isinstance(seen, list) and isinstance(found, list) and len(seen) == len(found):
        for index, (value, other) in enumerate(zip(seen, found, strict=True)):
            yield from _differences(f"{where}[{index}]", value, other)
    else:
        yield _fault(where, seen, "what the CRD allows, times of RFC 3339")


def _fault(where: str, seen: Any, wanted: str) -> StatusFault:
    shown = repr(seen)
    return StatusFault(where, shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 3]}...", wanted)
