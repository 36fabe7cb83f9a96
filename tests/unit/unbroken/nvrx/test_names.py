"""What the newest release of NVIDIA's extension offers, and ours has.

`tests/data/nvrx/names.json` is recorded from its wheel by `tools/record_nvrx_names.py`.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from unbroken.nvrx.finder import MODULES

NAMES = json.loads((Path(__file__).parents[3] / "data/nvrx/names.json").read_text())["modules"]

LEFT_OUT = {
    "monitor_process": "there is no monitor process: the agent watches",
    "param_utils": "helpers of its own",
    "progress_watchdog": "the agent watches",
    "sibling_monitor": "the agent watches",
    "utils": "helpers of its own",
    "monitor_thread.MonitorThread": "orders are pushed, nothing polls",
    "monitor_thread.async_raise": "how its thread interrupts",
    "monitor_thread.delayed_async_raise": "how its thread interrupts",
    "monitor_thread.reraise_if_unraisable": "how its thread interrupts",
    "monitor_thread.async_abort_main_thread": "how its thread interrupts",
    "abort.AbortTorchDistributed.shutdown_all_process_group_backends": "one step of its own __call__",
    "abort.AbortTorchDistributed.shutdown_process_group_backend": "one step of its own __call__",
    "abort.AbortTorchDistributed.collect_fr_trace": "one step of its own __call__",
    "compose.find_common_ancestor": "a helper of its own",
    "compose.Compose.__init__": "a part is no argument here, whatever its name",
    "rank_assignment.Node": "inside its Tree",
    "rank_assignment.bounded_activate": "inside its Tree",
    "rank_assignment.propagate_terminations": "inside its Tree",
    "rank_assignment.FilterCountGroupedByKey.instance_count": "a counter of its own",
    "state.freeze_dataclass": "a helper of its own",
    "store.BarrierError": "no barrier on a store",
    "store.BarrierTimeout": "no barrier on a store",
    "store.BarrierOverflow": "no barrier on a store",
    "wrap.HealthCheckPassed": "inside its loop",
    "wrap.reserve_fn": "inside its loop",
    "wrap.CallWrapper.__init__": "the wrapper makes it",
    "wrap.CallWrapper.__call__": "the wrapper calls it",
    "wrap.CallWrapper.shutdown": "the wrapper ends it",
} | {
    f"rank_assignment.Tree.{name}": "a step of its own __call__"
    for name in NAMES["rank_assignment"]["Tree"]
    if not name.startswith("__")
}
"""What is no part of the interface that scripts use, and why."""

STORE_METHODS = {"critical_ranks", "send_state", "send_key", "get_states", "get_keys", "STATE", "KEY", "STORE_PREFIX"}
LEFT_OUT |= {
    f"store.StoreMixin.{name}": "how its workers agree over the store"
    for name in NAMES["store"]["StoreMixin"]
    if name not in STORE_METHODS
}


def _offered() -> list[str]:
    """Return module, module.name and module.Class.member, as far as they are not left out."""
    found = []
    for module, names in NAMES.items():
        if module in LEFT_OUT:
            continue
        for name, members in names.items():
            place = f"{module}.{name}"
            if place in LEFT_OUT:
                continue
            found.append(place)
            if isinstance(members, dict):
                found += [f"{place}.{member}" for member in members if f"{place}.{member}" not in LEFT_OUT]
    return found


def _ours(place: str) -> tuple[Any, str, Any]:
    module, name, *member = place.split(".")
    owner = getattr(importlib.import_module(MODULES[module]), name)
    recorded = NAMES[module][name]
    return (owner, member[0], recorded[member[0]]) if member else (owner, "", recorded)


def _has(owner: Any, name: str) -> bool:
    """Return whether a class has a member; an instance's attributes are fields of a dataclass."""
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {})


@pytest.mark.parametrize("place", _offered())
def test_name_is_here_and_takes_the_same_arguments(place: str) -> None:
    owner, member, recorded = _ours(place)
    if member and not recorded.startswith("(") and member not in {"__init__", "__call__"}:
        assert callable(getattr(owner, member))
    if member:
        assert _has(owner, member)
    if isinstance(recorded, dict) or recorded.startswith("(") or (not member and not callable(owner)):
        return
    function = getattr(owner, member) if member else owner
    parameters = inspect.signature(function).parameters
    is_bound = member and not isinstance(inspect.getattr_static(owner, member), (staticmethod, classmethod))
    ours = [each for place, each in enumerate(parameters.values()) if not (is_bound and place == 0)]
    assert not _missing(recorded.split(), ours), f"want {recorded}, got {inspect.signature(function)}"


def _missing(recorded: list[str], ours: list[inspect.Parameter]) -> list[str]:
    """Return the recorded parameters that a caller could not give to ours in the same way."""
    missing, position, by_keyword = [], 0, False
    names = {each.name: each for each in ours}
    takes_all = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in ours)
    for word in recorded:
        if word.startswith("*"):
            by_keyword = True
            continue
        name, is_optional = word.rstrip("="), word.endswith("=")
        mine = names.get(name)
        is_there = mine is not None and (not is_optional or mine.default is not inspect.Parameter.empty)
        if not by_keyword:
            is_there = is_there and position < len(ours) and ours[position].name == name
            position += 1
        if not (is_there or (takes_all and not by_keyword)):
            missing.append(word)
    return missing


def test_what_is_left_out_is_there_in_the_extension() -> None:
    """A reason for a name that it no longer has would hide another one of that name."""
    for place in LEFT_OUT:
        found: Any = NAMES
        for part in place.split("."):
            assert part in found, place
            found = found[part]


def test_missing_name_would_be_found() -> None:
    class Ours:
        def method(self, first: int) -> None:
            """Lack the second."""

    parameters = list(inspect.signature(Ours.method).parameters.values())[1:]
    assert _missing(["first"], parameters) == []
    assert _missing(["first", "second="], parameters) == ["second="]
    assert _missing(["first="], parameters) == ["first="]
