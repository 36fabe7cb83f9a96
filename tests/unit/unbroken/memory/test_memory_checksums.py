"""Blocks compared with their CRC-32 in groups: the same answer as one by one, and no kind of error that cancels out."""

import random
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.waiting import LIMIT_S

from unbroken.memory import checksums as checksums_module
from unbroken.memory.checksums import checksum, wrong_blocks
from unbroken_core.pod.memory_slots import BLOCK_BYTES, num_blocks

NUM_BLOCKS = 70
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def sealed() -> tuple[torch.Tensor, list[int]]:
    """Content with blocks of two groups and a part of a block, and its checksums."""
    data = random.Random(7).randbytes(NUM_BLOCKS * BLOCK_BYTES - 1000)
    checksums = [zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), checksums


@pytest.fixture
def content(sealed: tuple[torch.Tensor, list[int]]) -> Iterator[torch.Tensor]:
    """The content, to be spoilt; it is whole again afterwards."""
    whole = sealed[0].clone()
    yield sealed[0]
    sealed[0].copy_(whole)


@pytest.fixture
def checksums(sealed: tuple[torch.Tensor, list[int]]) -> list[int]:
    """What the keeper has found."""
    return sealed[1]


@pytest.mark.parametrize(
    "blocks",
    [range(0), range(1), range(2), range(3), range(64), range(65), range(NUM_BLOCKS), (0, 5, 66), (69,)],
    ids=str,
)
def test_what_was_sealed_is_right(content: torch.Tensor, checksums: list[int], blocks: range) -> None:
    assert wrong_blocks(content, blocks, checksums) == []


