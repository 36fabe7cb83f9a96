"""How far this process is in each of its process groups: torch's own numbers, and its flight recorder.

Read while somebody hangs, in another thread than the one that may be blocked. Nothing is unpickled, and no collective
of ours is begun. What torch does not tell is left out, and said to be unknown; reading never fails.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unbroken_core.pod.group_ranks import rank_text
from unbroken_core.protocol.bounds import MAX_GROUPS, MAX_LAST, MAX_NUMBER, MAX_OPERATION
from unbroken_core.protocol.messages import GroupState

logger = logging.getLogger(__name__)

MAX_RECORDS = 4096
"""Of a flight recorder that is read: 2,000, torch's default, take 40-64 ms, in which no thread of Python runs."""
_RECORDS = 2000
"""What torch keeps where its environment says nothing."""
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce")
"""Operations to which all ranks must bring the same type and size."""
_MAX_NAME = 64
_last_before = [-1]
"""The newest group with a record when the iteration began, by torch's number: groups before had the same names."""


class Groups(NamedTuple):
    """What is known of this process's groups."""

    sequence: int = -1
    """Collectives that the default group has begun; -1: not known."""
    num_groups: int = 0
    """0: not known."""
    states: tuple[GroupState, ...] = ()
    """Of each of them whose number is known, the last used ones first where they are many."""


def begin_iteration() -> None:
    """Forget what was recorded of groups so far: those of the next iteration are new ones."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, _DUMPS[0], None)
    if dump is None:
        return
    try:
        groups = json.loads(dump(includeCollectives=False, onlyActive=False)).get("pg_status") or {}
        _last_before[0] = max(map(int, groups), default=-1)
    except Exception as error:
        # It is torch's own, and may change: no training fails by what only tells who hangs.
        logger.warning("groups so far not read: error=%r", error)


def read_groups() -> Groups:
    """Return how far this process is in its groups; from any thread, with the GIL."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return Groups()
    try:
        world = c10d._world
        num_groups, default = len(world.pg_map), world.default_pg
        sequence = -1 if default is None else int(default._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, TypeError):
        # Another torch, or a backend that does not count.
        return Groups()
    try:
        states = _states(world)
        begun = {state.name: state.begun for state in states}
        return Groups(sequence if default is None else begun.get(str(world.pg_names[default]), -1), num_groups, states)
    except Exception as error:
        # Another torch than the ones that this was written for must not cost the place where the thread stands.
        logger.warning("collectives not read: error=%r", error)
        # That of gloo counts each send and recv as well.
        return Groups(-1 if "gloo" in str(world.pg_map) else sequence, num_groups)


def _states(world: Any) -> tuple[GroupState, ...]:
    records = _records()
    newest = {name: number for number, name in enumerate(records)}
    states = []
    is_recorded = _does_record_gloo()
    for group, (backend, _store) in list(world.pg_map.items()):
        name = str(world.pg_names[group])
        begun = int(group._get_sequence_number_for_group())
        if is_recorded and begun and name not in records and "gloo" in backend:
            continue  # It may have begun nothing but sends, or its records are gone.
        state = _state(name, world.pg_group_ranks[group], begun, records.get(name, ()))
        if 0 <= state.begun <= MAX_NUMBER and len(name) <= _MAX_NAME:
            states.append(state)
    # The groups of which nothing is recorded are those that were not used lately.
    states.sort(key=lambda state: (state.pending < 0, -newest.get(state.name, -1)))
    return tuple(states[:MAX_GROUPS])


def _state(name: str, ranks: Iterable[int], begun: int, records: Iterable[Mapping[str, Any]]) -> GroupState:
    """Return how far the process is in one group, from what is recorded of it, in the order of its begin."""
    operations: dict[int, str] = {}
    pending: dict[int, str] = {}
    for record in records:
        number, operation = int(record["collective_seq_id"]), _operation(record)
        if number in operations or (operations and number < next(reversed(operations))):
            # Of a group of an earlier iteration, which had the same name: numbers have begun anew since.
            operations, pending = {}, {}
        operations[number] = operation
        if not _has_ended(record):
            pending[number] = operation
    if operations and next(reversed(operations)) > begun:
        operations, pending = {}, {}
    # The group's own number counts each send and recv of gloo as well, of which nothing is recorded.
    begun = next(reversed(operations), begun)
    last = [operations.get(number, "") for number in range(max(begun - MAX_LAST, 0) + 1, begun + 1)]
    number, what = next(iter(pending.items()), (-1, ""))
    return GroupState(name, rank_text(ranks), begun, number, what, tuple(last) if any(last) else ())


def _has_ended(record: Mapping[str, Any]) -> bool:
    # With gloo only the first tells: the state stays "scheduled".
    return bool(record.get("retired")) or record.get("state") == "completed"


def _operation(record: Mapping[str, Any]) -> str:
    """Return the name of an operation, with type and size where these must be the same on all ranks."""
    name = str(record.get("profiling_name", "")).rpartition(":")[2]
    if name in _OF_ONE_SIZE:
        kinds, sizes = record.get("input_dtypes") or [""], record.get("input_sizes") or [""]
        name = f"{name} {kinds[0]}{sizes[0]}".rstrip()
    return name[:MAX_OPERATION]


def _records() -> dict[str, list[Mapping[str, Any]]]:
    """Return the collectives that are recorded, by group; the group that was used last comes last."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for text in _dumps():
        for record in json.loads(text).get("entries") or ():
            is_before = "gloo" in str(record.get("profiling_name")) and record.get("pg_id", math.inf) <= _last_before[0]
            if not is_before and not record.get("is_p2p") and record.get("process_group"):
                name = str(record["process_group"][0])
                records = found.pop(name, [])
                found[name] = records
                records.append(record)
    return found


def _dumps() -> list[str | bytes]:
    """Return what torch has recorded, as JSON; of NCCL it keeps records of its own."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or _num_records() > MAX_RECORDS:
        return []
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    return [dump(includeCollectives=True, onlyActive=False) for dump in dumps]


def _does_record_gloo() -> bool:
    """Return whether each collective of gloo is recorded, and read: older torch keeps those of NCCL only."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    return hasattr(c10d, _DUMPS[0]) and 0 < _num_records() <= MAX_RECORDS


def _num_records() -> int:
    """Return how many records torch keeps at most, as its environment says; what is no number, torch refuses itself."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    return max((int(size) for size in sizes if size.isdecimal()), default=_RECORDS)
