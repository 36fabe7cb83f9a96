"""Pieces of blocks have the digest of the whole block, whatever was left out between them."""

import random
import zlib

import pytest

from unbroken_core.pod.block_parts import block_size, checksum_of_parts, gaps_of, is_in, joined, pieces_of, ranges_of
from unbroken_core.pod.memory_slots import BLOCK_BYTES

CONTENT = random.Random(5).randbytes(3 * BLOCK_BYTES + 12_345)
SIZE = len(CONTENT)


def checksum_from(content: bytes, block: int, pieces: tuple[tuple[int, int], ...]) -> int:
    """Return the digest of a block of which the gaps are as they were, and the pieces are of this content."""
    base, size = block * BLOCK_BYTES, block_size(block, SIZE)
    gaps = [zlib.crc32(CONTENT[base + first : base + last]) for first, last in gaps_of(pieces, size)]
    return checksum_of_parts(pieces, gaps, size, lambda first, last: zlib.crc32(content[base + first : base + last]))


def some_ranges(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.randrange(SIZE) for _number in range(rng.randint(1, 6))]
    return [(start, rng.randint(0, min(SIZE - start, 10 ** rng.randint(1, 6)))) for start in starts]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_and_the_digests_of_gaps_give_the_digest_of_the_block(seed: int) -> None:
    rng = random.Random(seed)
    ranges, least_gap = some_ranges(rng), rng.choice([1, 4096])
    for block, pieces in pieces_of(ranges, SIZE, least_gap).items():
        base, size = block * BLOCK_BYTES, block_size(block, SIZE)
        assert checksum_from(CONTENT, block, pieces) == zlib.crc32(CONTENT[base : base + size])


@pytest.mark.parametrize("seed", range(40))
def test_a_wrong_bit_of_a_piece_is_found(seed: int) -> None:
    rng = random.Random(seed)
    ranges = [(start, length) for start, length in some_ranges(rng) if length]
    start, length = rng.choice([*ranges, (7, 1)])
    wrong, at = bytearray(CONTENT), start + rng.randrange(length)
    wrong[at] ^= 1 << rng.randrange(8)
    block = at // BLOCK_BYTES
    pieces = pieces_of([*ranges, (start, length)], SIZE)[block]
    base = block * BLOCK_BYTES
    assert checksum_from(bytes(wrong), block, pieces) != zlib.crc32(CONTENT[base : base + block_size(block, SIZE)])


@pytest.mark.parametrize("seed", range(40))
def test_pieces_hold_each_byte_that_is_wanted_and_no_other_one(seed: int) -> None:
    ranges = some_ranges(random.Random(seed))
    wanted = {at for start, length in ranges for at in range(start, start + length)}
    pieces = pieces_of(ranges, SIZE)
    found = {
        block * BLOCK_BYTES + at for block, ends in pieces.items() for first, last in ends for at in range(first, last)
    }
    assert found == wanted
    # As ranges they are the same pieces for whoever is asked for them.
    assert pieces_of(ranges_of(pieces), SIZE) == pieces
    assert list(pieces) == sorted(pieces)


def test_small_gaps_are_wanted_too_and_a_block_without_gaps_is_whole() -> None:
    assert pieces_of([(0, 100), (150, 50)], SIZE, 51) == {0: ((0, 200),)}
    assert pieces_of([(0, 100), (150, 50)], SIZE, 50) == {0: ((0, 100), (150, 200))}
    assert pieces_of([(40, BLOCK_BYTES)], SIZE, 41) == {0: ((0, BLOCK_BYTES),), 1: ((0, 40),)}
    assert pieces_of([(0, SIZE)], SIZE)[3] == ((0, 12_345),)


@pytest.mark.parametrize("ranges", [[(SIZE, 1)], [(SIZE + 5, 10)], [(0, 0)], []])
def test_what_is_behind_the_content_is_in_no_block(ranges: list[tuple[int, int]]) -> None:
    assert pieces_of(ranges, SIZE) == {}


def test_pieces_that_come_later_are_joined_with_those_that_are_here() -> None:
    assert joined(((0, 10), (20, 30)), ((10, 12), (40, 50))) == ((0, 12), (20, 30), (40, 50))
    assert is_in(((2, 5), (20, 30)), ((0, 10), (20, 30)))
    assert not is_in(((9, 11),), ((0, 10), (10, 30)))
    assert not is_in(((0, 1),), ())
