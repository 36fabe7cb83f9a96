"""What this rank has of a state: its tensors, each with its place in the whole, and its other objects."""

import functools
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unbroken.memory.layout import Layout, Shape, make_layout
from unbroken.memory.new_state.lazy_state import makes_places, needs_closure
from unbroken.memory.new_state.naming import why_without_names
from unbroken.memory.new_state.nested import empty, real_path

PATHS = "unbroken.paths"
"""Among the objects of a shard: {name: where it lies in the dictionaries of the state}."""
TENSOR_PATHS = "unbroken.tensor_paths"
"""The same of tensors, but not of models and optimizers, which make their places.

JSON of [{name: [path, device, group]}, groups]: of a DTensor the names of some that are divided alike are in that
group; the group of others is -1.
"""
_MAX_ALIKE = 8


@dataclass(frozen=True)
class Shard:
    """Sources of one save, in the order of the layout's entries."""

    layout: Layout
    sources: tuple[torch.Tensor, ...]
    objects: bytes
    """torch.save of {name: object}, and PATHS."""


class ShardReader:
    """Turns states into shards. It keeps the layout of the last one, and finds out at each save whether it still fits.

    One is for one iteration: what DTensors say of their offsets belongs to it.
    """

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] = ()
        self._layout: Layout | None = None
        self.names: Mapping[str, tuple[Any, ...]] = {}
        """Where each name of the last shard lies in the dictionaries of the state."""
        self._tensor_names: Mapping[str, tuple[Any, ...]] = {}
        self._tensor_paths = ""

    def read(self, state: Mapping[str, Any]) -> Shard:
        """Return the shard of this rank. Raises TypeError that names what cannot be restored from memory."""
        _refuse_other_names(state)
        planner = DefaultSavePlanner()
        values = state_dicts(state)
        _name_all(planner, values)
        flat: dict[str, Any] = planner.state_dict
        self.names = planner.mappings
        tensors = {name: one for name, one in flat.items() if isinstance(one, torch.Tensor)}
        objects = {name: one for name, one in flat.items() if not isinstance(one, torch.Tensor)}
        signature, sources = _signature(tensors)
        # A value may become one of a type that cannot be read again.
        signature += tuple((name, _types_in(one)) for name, one in objects.items())
        is_other = self._layout is None or signature != self._signature
        if self._layout is None or is_other:
            for (name, *_), one in zip(signature, sources, strict=False):
                # torch plans some of these since 2.15 only with an error of its own.
                _plain(name, one)
            plan = planner.create_local_plan()
            self._layout, sources = _lay_out(plan, planner)
            refuse_unreadable(objects)
            _refuse_closures(state)
            for name, one in state.items():
                if not is_stateful(one):
                    _refuse_other_mappings(name, one)
        names = self.names | _add_empty(state, values, flat, objects)
        paths = {
            name: tuple(real_path(values, path))
            for name, path in names.items()
            if name in objects and not isinstance(state[str(path[0])], nn.Module)
        }
        if is_other:
            _refuse_unreadable_keys(paths)
            # Last: what was refused is looked at again.
            self._signature = signature
        more: dict[str, Any] = {PATHS: paths} if paths else {}
        if tensor_paths := self._paths_of_tensors(state, values, tensors, is_other):
            more[TENSOR_PATHS] = tensor_paths
        return Shard(self._layout, sources, _dump({**objects, **more}))

    def _paths_of_tensors(
        self, state: Mapping[str, Any], values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], is_other: bool
    ) -> str:
        """Return TENSOR_PATHS of a state, "" of none. It is made again only where it is another one."""
        roots = {name for name, one in values.items() if isinstance(one, dict | list) and not makes_places(state[name])}
        names = {name: self.names[name] for name in tensors if self.names[name][0] in roots} if roots else {}
        if is_other or names != self._tensor_names:
            self._tensor_names, self._tensor_paths = names, _tell_paths(values, names, tensors)
        return self._tensor_paths


def _tell_paths(
    values: Mapping[str, Any], names: Mapping[str, tuple[Any, ...]], tensors: Mapping[str, torch.Tensor]
) -> str:
    """Return TENSOR_PATHS of these names, "" of none."""
    groups: dict[Any, int] = {}
    alike: list[list[str]] = []
    for name, one in tensors.items() if names else ():
        if isinstance(one, DTensor):
            number = groups.setdefault(_division(one), len(groups))
            alike += [[]] if number == len(alike) else []
            # The first ones are those that a new state has, as a rule: what is trained stands before its optimizer.
            alike[number] += [name] if len(alike[number]) < _MAX_ALIKE else []
    found = {}
    for name, path in names.items():
        keys, one = tuple(real_path(values, path)), tensors[name]
        if all(type(key) in (str, int, list) for key in keys):
            found[name] = (keys, one.device.type, groups[_division(one)] if isinstance(one, DTensor) else -1)
    return json.dumps((found, alike)) if found else ""


