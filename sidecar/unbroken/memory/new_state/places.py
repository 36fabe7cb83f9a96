"""Where what was saved lies in the dictionaries of a state, so that a new state can be given a place for it.

A slot says it of its shard, and a checkpoint on the disk, in a file beside what torch writes, of all ranks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from unbroken.memory.new_state.nested import StatePlace, has_tensor

PLACES: Final = "unbroken-places.json"
"""The file in a checkpoint: {"common": places, "of_rank": {rank: places}, "world_size": number}."""

Path = tuple[Any, ...]
"""Keys of dictionaries, and [number] for a place in a list."""


@dataclass(frozen=True)
class Places:
    """Of objects and tensors, by name."""

    objects: Mapping[str, Path] = field(default_factory=dict)
    tensors: Mapping[str, tuple[Path, str, int]] = field(default_factory=dict)
    """Path, kind of device, and the group of a DTensor; -1 of any other tensor."""
    alike: Sequence[Sequence[str]] = ()
    """Of each group the names of some DTensors that are divided alike."""

    @property
    def roots(self) -> set[str]:
        """Names of the parts of a state in which these lie."""
        return {path[0] for path in self.objects.values()} | {path[0] for path, *_ in self.tensors.values()}

    def within(self, roots: Collection[str]) -> "Places":
        """Return those in these parts of a state."""
        objects = {name: path for name, path in self.objects.items() if path[0] in roots}
        tensors = {name: one for name, one in self.tensors.items() if one[0][0] in roots}
        return Places(objects, tensors, self.alike)

    def lacking(self, values: Mapping[str, Any]) -> "Places":
        """Return these without the tensors that have their place in the dictionaries of a state."""
        tensors = {name: one for name, one in self.tensors.items() if not has_tensor(values, one[0])}
        return Places(self.objects, tensors, self.alike)

    def gone(self, mappings: Mapping[str, Path], known: Collection[str]) -> list[Path]:
        """Return where a state has something that a checkpoint has not, in what was saved with its paths.

        `mappings`: the state's, as torch's planner makes them. `known`: the names in the checkpoint.
        """
        roots = {path[0] for path in self.objects.values()}
        return [path for name, path in mappings.items() if name not in known and path[0] in roots and len(path) > 1]

    def make(self, flat: Mapping[str, Any], metadata: Metadata) -> list[StatePlace]:
        """Return a place for each; for a tensor that is divided among ranks one like another in `flat`.

        `metadata`: of the checkpoint. `flat`: the tensors of the new state, by name.
        """
        found = [StatePlace(path) for path in self.objects.values()]
        for name, (path, device, group) in self.tensors.items():
            about = metadata.state_dict_metadata.get(name)
            if not isinstance(about, TensorStorageMetadata):
                continue
            size, dtype = about.size, about.properties.dtype
            if group >= 0:
                alike = (flat.get(one) for one in self.alike[group])
                model = next((one for one in alike if isinstance(one, DTensor) and one.shape == size), None)
                if model is not None:
                    found.append(StatePlace(path, partial(torch.empty_like, model.detach(), dtype=dtype)))
            elif any(chunk.sizes == size for chunk in about.chunks):
                found.append(StatePlace(path, partial(torch.empty, size, dtype=dtype, device=_device(device))))
        return found

    def to_json(self) -> list[Any]:
        """Return what `read_places` reads. A path with other keys than text and numbers is left out."""
        objects = {name: path for name, path in self.objects.items() if all(map(is_key, path))}
        return [objects, dict(self.tensors), list(self.alike)]


def read_places(found: Any) -> Places:
    """Return what was in JSON. Raises ValueError that says what cannot be read."""
    try:
        objects, tensors, alike = found
        places = Places(
            {str(name): tuple(path) for name, path in objects.items()},
            {str(name): (tuple(path), str(device), int(group)) for name, (path, device, group) in tensors.items()},
            [[str(name) for name in names] for names in alike],
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"no places: {error!r}"[:500]) from error
    paths = [(name, path, -1) for name, path in places.objects.items()]
    paths += [(name, path, group) for name, (path, _, group) in places.tensors.items()]
    for name, path, group in paths:
        # The first key is the name of a part of the state.
        if not path or not isinstance(path[0], str) or not all(map(is_key, path)) or group >= len(places.alike):
            raise ValueError(f"no place of {name}: {path!r}, group {group}"[:500])
    return places


def merge(of_rank: Sequence[Places]) -> dict[str, Any]:
    """Return what PLACES holds of all ranks; what they say alike stands there once. Empty where no rank says anything.

    A group is known to its rank alone: those of what all have are rank 0's.
    """
    if not any(one.objects or one.tensors for one in of_rank):
        return {}
    common = common_places(of_rank)
    rest = {}
    for rank, one in enumerate(of_rank):
        own_objects = {name: path for name, path in one.objects.items() if name not in common.objects}
        own_tensors = {name: each for name, each in one.tensors.items() if name not in common.tensors}
        if own_objects or own_tensors:
            rest[str(rank)] = Places(own_objects, own_tensors, one.alike if own_tensors else ()).to_json()
    return {"common": common.to_json(), "of_rank": rest, "world_size": len(of_rank)}


@dataclass(frozen=True)
class CheckpointPlaces:
    """What a rank has to know of PLACES."""

    own: Places
    """In another world than that which saved it, what all ranks had."""
    roots: Collection[str]
    """The parts of a state in which any rank has some."""
    of_some: Collection[str]
    """Names that not all ranks had."""


def of_checkpoint(content: bytes, rank: int, world_size: int) -> CheckpointPlaces:
    """Read PLACES. Raises ValueError."""
    try:
        whole = json.loads(content)
        common, rest, saved_by = whole["common"], whole["of_rank"], whole["world_size"]
        each = {str(key): read_places(one) for key, one in {"common": common, **rest}.items()}
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"no places: {error!r}"[:500]) from error
    found = each.pop("common")
    roots = found.roots.union(*(one.roots for one in each.values()))
    of_some = {name for one in each.values() for name in (*one.objects, *one.tensors)}
    own = each.get(str(rank)) if saved_by == world_size else None
    return CheckpointPlaces(found if own is None else _joined(found, own), roots, of_some)


def _joined(first: Places, second: Places) -> Places:
    shift = len(first.alike)
    tensors = {
        name: (path, device, group + shift if group >= 0 else group)
        for name, (path, device, group) in second.tensors.items()
    }
    return Places({**first.objects, **second.objects}, {**first.tensors, **tensors}, [*first.alike, *second.alike])


def common_places(of_each: Sequence[Places]) -> Places:
    """Return what all of these say alike, in the first one's groups."""
    if not of_each:
        return Places()
    first, *others = of_each
    objects = {
        name: path for name, path in first.objects.items() if all(one.objects.get(name) == path for one in others)
    }
    tensors = {
        name: place
        for name, place in first.tensors.items()
        if all(one.tensors.get(name, ())[:2] == place[:2] for one in others)
    }
    return Places(objects, tensors, first.alike if tensors else ())


def is_key(key: object) -> bool:
    """Return whether it is a key of a dictionary, or [number] in a list."""
    return type(key) in (str, int) or (isinstance(key, list) and len(key) == 1 and type(key[0]) is int and key[0] >= 0)


def _device(kind: str) -> str:
    """Return the device for a tensor that was on this kind of one."""
    return kind if kind == "cuda" and torch.cuda.is_available() else "cpu"
