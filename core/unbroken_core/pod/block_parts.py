"""Parts of the blocks of a slot: what a world of another size wants of them, and their digests all the same.

    block    | gap | piece | gap |   piece   | gap |        one digest, the owner's
    sent         4 B  bytes   4 B     bytes     4 B         of a gap its CRC-32 alone

The CRC-32 of what lies one behind the other follows from those of the parts. So a wrong bit in a piece is found by the
digest that the owner's keeper took of the whole block, though most of it was never sent.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from unbroken_core.pod.memory_slots import BLOCK_BYTES

Pieces = tuple[tuple[int, int], ...]
"""(first byte, byte behind the last) of what is wanted of a block, ascending, with gaps between them."""
Part = tuple[int, Pieces, tuple[int, ...]]
"""A block of which only pieces are here: its number, the pieces, and the CRC-32 of each gap, in order."""
_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the powers of x in reverse: 1 is its highest bit."""
_ONE = 1 << 31


def pieces_of(ranges: Iterable[tuple[int, int]], content_bytes: int, least_gap: int = 1) -> dict[int, Pieces]:
    """Return what ranges (start, length) of the content want of each block that they touch.

    A gap of less than `least_gap` bytes is wanted, too.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    within = (
        (start, min(start + length, content_bytes)) for start, length in ranges if length > 0 and start < content_bytes
    )
    for start, end in _joined(within, least_gap):
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            base, size = block * BLOCK_BYTES, block_size(block, content_bytes)
            first, last = max(start - base, 0), min(end - base, size)
            # What is left at the ends of a block is a gap as well.
            first, last = 0 if first < least_gap else first, size if size - last < least_gap else last
            found.setdefault(block, []).append((first, last))
    return {block: tuple(_joined(pieces, least_gap)) for block, pieces in found.items()}


def ranges_of(pieces: Mapping[int, Pieces]) -> list[tuple[int, int]]:
    """Return pieces of blocks as ranges (start, length) of the content."""
    ends = (
        (block * BLOCK_BYTES + first, block * BLOCK_BYTES + last)
        for block, found in pieces.items()
        for first, last in found
    )
    return [(start, end - start) for start, end in _joined(ends, 1)]


def block_size(block: int, content_bytes: int) -> int:
    """Return how many bytes a block has: the last one has fewer than the others."""
    return max(min(BLOCK_BYTES, content_bytes - block * BLOCK_BYTES), 0)


def gaps_of(pieces: Pieces, size: int) -> list[tuple[int, int]]:
    """Return what of a block of this size is in none of the pieces, as they are given."""
    ends = [0, *(last for _first, last in pieces)]
    starts = [*(first for first, _last in pieces), size]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def is_in(pieces: Pieces, others: Pieces) -> bool:
    """Return whether all of these pieces lie within the others."""
    return all(any(start <= first and last <= end for start, end in others) for first, last in pieces)


def joined(pieces: Pieces, others: Pieces) -> Pieces:
    """Return the pieces that hold both."""
    return tuple(_joined((*pieces, *others), 1))


def checksum_of_parts(pieces: Pieces, gaps: Sequence[int], size: int, checksum: Callable[[int, int], int]) -> int:
    """Return the CRC-32 of a whole block. `checksum` computes that of a piece; `gaps` has those of the gaps."""
    of_gaps = dict(zip(gaps_of(pieces, size), gaps, strict=True))
    found = 0
    for first, last in sorted([*pieces, *of_gaps]):
        one = of_gaps[first, last] if (first, last) in of_gaps else checksum(first, last)
        found = (_product(found, _shift(last - first)) if found else 0) ^ one
    return found


def _joined(pieces: Iterable[tuple[int, int]], least_gap: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if found and first - found[-1][1] < least_gap:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo that of CRC-32."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@functools.cache
def _power(exponent: int, times: int = 1) -> int:
    """Return x to the power of 2 to the power of this exponent, so many times multiplied with itself."""
    if times > 1:
        return _product(_power(exponent, times - 1), _power(exponent))
    return _ONE >> 1 if exponent == 0 else _product(_power(exponent - 1), _power(exponent - 1))


@functools.lru_cache(4096)
def _shift(num_bytes: int) -> int:
    """Return what a CRC-32 is multiplied with where so many bytes follow: x to the power of their bits."""
    found, exponent = _ONE, 3
    while num_bytes:
        times = num_bytes & 15
        if times:
            power = _power(exponent, times)
            found = power if found == _ONE else _product(found, power)
        num_bytes >>= 4
        exponent += 4
    return found
