"""Content of a slot compared with the CRC-32 of its blocks, as fast as memory is read.

zlib computes 3 to 6 GB/s, and a copy moves more. But CRC-32 is linear: that of the XOR of some blocks follows from
theirs. So torch folds up to 64 blocks into one, with as many threads as the user lets it have, and zlib reads that one.
A wrong bit changes the folded block, and CRC-32 finds it there as it would in its own block, unless the same bit is
wrong at the same place of another block of the same 64. See BLOCK_BYTES for why no kind of error makes such pairs.
"""

import ctypes
import functools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from unbroken_core.pod.memory_slots import BLOCK_BYTES

_GROUP_BLOCKS = 64


def wrong_blocks(content: torch.Tensor, blocks: Iterable[int], checksums: Sequence[int]) -> list[int]:
    """Return those of the blocks that differ from their checksum, or lie outside of the content, a tensor of bytes."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for block in sorted(set(blocks)):
        # Neighbours only: pairs that are farther apart may be a whole number of pages apart.
        groups[block // _GROUP_BLOCKS].append(block)
    return [block for group in groups.values() for block in _wrong_of(content, group, checksums)]


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor in this process' memory."""
    num_bytes = tensor.numel() * tensor.element_size()
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())) if num_bytes else 0


def _wrong_of(content: torch.Tensor, group: list[int], checksums: Sequence[int]) -> list[int]:
    """Return the wrong ones of some blocks of one group."""
    whole = [block for block in group if (block + 1) * BLOCK_BYTES <= content.numel() and block < len(checksums)]
    if len(whole) > 1 and checksum(_fold(content, whole)) == _folded_checksum([checksums[block] for block in whole]):
        group = [block for block in group if block not in whole]
    return [block for block in group if not _is_right(content, block, checksums)]


def _is_right(content: torch.Tensor, block: int, checksums: Sequence[int]) -> bool:
    part = content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
    return part.numel() > 0 and block < len(checksums) and checksum(part) == checksums[block]


def _fold(content: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """Return the XOR of two or more whole blocks."""
    first, second, *others = (
        content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].view(torch.int64) for block in blocks
    )
    folded = torch.bitwise_xor(first, second)
    for other in others:
        torch.bitwise_xor(folded, other, out=folded)
    return folded


def _folded_checksum(checksums: list[int]) -> int:
    """Return the CRC-32 of the XOR of whole blocks."""
    # It starts and ends with an inversion: crc(a ^ b) == crc(a) ^ crc(b) ^ crc(0).
    start = 0 if len(checksums) % 2 else _checksum_of_zeros()
    return functools.reduce(int.__xor__, checksums, start)


@functools.cache
def _checksum_of_zeros() -> int:
    return zlib.crc32(bytes(BLOCK_BYTES))
