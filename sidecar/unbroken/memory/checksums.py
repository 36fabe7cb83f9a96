"""Content of a slot compared with the CRC-32 of its blocks, as fast as memory is read.

zlib computes 3 to 6 GB/s, and a copy moves more. But CRC-32 is linear: that of the XOR of some blocks follows from
theirs. So torch folds up to 64 blocks into one, with as many threads as the user lets it have, and zlib reads that one.
A wrong bit changes the folded block, and CRC-32 finds it there as it would in its own block, unless the same bit is
wrong at the same place of another block of the same 64. See BLOCK_BYTES for why no kind of error makes such pairs.

A load waits for this, and does nothing else meanwhile. So other threads may look at groups, too.
"""

import ctypes
import functools
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from unbroken_core.pod.memory_slots import BLOCK_BYTES

_GROUP_BLOCKS = 64


def wrong_blocks(
    content: torch.Tensor, blocks: Iterable[int], checksums: Sequence[int], num_threads: int = 1
) -> list[int]:
    """Return those of the blocks that differ from their checksum, or lie outside of the content, a tensor of bytes.

    `num_threads`: how many look, each with as many threads of torch as this one.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for block in sorted(set(blocks)):
        # Neighbours only: pairs that are farther apart may be a whole number of pages apart.
        groups[block // _GROUP_BLOCKS].append(block)
    # The last ones first: what is copied next begins with the first ones, which are still in the processor's cache.
    looks = [
        functools.partial(_wrong_of, content, groups[number], checksums) for number in sorted(groups, reverse=True)
    ]
    return sorted(block for found in _in_threads(looks, min(num_threads, len(looks))) for block in found)


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor in this process' memory."""
    num_bytes = tensor.numel() * tensor.element_size()
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())) if num_bytes else 0


def _in_threads(looks: Sequence[Callable[[], list[int]]], num_threads: int) -> list[list[int]]:
    """Return what each of them finds. This thread is one of those that look, and waits for no other one for long."""
    found: dict[int, list[int]] = {}
    left = deque(range(len(looks)))
    changed = threading.Condition()

    def look() -> float:
        """Look while something is left; return the seconds that the slowest has taken."""
        longest_s = 0.0
        while left:
            try:
                index = left.popleft()
            except IndexError:
                break
            began_s = time.monotonic()
            result = looks[index]()
            with changed:
                found[index] = result
                changed.notify()
            longest_s = max(longest_s, time.monotonic() - began_s)
        return longest_s

    def help_out() -> None:
        try:
            look()
        except Exception:
            # Whoever has asked looks again, and is told.
            left.clear()

    for _ in range(num_threads - 1):
        try:
            # No daemon: one that is within torch when the interpreter ends would abort the process.
            threading.Thread(target=help_out, name="unbroken-digests", daemon=False).start()
        except RuntimeError:
            break  # The limit on processes of the pod.
    try:
        longest_s = look()
    finally:
        left.clear()
    with changed:
        changed.wait_for(lambda: len(found) == len(looks), longest_s)
    # A thread that has no processor would delay all ranks: what it has begun is done again.
    return [found[index] if index in found else looks[index]() for index in range(len(looks))]


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
    """Return the XOR of two or more whole blocks, which ascend."""
    first, last = blocks[0], blocks[-1]
    words = content[first * BLOCK_BYTES : (last + 1) * BLOCK_BYTES].view(torch.int64)
    rows = words.view(last + 1 - first, -1).unbind()
    if len(rows) > len(blocks):
        rows = tuple(rows[block - first] for block in blocks)
    folded = torch.bitwise_xor(rows[0], rows[1])
    for other in rows[2:]:
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
