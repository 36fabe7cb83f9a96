"""Which rank writes what: torch's own planner decides, over what all ranks have."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from unbroken.memory.layout import Entry
from unbroken.memory.new_state.places import Places, merge, read_places

Key = tuple[str, tuple[int, ...] | None]
"""Name of a tensor and where its part begins; None for an object."""


class PlanError(Exception):
    """The parts of all ranks make no checkpoint; the message says why."""


@dataclass(frozen=True)
class WritePlan:
    """Who writes what."""

    plan_id: str
    of_rank: tuple[tuple[int, ...], ...]
    """For each rank the indices into what it has."""
    keys: frozenset[Key]
    """All that has to be written."""
    metadata: Metadata
    places: dict[str, Any]
    """See PLACES."""


def describe(
    entries: Sequence[Entry], objects: Sequence[str], paths: Mapping[str, Sequence[Any]], places: Places
) -> dict[str, Any]:
    """Return what a rank tells the others that it has.

    `paths`: where each name lies in the dictionaries of the state, as torch's planner says it; `places`: its real keys.
    """
    rows = [[one.name, str(one.dtype).removeprefix("torch."), one.size, one.offsets, one.sizes] for one in entries]
    names = [one.name for one in entries] + list(objects)
    return {
        "entries": rows,
        "objects": list(objects),
        "paths": {name: list(paths.get(name, (name,))) for name in names},
        "places": places.to_json(),
    }


def local_plan(has: Mapping[str, Any]) -> SavePlan:
    """Return what a rank has in torch's words, in the same order. Raises PlanError."""
    try:
        items = [_tensor_item(*row) for row in has["entries"]]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in has["objects"]]
        return SavePlan(items, planner_data={name: tuple(path) for name, path in has["paths"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"what a rank has cannot be read: {error!r}"[:500]) from error


def decide(contents: Sequence[bytes]) -> WritePlan:
    """Return who writes what, given what each rank says. Raises PlanError."""
    try:
        has = [json.loads(content) for content in contents]
        plans = [local_plan(one) for one in has]
        # A rank of an earlier release says nothing of it.
        places = merge([read_places(one.get("places", ({}, {}, ()))) for one in has])
        _check_same_form(plans)
        indices = [{key_of(item.index): index for index, item in enumerate(plan.items)} for plan in plans]
        chosen, metadata = DefaultSavePlanner().create_global_plan(plans)
        _check_whole(metadata)
        of_rank = tuple(
            tuple(sorted(index[key_of(item.index)] for item in plan.items))
            for index, plan in zip(indices, chosen, strict=True)
        )
    except (ValueError, AssertionError, RecursionError) as error:
        raise PlanError(f"the parts of all ranks make no checkpoint: {error}"[:500]) from error
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    keys = frozenset(key_of(item.index) for plan in chosen for item in plan.items)
    return WritePlan(digest.hexdigest()[:32], of_rank, keys, metadata, places)


def key_of(index: MetadataIndex) -> Key:
    """Return what names an item in all plans."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _check_same_form(plans: Sequence[SavePlan]) -> None:
    """Refuse a name that is not the same thing on all ranks: torch would take that of one of them. Raises PlanError."""
    forms: dict[str, Any] = {}
    parts: dict[Key, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        data, key = item.tensor_data, key_of(item.index)
        form = None if data is None else (tuple(data.size), data.properties.dtype)
        part = None if data is None else tuple(data.chunk.sizes)
        if forms.setdefault(key[0], form) != form or parts.setdefault(key, part) != part:
            raise PlanError(f"{key[0][:200]}: its shape, type or part differs between ranks")


def _check_whole(metadata: Metadata) -> None:
    """Refuse a tensor of which no rank has some part; torch finds parts that overlap. Raises PlanError."""
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            found = sum(torch.Size(chunk.sizes).numel() for chunk in about.chunks)
            if found != about.size.numel():
                raise PlanError(f"{name[:200]}: ranks have {found} of its {about.size.numel()} values")


def _tensor_item(name: str, dtype: str, size: list[int], offsets: list[int], sizes: list[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"{dtype} is no type of tensors")
    data = TensorWriteData(chunk, TensorProperties(dtype=kind), torch.Size(size))
    # A part of its own also where it is the whole: torch's planner takes several ranks with the same one then.
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)