def test_each_single_flipped_bit_is_found_in_its_block(content: torch.Tensor, checksums: list[int]) -> None:
    chance = random.Random(3)
    edges = [0, BLOCK_BYTES - 1, BLOCK_BYTES, 64 * BLOCK_BYTES - 1, 64 * BLOCK_BYTES, content.numel() - 1]
    for at in edges + [chance.randrange(content.numel()) for _ in range(3)]:
        bit = 1 << chance.randrange(8)
        content[at] ^= bit
        assert wrong_blocks(content, range(NUM_BLOCKS), checksums) == [at // BLOCK_BYTES]
        content[at] ^= bit
    assert wrong_blocks(content, range(NUM_BLOCKS), checksums) == []


def flip(content: torch.Tensor, *places: int) -> None:
    """Flip one bit at each place."""
    for at in places:
        content[at] ^= 4


def spoil(how: str, content: torch.Tensor) -> None:
    """Spoil it as a broken memory or program does."""
    start = 5 * PAGE_BYTES + 17
    match how:
        case "same bit, one page on":
            flip(content, start, start + PAGE_BYTES)
        case "same bit, one MiB on":
            flip(content, start, start + (1 << 20))
        case "same bit at each multiple of 4 MiB":
            flip(content, *range(start, 64 * BLOCK_BYTES, 4 << 20))
        case "same bit in each page of 64 MiB":
            content[: 16384 * PAGE_BYTES].view(-1, PAGE_BYTES)[:, 77] ^= 4
        case "zeros for 2 MiB":
            content[start : start + (2 << 20)] = 0
        case "zeros for two blocks' length":
            content[BLOCK_BYTES : 3 * BLOCK_BYTES] = 0
        case "two pages changed places":
            pages = content[: 4 * PAGE_BYTES].view(-1, PAGE_BYTES)
            pages[[0, 3]] = pages[[3, 0]]
        case "another time from the middle on":
            content[content.numel() // 2 :] += 1
        case _:
            raise ValueError(how)


@pytest.mark.parametrize(
    "how",
    [
        "same bit, one page on",
        "same bit, one MiB on",
        "same bit at each multiple of 4 MiB",
        "same bit in each page of 64 MiB",
        "zeros for 2 MiB",
        "zeros for two blocks' length",
        "two pages changed places",
        "another time from the middle on",
    ],
)
def test_errors_that_repeat_do_not_cancel_out(content: torch.Tensor, checksums: list[int], how: str) -> None:
    spoil(how, content)
    parts = [content[start : start + BLOCK_BYTES] for start in range(0, content.numel(), BLOCK_BYTES)]
    one_by_one = [block for block, part in enumerate(parts) if checksum(part) != checksums[block]]
    assert one_by_one
    assert wrong_blocks(content, range(NUM_BLOCKS), checksums) == one_by_one


def test_constant_content_lost_in_whole_pages_is_found() -> None:
    """Ones for which zeros are read: each word of the difference is the same, and only its extent tells."""
    content = torch.ones(64 * BLOCK_BYTES // 4, dtype=torch.float32).view(torch.uint8)
    checksums = [checksum(content[:BLOCK_BYTES])] * 64
    for num_pages in (1, 512):
        spoilt = content.clone()
        spoilt[PAGE_BYTES : PAGE_BYTES * (1 + num_pages)] = 0
        assert wrong_blocks(spoilt, range(64), checksums)


@pytest.mark.parametrize(
    ("cut", "seen"),
    [
        pytest.param(lambda content, checksums: (content[:-1], checksums), [NUM_BLOCKS - 1], id="shorter"),
        pytest.param(lambda content, checksums: (content, checksums[:-1]), [NUM_BLOCKS - 1], id="a checksum less"),
        pytest.param(lambda content, checksums: (content[: 2 * BLOCK_BYTES], checksums[:2]), None, id="two are left"),
        pytest.param(lambda content, checksums: (content[:0], []), list(range(NUM_BLOCKS)), id="nothing is left"),
    ],
)
def test_what_is_not_there_is_not_right(
    content: torch.Tensor,
    checksums: list[int],
    cut: Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, list[int]]],
    seen: list[int] | None,
) -> None:
    expected = list(range(2, NUM_BLOCKS)) if seen is None else seen
    assert wrong_blocks(cut(content, checksums)[0], range(NUM_BLOCKS), cut(content, checksums)[1]) == expected


@pytest.mark.parametrize("absurd", [-1, 1 << 200, 0])
def test_an_absurd_checksum_is_wrong(content: torch.Tensor, checksums: list[int], absurd: int) -> None:
    assert wrong_blocks(content, range(NUM_BLOCKS), [absurd, *checksums[1:]]) == [0]


def test_the_length_of_a_block_shares_no_stride_with_pages() -> None:
    """Two places of one group never lie a whole number of pages apart when they meet in the folded block."""
    assert all(apart * BLOCK_BYTES % PAGE_BYTES for apart in range(1, 64))
    assert BLOCK_BYTES % 64 == 0
    assert num_blocks(64 * BLOCK_BYTES) == 64


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 64])
def test_the_same_is_found_by_any_number_of_threads(
    content: torch.Tensor, checksums: list[int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums_module, "_GROUP_BLOCKS", 8)
    for blocks in (range(NUM_BLOCKS), [3], [1, 2, 4, 9, 40, 69], []):
        assert wrong_blocks(content, blocks, checksums, num_threads) == []
    spoilt = [0, 7, 8, 21, 63, 64, NUM_BLOCKS - 1]
    for block in spoilt:
        flip(content, block * BLOCK_BYTES + 13 * block)
        found = spoilt[: spoilt.index(block) + 1]
        assert wrong_blocks(content, range(NUM_BLOCKS), checksums, num_threads) == found


@pytest.mark.parametrize("how", ["fails", "never gets a processor", "cannot be started"])
def test_what_another_thread_does_not_find_out_is_found_by_this_one(
    content: torch.Tensor, checksums: list[int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, over, has_begun = threading.get_ident(), threading.Event(), threading.Event()
    look, start = checksums_module._wrong_of, threading.Thread.start
    is_daemon: list[bool] = []

    def look_elsewhere(*arguments: Any) -> list[int]:
        if threading.get_ident() == own:
            if how != "cannot be started":
                has_begun.wait(LIMIT_S)
            return look(*arguments)
        is_daemon.append(threading.current_thread().daemon)
        has_begun.set()
        if how == "fails":
            raise MemoryError
        over.wait(LIMIT_S)
        return []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(checksums_module, "_GROUP_BLOCKS", 8)
    monkeypatch.setattr(checksums_module, "_wrong_of", look_elsewhere)
    monkeypatch.setattr(threading.Thread, "start", refuse if how == "cannot be started" else start)
    flip(content, 5, 9 * BLOCK_BYTES, 68 * BLOCK_BYTES)
    try:
        assert wrong_blocks(content, range(NUM_BLOCKS), checksums, 3) == [0, 9, 68]
        # One that is within torch when the interpreter ends would abort the process.
        assert not any(is_daemon)
    finally:
        over.set()
