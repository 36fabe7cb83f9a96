"""What ranks of a smaller world fetch of the shards of a larger one: the ranges that they need, and little more."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unbroken.keeper.fetching import _MOST_PIECES
from unbroken.memory.layout import Layout, Shape, make_layout
from unbroken.memory.reading import Contents
from unbroken.memory.remote import _LEAST_GAP
from unbroken_core.pod.block_parts import pieces_of
from unbroken_core.pod.memory_slots import BLOCK_BYTES

COLUMNS = 4096
ROW_BYTES = COLUMNS * 4


class AskedSource:
    """A shard of another pod, of which it is noted what is asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.objects: dict[str, Any] = {}
        self.asked: list[tuple[int, int]] = []

    def verify(self, ranges: Any) -> None:
        self.asked += ranges


def rows_of(rank: int, world_size: int, rows: int) -> tuple[int, int]:
    """Return the rows (first, number) of a rank, as FSDP2 and DTensor split them."""
    part = -(-rows // world_size)
    first = min(rank * part, rows)
    return first, min(part, rows - first)


def shard(rank: int, world_size: int, rows: list[int]) -> Layout:
    """Return where a rank's part of each tensor lies."""
    places = [rows_of(rank, world_size, number) for number in rows]
    shapes = [
        Shape(f"w{index}", torch.float32, (number, COLUMNS), (first, 0), (count, COLUMNS), index)
        for index, (number, (first, count)) in enumerate(zip(rows, places, strict=True))
        if count
    ]
    return make_layout(tuple(shapes))


def shrink(old: int, rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield bytes that are needed, bytes that are fetched, and ranges, for each rank of one rank less."""
    new = old - 1
    for rank in range(new):
        sources = [AskedSource(shard(other, old, rows)) for other in range(old)]
        found: list[Any] = list(sources)
        contents = Contents(found)
        items = []
        for index, number in enumerate(rows):
            first, count = rows_of(rank, new, number)
            wanted = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, COLUMNS)))
            metadata: Any = contents.metadata.state_dict_metadata[f"w{index}"]
            items += create_read_items_for_chunk_list(f"w{index}", metadata, [wanted])
        contents.verify(LoadPlan(items))
        needed = sum(item.lengths.numel() * 4 for item in items)
        fetched = sum(fetched_bytes(source.asked, source.layout.objects_offset) for source in sources)
        yield needed, fetched, sum(len(source.asked) for source in sources)


def fetched_bytes(asked: list[tuple[int, int]], content_bytes: int) -> int:
    """Return how much comes: of a block that is to be in too many pieces, all."""
    pieces = pieces_of(asked, content_bytes, _LEAST_GAP)
    return sum(
        BLOCK_BYTES if len(found) > _MOST_PIECES else sum(last - first for first, last in found)
        for found in pieces.values()
    )


@pytest.mark.parametrize("old", [2, 3, 8, 17])
def test_a_rank_of_a_smaller_world_needs_all_of_its_rows_and_fetches_little_more(old: int) -> None:
    rows = [old * 40 + 7, old * 131, old * 300 + 1]
    for rank, (needed, fetched, num_ranges) in enumerate(shrink(old, rows)):
        assert needed == sum(rows_of(rank, old - 1, number)[1] for number in rows) * ROW_BYTES
        assert needed <= fetched < needed + 2 * _LEAST_GAP * num_ranges


@pytest.mark.parametrize("old", [2, 3, 8])
@pytest.mark.parametrize("mib", [0.5, 1, 4, 16, 256])
def test_a_smaller_world_fetches_at_most_a_twentieth_more_than_it_needs(old: int, mib: float) -> None:
    """So much of each of ten tensors is a rank's part; of blocks of 1 MiB, ranks fetched 1.9 times what they needed."""
    rows = [old * int(mib * (1 << 20)) // ROW_BYTES] * 10
    found = list(shrink(old, rows))
    needed, fetched = sum(one[0] for one in found), sum(one[1] for one in found)
    assert needed == sum(rows) * ROW_BYTES
    assert fetched <= 1.05 * needed
    assert max(one[1] / one[0] for one in found) <= 1.05
