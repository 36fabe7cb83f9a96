"""Where each tensor of a shard lies in a slot. Written as JSON, so that any worker can read any other's."""

import hashlib
import json
from dataclasses import dataclass

import torch

from unbroken_core.pod.memory_slots import DIGEST_BYTES
from unbroken_core.vocabulary.errors import WireError

MAX_LAYOUT_BYTES = 256 << 20
_ALIGNMENT = 64
_PAGE_BYTES = 4096
_DTYPES: dict[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}


@dataclass(frozen=True)
class Shape:
    """One tensor of a shard, before it has a place."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    """Of the whole tensor, over all ranks."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the part that this rank has."""
    alias_of: int
    """Index of the first tensor with the very same memory: its own unless weights are tied."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard in a slot."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Bytes from the start of the content."""

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return _product(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All of a shard but its objects, which come last."""

    entries: tuple[Entry, ...]
    text: bytes
    digest: bytes
    objects_offset: int


def make_layout(shapes: tuple[Shape, ...]) -> Layout:
    """Place tensors one after the other; tied weights share a place."""
    starts: list[int] = []
    at = 0
    for index, shape in enumerate(shapes):
        if shape.alias_of < index:
            starts.append(starts[shape.alias_of])
            continue
        starts.append(at)
        at += -(-_product(shape.sizes) * shape.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    relative = [
        [one.name, str(one.dtype).removeprefix("torch."), one.size, one.offsets, one.sizes, start]
        for one, start in zip(shapes, starts, strict=True)
    ]
    text = json.dumps(relative, separators=(",", ":")).encode()
    first = -(-len(text) // _PAGE_BYTES) * _PAGE_BYTES
    entries = tuple(
        Entry(one.name, one.dtype, one.size, one.offsets, one.sizes, first + start)
        for one, start in zip(shapes, starts, strict=True)
    )
    return _kept(Layout(entries, text, hashlib.sha256(text).digest()[:DIGEST_BYTES], first + at))


def read_layout(text: bytes, objects_offset: int) -> Layout:
    """Read a layout that a worker has written, most often this one. Raises WireError."""
    newest = _newest[0] if _newest else None
    if newest is not None and (newest.text, newest.objects_offset) == (text, objects_offset):
        return newest
    try:
        if len(text) > MAX_LAYOUT_BYTES:
            raise ValueError(f"{len(text)} bytes")
        first = -(-len(text) // _PAGE_BYTES) * _PAGE_BYTES
        entries = tuple(_read_entry(one, first, objects_offset) for one in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"layout: want a list of tensors, got {error!r}"[:500]) from None
    return _kept(Layout(entries, text, hashlib.sha256(text).digest()[:DIGEST_BYTES], objects_offset))


_newest: list[Layout] = []
"""The layout that this process has made or read last: what it restores after a fault has the same."""


def _kept(layout: Layout) -> Layout:
    _newest[:] = [layout]
    return layout


def _read_entry(data: object, first: int, end: int) -> Entry:
    if not isinstance(data, list) or len(data) != 6 or not isinstance(data[0], str):
        raise ValueError("an entry without its six parts")
    name, dtype, size, offsets, sizes, start = data
    entry = Entry(name, _DTYPES[dtype], _sizes(size), _sizes(offsets), _sizes(sizes), first + start)
    is_inside = all(
        at + length <= whole for whole, at, length in zip(entry.size, entry.offsets, entry.sizes, strict=True)
    )
    if not isinstance(start, int) or start < 0 or entry.start + entry.num_bytes > end or not is_inside:
        raise ValueError(f"{name[:100]} lies outside")
    return entry


def _sizes(data: object) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > 64 or not all(type(one) is int and 0 <= one < 1 << 50 for one in data):
        raise ValueError("a size that is none")
    return tuple(data)


def _product(sizes: tuple[int, ...]) -> int:
    number = 1
    for size in sizes:
        number *= size
    return number
