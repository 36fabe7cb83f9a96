"""A digest of each value of a shard. Equal values have equal digests, wherever they lie and whoever made them."""

import base64
import ctypes
import hashlib
import io
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unbroken.checkpoint_records import DIGEST_CHARACTERS, MAX_NAME, MAX_NAMES
from unbroken.memory.shard import TENSOR_PATHS, Shard

_MAX_DEPTH = 100
_MAX_KEYS = 2000
"""Of one text; one with more is one value."""
_ITEMS = "[]"
_SAVED = "UEsDB"
"""How the base64 of a file of torch begins; integrations keep such texts."""


def digests_of(shard: Shard) -> tuple[tuple[str, ...], int, int, str]:
    """Return the names of a shard's values, how many are of floats, how many tensors, and their digests in a row."""
    floats: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for entry, tensor in zip(shard.layout.entries, shard.sources, strict=True):
        digest = _new(f"{entry.dtype} {tuple(entry.size)} {tuple(entry.offsets)} {tuple(entry.sizes)}")
        _add_bytes(digest, tensor)
        is_float = tensor.is_floating_point() or tensor.is_complex()
        (floats if is_float else others).append((entry.name, digest.hexdigest()))
    found = floats + others
    num_tensors = len(found)
    objects = torch.load(io.BytesIO(shard.objects), weights_only=True)
    # Says where the tensors lie, and nothing of what was trained.
    objects.pop(TENSOR_PATHS, None)
    for name, value in sorted(objects.items()):
        found += _digests_of_object(str(name), value)
    if len(found) > MAX_NAMES:
        digest = _new("more")
        for name, each in found[MAX_NAMES:]:
            digest.update(f"{name}\0{each}\0".encode(errors="backslashreplace"))
        found = [*found[:MAX_NAMES], (f"({len(found) - MAX_NAMES} more)", digest.hexdigest())]
    # What lies beyond counts as what it most likely is.
    num_floats, num_tensors = (len(found) if each > MAX_NAMES else each for each in (len(floats), num_tensors))
    return tuple(_short(name) for name, _ in found), num_floats, num_tensors, "".join(each for _, each in found)


def _digests_of_object(name: str, value: Any) -> list[tuple[str, str]]:
    """Return digests of a value; of a text that is JSON, of each key in it: one time of day must not hide the rest."""
    leaves = list(_leaves("", value, 0)) if isinstance(value, str) else [("", value)]
    if len({path for path, _ in leaves}) > _MAX_KEYS:
        leaves = [("", value)]
    digests: dict[str, hashlib.blake2b] = {}
    for at, (path, leaf) in enumerate(leaves):
        digest = digests.setdefault(path, _new("value"))
        digest.update(b"%d" % at if _ITEMS in path else b"")
        for part in _parts(leaf, 0):
            digest.update(part)
    return [(name + path, digest.hexdigest()) for path, digest in sorted(digests.items())]


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield what stands in a text with its path; the items of a list have one: they come and go, and are many."""
    if isinstance(value, str):
        value = _content(value)
    if isinstance(value, dict) and value and depth < _MAX_DEPTH:
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}", each, depth + 1)
    elif isinstance(value, list | tuple) and value and depth < _MAX_DEPTH:
        for each in value:
            yield from _leaves(path + _ITEMS, each, depth + 1)
    else:
        yield path, value


def _content(text: str) -> Any:
    """Return what a text holds: JSON, or what torch.save wrote, as base64; itself if neither."""
    try:
        if text.startswith(("{", "[")):
            return json.loads(text)
        if text.startswith(_SAVED):
            return torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True, map_location="cpu")
    except Exception:  # Whatever torch says of it: it is a text then.
        return text
    return text


def _short(name: str) -> str:
    name = name.encode(errors="backslashreplace").decode()
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 20]}...{_new(name).hexdigest()}"


def _new(text: str) -> "hashlib.blake2b":
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=DIGEST_CHARACTERS // 2)


def _add_bytes(digest: "hashlib.blake2b", tensor: torch.Tensor) -> None:
    """Add the bytes of a tensor. Neither bfloat16 nor a machine without numpy has another way to them."""
    local = tensor.detach().to("cpu").contiguous()
    if num_bytes := local.numel() * local.element_size():
        digest.update((ctypes.c_char * num_bytes).from_address(local.data_ptr()))


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """Yield bytes that depend on what a value is, and not on which objects it shares or in which order it was made.

    A pickle does depend on these: one that was read from a checkpoint has other bytes than the one that was saved.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"want at most {_MAX_DEPTH} dictionaries and lists in each other")
    if isinstance(value, torch.Tensor):
        yield f"t{value.dtype}{tuple(value.shape)}".encode()
        digest = _new("")
        _add_bytes(digest, value)
        yield digest.digest()
    elif isinstance(value, Mapping):
        yield b"m%d:" % len(value)
        for key in sorted(value, key=lambda one: b"".join(_parts(one, depth + 1))):
            yield from _parts(key, depth + 1)
            yield from _parts(value[key], depth + 1)
    elif isinstance(value, set | frozenset):
        yield b"s%d:" % len(value)
        yield from sorted(b"".join(_parts(one, depth + 1)) for one in value)
    elif isinstance(value, list | tuple):
        yield b"l%d:" % len(value)
        for one in value:
            yield from _parts(one, depth + 1)
    else:
        yield from _plain(value)


def _plain(value: Any) -> Iterator[bytes]:
    if isinstance(value, float):
        yield b"f" + struct.pack("<d", value)
    elif isinstance(value, bytes | bytearray):
        yield b"b%d:" % len(value)
        yield bytes(value)
    elif isinstance(value, str):
        text = value.encode(errors="backslashreplace")
        yield b"u%d:" % len(text)
        yield text
    elif value is None or isinstance(value, int | complex | torch.dtype | torch.device | torch.layout):
        yield f"{type(value).__name__}{value!r};".encode()
    else:
        yield f"{type(value).__qualname__}:{value!r};".encode(errors="backslashreplace")
