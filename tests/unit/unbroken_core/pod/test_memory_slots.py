"""Heads of slots: whatever a killed writer or a flipped bit leaves, no head lies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken_core.pod.memory_slots import (
    BLOCK_BYTES,
    CONTENT_OFFSET,
    HEAD_BYTES,
    Head,
    Moment,
    Sample,
    SlotState,
    num_blocks,
    pack_head,
    read_head,
)
from unbroken_core.protocol.bounds import MAX_NUMBER, MAX_RANKS

FILE_BYTES = CONTENT_OFFSET + 10_000
SEALED = Head(
    SlotState.SEALED, 7, bytes(range(16)), Moment(2, 5, 40), 3, 4, bytes(16), 100, 9_000, 500, 9_500,
    (Sample(200, 64, 123), Sample(9_000, 500, 9)),
)  # fmt: skip
WRITING = replace(SEALED, state=SlotState.WRITING, serial=8, samples=())


def test_a_head_is_read_as_it_was_written() -> None:
    assert read_head(pack_head(SEALED) * 2, FILE_BYTES) == SEALED


@given(st.integers(0, HEAD_BYTES), st.booleans())
def test_a_write_that_is_cut_off_anywhere_leaves_the_old_head_or_the_new_one(cut: int, is_second: bool) -> None:
    old, new = pack_head(SEALED) * 2, pack_head(WRITING) * 2
    end = cut + HEAD_BYTES * is_second
    assert read_head(new[:end] + old[end:], FILE_BYTES) in (SEALED, WRITING)


@given(st.integers(0, HEAD_BYTES))
def test_a_seal_that_is_cut_off_in_the_first_copy_is_none_unless_the_copy_is_whole(cut: int) -> None:
    sealed = replace(SEALED, serial=8)
    packed, before = pack_head(sealed), pack_head(WRITING)
    found = read_head(packed[:cut] + before[cut:] + before, FILE_BYTES)
    assert found == (sealed if packed[:cut] + before[cut:] == packed else WRITING)


@given(st.integers(0, 8 * 300 - 1))
def test_a_flipped_bit_is_never_read(bit: int) -> None:
    broken = bytearray(pack_head(SEALED))
    broken[bit // 8] ^= 1 << bit % 8
    assert read_head(bytes(broken) * 2, FILE_BYTES) in (None, SEALED)
    assert read_head(bytes(broken) + pack_head(SEALED), FILE_BYTES) == SEALED


@given(st.binary(max_size=3 * HEAD_BYTES), st.integers(0, 1 << 40))
def test_noise_is_no_head(noise: bytes, file_bytes: int) -> None:
    assert read_head(noise, file_bytes) is None


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(replace(SEALED, content_bytes=10_001), id="content beyond the file"),
        pytest.param(replace(SEALED, rank=4), id="rank beyond the world"),
        pytest.param(replace(SEALED, layout_bytes=9_501), id="layout beyond the content"),
        pytest.param(replace(SEALED, objects_bytes=501), id="objects beyond the content"),
        pytest.param(replace(SEALED, samples=(Sample(9_400, 101, 0),)), id="sample beyond the content"),
        pytest.param(replace(SEALED, moment=Moment(0, -1, 0)), id="iteration below 0"),
        # No message may tell of these.
        pytest.param(replace(SEALED, moment=Moment(2, 5, MAX_NUMBER + 1)), id="step beyond all"),
        pytest.param(replace(SEALED, moment=Moment(2, MAX_NUMBER + 1, 40)), id="iteration beyond all"),
        pytest.param(replace(SEALED, moment=Moment(MAX_NUMBER + 1, 5, 40)), id="term beyond all"),
        pytest.param(replace(SEALED, world_size=MAX_RANKS + 1), id="world beyond all"),
    ],
)
def test_an_absurd_head_is_none(head: Head) -> None:
    assert read_head(pack_head(head) * 2, FILE_BYTES) is None


def test_a_later_iteration_is_newer_whatever_its_step() -> None:
    assert Moment(1, 4, 20).order > Moment(1, 3, 50).order > Moment(1, 3, 40).order


def test_the_last_block_may_be_short() -> None:
    assert [num_blocks(size) for size in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [0, 1, 1, 2]
