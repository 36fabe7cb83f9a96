"""The states of all random number generators of a process, as one tensor of a constant size.

A tensor, so that a checkpoint in memory takes it without a pickle. What it restores belongs to one rank: in a world of
another size, or on another rank, the generators get new seeds, the same each time.
"""

import hashlib
import random
import struct
import sys
from typing import Any

import torch

_HEAD = struct.Struct("<4sqq")
_PYTHON = struct.Struct("<625Ibd")
_NUMPY = struct.Struct("<b624IIbd")
_MAGIC = b"rng1"


def capture(rank: int, world_size: int) -> torch.Tensor:
    """Return the state of Python's, NumPy's and torch's generators, and that of a CUDA device in use."""
    _, words, gauss = random.getstate()
    parts = [
        _HEAD.pack(_MAGIC, rank, world_size),
        _PYTHON.pack(*words, gauss is not None, gauss or 0.0),
        _numpy_state(),
    ]
    tensors = [torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), torch.get_rng_state()]
    if torch.cuda.is_initialized():
        tensors.append(torch.cuda.get_rng_state())
    return torch.cat(tensors)


def restore(state: torch.Tensor, rank: int, world_size: int, seed: int) -> bool:
    """Set the generators as they were captured on this rank; return False after new seeds, made of `seed` and rank.

    Raises ValueError for what is no state of random numbers.
    """
    size = _HEAD.size + _PYTHON.size + _NUMPY.size
    data, of_rank, of_world_size = _read(state, size)
    if (of_rank, of_world_size) != (rank, world_size):
        _seed(seed, rank, world_size)
        return False
    *words, has_gauss, gauss = _PYTHON.unpack_from(data, _HEAD.size)
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    is_there, *numbers = _NUMPY.unpack_from(data, _HEAD.size + _PYTHON.size)
    if is_there and (numpy := _numpy()) is not None:
        numpy.random.set_state(("MT19937", numbers[:624], *numbers[624:]))
    cpu = torch.get_rng_state().numel()
    torch.set_rng_state(state[size : size + cpu].clone())
    if state.numel() > size + cpu:
        torch.cuda.set_rng_state(state[size + cpu :].clone())
    return True


def world_size_of(state: torch.Tensor) -> int:
    """Return how many ranks the world had in which this was captured. Raises ValueError as `restore` does."""
    return _read(state, _HEAD.size + _PYTHON.size + _NUMPY.size)[2]


def _read(state: torch.Tensor, size: int) -> tuple[bytes, int, int]:
    data = bytes(state[:size].tolist())
    if len(data) != size or not data.startswith(_MAGIC):
        raise ValueError(f"random numbers: want a state of at least {size} bytes, got {state.numel()}")
    _, rank, world_size = _HEAD.unpack_from(data)
    return data, rank, world_size


def _seed(seed: int, rank: int, world_size: int) -> None:
    digest = hashlib.sha256(f"{seed} {rank} {world_size}".encode()).digest()
    number = int.from_bytes(digest[:4], "big")
    random.seed(number)
    torch.manual_seed(number)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(number)


def _numpy() -> Any:
    """NumPy, where the script has loaded it."""
    return sys.modules.get("numpy")


def _numpy_state() -> bytes:
    numpy = _numpy()
    if numpy is None:
        return bytes(_NUMPY.size)
    kind, words, position, has_gauss, gauss = numpy.random.get_state()
    # Another generator may have been put in its place.
    return _NUMPY.pack(1, *words.tolist(), position, has_gauss, gauss) if kind == "MT19937" else bytes(_NUMPY.size)
