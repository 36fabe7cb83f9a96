"""Where objects lie in the nested dictionaries and lists of a state. torch's planner knows keys as text alone.

An optimizer may keep a number for each parameter, by the parameter's number: torch would put what it loads under the
text of that number, beside the old one.
"""

import copy
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from unbroken_core.vocabulary.plurals import counted

OTHER_SIZE = "Size mismatch"
"""torch's words for a tensor that was saved with another size than the state has."""


class UnlikeStateError(ValueError):
    """A checkpoint is whole, and was saved of another state than that into which it is to be loaded."""


class LoadPlanner(DefaultLoadPlanner):
    """Puts objects where they were, whatever the type of their keys."""

    def create_local_plan(self) -> LoadPlan:
        """Plan what torch's own planner would, which takes ten times as long where nothing is resharded.

        Raises UnlikeStateError for a name that was not saved, or another size.
        """
        items = None if self.metadata is None else unchanged(self.state_dict, self.metadata)
        if items is not None:
            return LoadPlan(items)
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            known = () if self.metadata is None else self.metadata.state_dict_metadata
            lacking = sorted(name for name in self.state_dict if name not in known)
            if not lacking and not str(error).startswith(OTHER_SIZE):
                raise
            names = f"it lacks {counted(len(lacking), 'name')} of the state: {', '.join(lacking[:10])[:400]}"
            raise UnlikeStateError(names if lacking else str(error)[:500]) from None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one in its place."""
        container: Any = self.original_state_dict
        *outer, last = real_path(container, self.mappings[read_item.dest_index.fqn])
        for key in outer:
            container = container[_index(key)]
        # From memory they were read without running code; what is on a disk is trusted, as torch does.
        found, before = torch.load(value, weights_only=False), container[_index(last)]
        container[_index(last)] = before.dictionary if isinstance(before, _Emptied) and found == {} else found


def unchanged(flat: Mapping[str, Any], metadata: Metadata) -> list[ReadItem] | None:
    """Return what to read where this rank has just the parts that were saved; None where it has any other."""
    if flat.keys() != metadata.state_dict_metadata.keys():
        return None
    parts: dict[Any, tuple[torch.Size, torch.Size]] = {}
    items = []
    for name, one in flat.items():
        about = metadata.state_dict_metadata[name]
        if isinstance(about, BytesStorageMetadata):
            if isinstance(one, torch.Tensor):
                return None
            items.append(_item(LoadItemType.BYTE_IO, MetadataIndex(name), (0,), torch.Size((0,))))
            continue
        part = _part(one, parts)
        # Of what is empty there is nothing to read.
        if part is None or about.size != one.size() or 0 in part[1]:
            return None
        if [(chunk.offsets, chunk.sizes) for chunk in about.chunks] != [part]:
            return None
        items.append(_item(LoadItemType.TENSOR, MetadataIndex(name, part[0], 0), (0,) * len(part[1]), part[1]))
    return items


def _item(kind: LoadItemType, index: MetadataIndex, offsets: tuple[int, ...], lengths: torch.Size) -> ReadItem:
    start = torch.Size(offsets)
    return ReadItem(kind, index, start, index, start, lengths)


def _part(one: Any, parts: dict[Any, tuple[torch.Size, torch.Size]]) -> tuple[torch.Size, torch.Size] | None:
    """Return offsets and sizes of what this rank has of a tensor; None of what is no tensor, or lies elsewhere."""
    if type(one) in (torch.Tensor, torch.nn.Parameter):
        return torch.Size((0,) * one.dim()), one.size()
    is_plain = isinstance(one, DTensor) and type(one._local_tensor) is torch.Tensor
    if not is_plain or one.device_mesh.get_coordinate() is None:
        return None
    # Many have the same: those of an optimizer those of its parameters, and all layers each other's.
    key = (one.size(), id(one.device_mesh), one.placements)
    if key not in parts:
        chunks = one.__create_chunk_list__()
        if len(chunks) != 1:
            return None
        parts[key] = (chunks[0].offsets, chunks[0].sizes)
    return parts[key]


def real_path(values: Any, path: Sequence[Any]) -> Iterator[Any]:
    """Yield the keys of dictionaries, which torch's path has as text, and [index] for each list."""
    container = values
    for part in path:
        key = [part] if isinstance(container, list) else _real_key(container, part)
        yield key
        container = container[_index(key)]


def _real_key(container: Mapping[Any, Any], part: str) -> Any:
    if part in container:
        return part
    if part.isascii() and part.isdecimal() and int(part) in container:
        return int(part)
    return next(key for key in container if str(key) == part)


def _index(key: Any) -> Any:
    return key[0] if isinstance(key, list) else key