def _division(one: DTensor) -> tuple[Any, ...]:
    return (tuple(one.shape), one.placements, one.device_mesh)


def _add_empty(
    state: Mapping[str, Any], values: Mapping[str, Any], flat: Mapping[str, Any], objects: dict[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Add dictionaries without anything to the objects; return their paths by name."""
    own = {name: one for name, one in values.items() if not isinstance(state[name], nn.Module)}
    found = {".".join(path): path for path in empty(own) if ".".join(path) not in flat}
    objects.update({name: {} for name in found})
    return found


def shard_of_plan(plan: SavePlan, planner: SavePlanner) -> Shard:
    """Return the shard that a local plan of torch.distributed.checkpoint describes. Raises TypeError."""
    layout, sources = _lay_out(plan, planner)
    objects = {}
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            data = planner.resolve_data(item)
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"{item.index.fqn}: want its bytes from the planner, got {type(data).__name__}")
            data.seek(0)
            objects[item.index.fqn] = torch.load(data, weights_only=True)
    return Shard(layout, sources, _dump(objects))


def state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint saves of a state: the dictionaries of its stateful objects."""
    return {name: one.state_dict() if is_stateful(one) else one for name, one in state.items()}


def refuse_no_state(what: str, state: object) -> None:
    """Raise TypeError for anything but a dictionary."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{what}: want the state, a dictionary of tensors and of objects with state_dict and load_state_dict, got "
            f"{type(state).__name__}"
        )


def is_stateful(one: object) -> bool:
    """Return whether something has a state dictionary. The protocol's own check takes 60 us, and a tensor has none."""
    return not isinstance(one, torch.Tensor) and isinstance(one, Stateful)


def _signature(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Return what a layout depends on, and this rank's parts."""
    parts: list[Any] = []
    sources: list[torch.Tensor] = []
    first_at: dict[tuple[Any, ...], int] = {}
    for name, tensor in tensors.items():
        where: Any = None
        local = tensor
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
            local = tensor.to_local()
            where = (tuple(tensor.shape), tensor.placements, tuple(coordinate), tuple(tensor.device_mesh.shape))
        local = unwrapped(local.detach())
        alias = first_at.setdefault(_memory_of(local, len(sources)), len(sources))
        parts.append((name, local.dtype, tuple(local.shape), where, alias, type(local), local.layout))
        sources.append(local)
    return tuple(parts), tuple(sources)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that one of a kind of its own is built around, where it has just the values of that one.

    The memory of such a one is nowhere, and what copies it may do anything: torchao's weights for float8 are of this
    kind. One that is built around others, or more of them, is returned as it is.
    """
    flatten = None if type(tensor) is torch.Tensor else getattr(tensor, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    inner = getattr(tensor, names[0]) if len(names) == 1 else None
    if not isinstance(inner, torch.Tensor) or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype):
        return tensor
    return unwrapped(inner.detach())


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values. Of truth values torch would make 0 and 1, whatever the bytes of memory that nobody has filled."""
    if target.dtype is torch.bool and source.dtype is torch.bool:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def _memory_of(tensor: torch.Tensor, index: int) -> tuple[Any, ...]:
    """Return what two tensors share when they are the same memory; something unique for one without memory."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return (index,)
    # The conjugate of a tensor is the same memory with a flag.
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, flags)


def _lay_out(plan: SavePlan, planner: SavePlanner) -> tuple[Layout, tuple[torch.Tensor, ...]]:
    shapes: list[Shape] = []
    sources: list[torch.Tensor] = []
    first_at: dict[tuple[Any, ...], int] = {}
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            continue
        data, about = planner.resolve_data(item), item.tensor_data
        if isinstance(data, DTensor):
            data = data.to_local()
        if isinstance(data, torch.Tensor):
            data = unwrapped(data.detach())
        data = _plain(item.index.fqn, data)
        if about is None:
            raise TypeError(f"{item.index.fqn}: want what torch says of a tensor in its plan, got nothing")
        if tuple(data.shape) != tuple(about.chunk.sizes):
            raise TypeError(f"{item.index.fqn}: want a part of {tuple(about.chunk.sizes)}, got {tuple(data.shape)}")
        alias = first_at.setdefault(_memory_of(data, len(shapes)), len(shapes))
        offsets, sizes = tuple(about.chunk.offsets), tuple(about.chunk.sizes)
        shapes.append(Shape(item.index.fqn, data.dtype, tuple(about.size), offsets, sizes, alias))
        sources.append(data)
    return make_layout(tuple(shapes)), tuple(sources)


def _plain(name: str, one: object) -> torch.Tensor:
    """Return it. Raises TypeError unless its values are its bytes."""
    if not isinstance(one, torch.Tensor) or not _is_plain(one):
        raise TypeError(f"{name}: want a dense tensor with values, or a DTensor, got {_kind(one)}")
    return one


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its values are its bytes. Who copies a quantized tensor into bytes ends the process."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not is_dense or not _can_copy(tensor.dtype):
        return False
    # Of a kind that is built around other tensors: which values it has, only its own code knows.
    if tensor.numel() and tensor.data_ptr() == 0:
        return False
    # Nothing can be copied into one that was expanded.
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@functools.cache
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch copies values of a type. It has some as names alone, such as uint4."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except (NotImplementedError, RuntimeError):  # both are torch's words for a type that its copy does not know
        return False
    return True


def _kind(one: object) -> str:
    name = type(one).__name__
    if isinstance(one, torch.Tensor) and one.layout is torch.strided and 0 in one.stride():
        return f"{name} that was expanded: clone() it"
    return f"{name} of {one.layout}, {one.dtype}, on {one.device}" if isinstance(one, torch.Tensor) else name


def _dump(objects: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(objects), file)
    return file.getvalue()


def _refuse_other_names(state: Mapping[Any, Any]) -> None:
    """Raise TypeError for a name that torch would make another one of, and nobody would find then."""
    for name, one in state.items():
        if not isinstance(name, str) and not isinstance(one, torch.Tensor):
            raise TypeError(f"state: want text as names, got {name!r}, of {type(one).__name__}")


def _name_all(planner: DefaultSavePlanner, values: dict[str, Any]) -> None:
    """Have the planner name all values. Raises TypeError where it cannot."""
    try:
        planner.set_up_planner(values)
    except (RecursionError, ValueError) as error:
        if problem := why_without_names(values, error):
            raise TypeError(problem) from error
        raise


def _refuse_closures(state: Mapping[str, Any]) -> None:
    """Raise TypeError for an optimizer that could not be given its state back: now, and not after the first fault."""
    for name, one in state.items():
        if isinstance(one, Optimizer) and needs_closure(one):
            raise TypeError(
                f"{name}: want an optimizer whose step() needs no closure, got {type(one).__name__}: a new one has no "
                "place for its state; save what you need of it as tensors, and train without it in the state"
            )


def _refuse_other_mappings(name: str, one: object) -> None:
    """Raise TypeError for what torch saves as a dictionary, and is none: a restore would fill another one instead."""
    if isinstance(one, dict | list):
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            _refuse_other_mappings(f"{name}.{key}", value)
    elif isinstance(one, Mapping):
        raise TypeError(
            f"{name}: want a dictionary, into which a checkpoint can be loaded, got {type(one).__name__}: save "
            "dict(...) of it, or an object with state_dict and load_state_dict"
        )


def _types_in(one: object) -> frozenset[type]:
    """Return the types of an object and of all that it contains."""
    parts = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple | set | frozenset) else ()
    return frozenset((type(one),)).union(*map(_types_in, parts))


def _refuse_unreadable_keys(paths: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise TypeError for a key that could be saved, but not loaded again with `weights_only=True`."""
    for name, path in paths.items():
        for key in path:
            if type(key) not in (str, int, list):  # a list names a place in one
                try:
                    torch.load(io.BytesIO(_dump({name: key})), weights_only=True)
                except Exception as error:
                    raise TypeError(
                        f"{name}: want text or numbers as keys, which can be read without running code from a "
                        f"checkpoint, got {type(key).__name__}"
                    ) from error


def refuse_unreadable(objects: Mapping[str, Any]) -> None:
    """Raise TypeError for what could be saved, but not loaded again with `weights_only=True`."""
    if _is_readable(objects):
        return
    for name, one in objects.items():
        if _is_readable({name: one}):
            continue
        if isinstance(one, dict):
            # Names what is in it, if that can be named.
            refuse_unreadable({f"{name}.{key}": value for key, value in one.items()})
        kinds = ", ".join(sorted(_unreadable_types(one)))[:300] or type(one).__name__
        within = "" if type(one).__name__ == kinds.rpartition(".")[2] else f" within {type(one).__name__}"
        # torch's own words, of two ways to run the code, are for who loads a file of somebody else.
        raise TypeError(
            f"{name}: want tensors, numbers, text, lists and dictionaries, which can be read without running code from "
            f"a checkpoint, got {kinds}{within}: save it as one of these, and make it again after load"
        )


def _is_readable(one: object) -> bool:
    try:
        torch.load(io.BytesIO(_dump({"": one})), weights_only=True)
    except Exception:  # What is pickled may raise anything.
        return False
    return True


def _unreadable_types(one: object) -> set[str]:
    """Return the types of what cannot be read, of all that an object contains."""
    parts = list(one.values()) if isinstance(one, dict) else one
    if isinstance(parts, list | tuple | set | frozenset):
        return set().union(*map(_unreadable_types, parts))
    if _is_readable(one):
        return set()
    kind = type(one)
    return {kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"}
