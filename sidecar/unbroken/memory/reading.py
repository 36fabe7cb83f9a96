"""Reads one checkpoint out of slots: of the own shard where it suffices, else of all shards that this host has."""

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from unbroken.memory.layout import Entry
from unbroken.memory.new_state import nested
from unbroken.memory.new_state.places import Places, common_places
from unbroken.memory.shard import copy_bits, unwrapped
from unbroken.memory.sources import Source, UnreadableError


@dataclass(frozen=True)
class Piece:
    """A tensor of a shard, and the slot that holds it."""

    source: Source
    entry: Entry


class Contents:
    """What some shards of one checkpoint hold together. Earlier ones win where two hold the same."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Raises UnreadableError."""
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
        self._objects: dict[str, Source] = {}
        self._whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for source in sources:
            for entry in source.layout.entries:
                is_same = self._whole.setdefault(entry.name, (entry.size, entry.dtype)) == (entry.size, entry.dtype)
                if not is_same:
                    raise UnreadableError(f"{entry.name}: its shards differ in shape or type")
                self._pieces.setdefault((entry.name, entry.offsets), Piece(source, entry))
            for name in source.objects:
                self._objects.setdefault(name, source)

        self._sources = sources

    @property
    def places(self) -> Places:
        """Where all of it lies in the dictionaries of the state, by name. Raises UnreadableError.

        Not of what one rank has for itself: where several shards are read, this may be another one.
        """
        return common_places([one.places for one in self._sources])

    def unclaimed(self, names: Collection[str]) -> list[str]:
        """Return what all shards have, and a state with these names has no place for."""
        of_each = [{*(entry.name for entry in one.layout.entries), *one.objects} for one in self._sources]
        return sorted(set.intersection(*of_each).difference(names)) if of_each else []

    @property
    def metadata(self) -> Metadata:
        """The same in the words of torch.distributed.checkpoint."""
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self._objects}
        for name, (size, dtype) in self._whole.items():
            found[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [])
        for (name, offsets), piece in self._pieces.items():
            found[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.entry.sizes)))
        return Metadata(found)

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copy everything that a plan wants. All of it should have been verified."""
        with torch.no_grad():
            if type(planner) is nested.LoadPlanner:
                # All places first: between two copies the processor's caches hold nothing of what finds them.
                found = [(item, self._found(item, planner)) for item in plan.items if _is_tensor(item)]
                for item, (target, part) in found:
                    copy_bits(target, part)
                    planner.commit_tensor(item, target)
            for item in plan.items:
                if not _is_tensor(item):
                    self._read_object(item, planner)
                elif type(planner) is not nested.LoadPlanner:
                    # A planner of the user may make its target now, and let it go once it is filled.
                    target, part = self._found(item, planner)
                    copy_bits(target, part)
                    planner.commit_tensor(item, target)

    def _read_object(self, item: ReadItem, planner: LoadPlanner) -> None:
        file = io.BytesIO()
        name = item.storage_index.fqn
        # It was read with weights_only, so these bytes can be read without running code.
        torch.save(self._objects[name].objects[name], file)
        file.seek(0)
        planner.load_bytes(item, file)

    def _found(self, item: ReadItem, planner: LoadPlanner) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a tensor goes, and what goes there."""
        piece = self._piece(item.storage_index)
        part = piece.source.tensor(piece.entry)
        if tuple(item.lengths) != piece.entry.sizes:
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
        return unwrapped(planner.resolve_tensor(item).detach()), part

    def verify(self, plan: LoadPlan) -> None:
        """Compare what a plan wants with its digests. Raises UnreadableError."""
        ranges: dict[int, tuple[Source, list[tuple[int, int]]]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                # Verified when it was listed.
                continue
            piece = self._piece(item.storage_index)
            of_source = ranges.setdefault(id(piece.source), (piece.source, []))[1]
            of_source.append(_range_of(piece.entry, item))
        for source, wanted in ranges.values():
            source.verify(wanted)

    def _piece(self, index: MetadataIndex) -> Piece:
        return self._pieces[index.fqn, tuple(index.offset or ())]


def _is_tensor(item: ReadItem) -> bool:
    return item.type is LoadItemType.TENSOR


def missing(plan: LoadPlan, flat: dict[str, Any], metadata: Metadata) -> str:
    """Return which tensor a plan would leave without all of its values, "" when there is none."""
    covered: dict[str, int] = {}
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            covered[item.dest_index.fqn] = covered.get(item.dest_index.fqn, 0) + torch.Size(item.lengths).numel()
    for name, one in flat.items():
        if not isinstance(one, torch.Tensor):
            continue
        local = one
        if isinstance(one, DTensor):
            if one.device_mesh.get_coordinate() is None:
                continue
            local = one.to_local()
        about = metadata.state_dict_metadata[name]
        if not isinstance(about, TensorStorageMetadata) or about.properties.dtype != one.dtype:
            return f"{name} was saved as {about}, and is {one.dtype} now"[:500]
        if covered.get(name, 0) != local.numel():
            return f"{name}: {covered.get(name, 0)} of {local.numel()} values are on this host"
    return ""


def _range_of(entry: Entry, item: ReadItem) -> tuple[int, int]:
    """Return the bytes (start, length) of the content from the first to the last value that an item reads."""
    if tuple(item.lengths) == entry.sizes:
        return entry.start, entry.num_bytes
    strides = [entry.dtype.itemsize]
    for size in reversed(entry.sizes[1:]):
        strides.insert(0, strides[0] * size)
    if 0 in tuple(item.lengths):
        return entry.start, 0
    first = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
    last = sum(
        (at + length - 1) * stride
        for at, length, stride in zip(item.storage_offsets, item.lengths, strides, strict=True)
    )
    return entry.start + first, last - first + entry.dtype.itemsize