class _Emptied(str):
    """In the place of a dictionary that a checkpoint may have without anything in it. A text: torch refuses others."""

    dictionary: dict[Any, Any]
    """Of the same kind, such as Counter."""


@dataclass(frozen=True)
class StatePlace:
    """Where something lies in the dictionaries of a state."""

    path: Sequence[Any]
    make: Callable[[], torch.Tensor] | None = None
    """Returns a tensor for what was one; None of all else."""


def with_places(values: Mapping[str, Any], places: Iterable[StatePlace]) -> dict[str, Any]:
    """Return dictionaries of a state with a place for all that was saved; what is there stays as it is.

    What a loop has filled since it began, such as the best scores by name, has no keys in a new process.
    """
    lacking = [one for one in places if one.path[0] in values and not _has(values, one)]
    found = dict(values)
    found |= {name: _copied(values[name]) for name in {one.path[0] for one in lacking}}
    for one in sorted(lacking, key=lambda one: _numbers(one.path)):  # each list from its beginning
        _make_place(found, one)
    return found


def empty(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths, of texts, of dictionaries without anything in them: torch's planner passes over these."""
    if not isinstance(values, dict):
        return
    if not values and path:
        yield path
    for key, one in values.items():
        yield from empty(one, (*path, str(key)))


def without(
    values: Mapping[str, Any], paths: Sequence[Sequence[Any]], kept: Collection[Sequence[Any]]
) -> dict[str, Any]:
    """Return dictionaries of a state without what lies at these paths; what is there stays as it is.

    What a loop has dropped since it began, such as a score that was among the best, is there in a new process.
    Dictionaries and lists that are left empty go as well, unless something of `kept` lies in them.
    """
    found = dict(values)
    found |= {name: _copied(values[name]) for name in {path[0] for path in paths}}
    stay = {tuple(map(str, path[:length])) for path in kept for length in range(1, len(path) + 1)}
    for path in sorted(paths, key=_numbers, reverse=True):  # from the end of each list
        _drop(found, path, stay)
    return found


def _numbers(path: Sequence[Any]) -> list[int]:
    return [key[0] if isinstance(key, list) else 0 for key in path]


def _drop(values: dict[str, Any], path: Sequence[Any], stay: Collection[tuple[str, ...]]) -> None:
    containers: list[Any] = [values]
    for key in path[:-1]:
        containers.append(containers[-1][_index(key)])
    for length in range(len(path), 1, -1):
        container, key = containers[length - 1], path[length - 1]
        if length < len(path) and (container[_index(key)] or tuple(map(str, path[:length])) in stay):
            return
        del container[_index(key)]


def _has(values: Any, place: StatePlace) -> bool:
    found = _at(values, place.path)
    # A dictionary would ask for what is in it, and is no place if there is nothing. A state may have None for a tensor.
    return isinstance(found, torch.Tensor) if place.make is not None else not isinstance(found, dict)


def has_tensor(values: Mapping[str, Any], path: Sequence[Any]) -> bool:
    """Return whether there is a tensor at this path, or nothing at its beginning: that is no part of the state."""
    return path[0] not in values or isinstance(_at(values, path), torch.Tensor)


def _at(values: Any, path: Sequence[Any]) -> Any:
    """Return what lies there; a dictionary where nothing does."""
    container = values
    for key in path:
        if not isinstance(container, list if isinstance(key, list) else dict) or not _is_in(key, container):
            return {}
        container = container[_index(key)]
    return container


def _is_in(key: Any, container: Any) -> bool:
    return key[0] < len(container) if isinstance(key, list) else key in container


def _copied(value: Any) -> Any:
    """Return a copy of its dictionaries and lists; all else is the same."""
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, one in value.items():  # update() of a Counter adds
            found[key] = _copied(one)
        return found
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _make_place(values: dict[str, Any], place: StatePlace) -> None:
    container: Any = values
    path = place.path
    for number, key in enumerate(path):
        is_last, index = number == len(path) - 1, _index(key)
        inner = container[index] if _is_in(key, container) else None
        if isinstance(key, list) and index > len(container):
            return  # What comes before it in the list has no place.
        kind = list if not is_last and isinstance(path[number + 1], list) else dict
        if is_last:
            inner = _emptied(inner) if place.make is None else place.make()
        elif not isinstance(inner, kind):
            inner = kind()
        if isinstance(key, list) and index == len(container):
            container.append(inner)
        else:
            container[index] = inner
        container = inner


def _emptied(value: object) -> _Emptied | None:
    if not isinstance(value, dict):
        return None
    found = _Emptied()
    found.dictionary = copy.copy(value)
    found.dictionary.clear()
    return found
