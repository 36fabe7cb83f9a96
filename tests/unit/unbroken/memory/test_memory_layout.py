"""Layouts: each tensor has a place of its own, and no text from elsewhere leads outside."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.memory.layout import Shape, make_layout, read_layout
from unbroken_core.vocabulary.errors import WireError

SHAPES = (
    Shape("a", torch.float32, (4, 3), (2, 0), (2, 3), 0),
    Shape("b", torch.bfloat16, (), (), (), 1),
    Shape("tied", torch.float32, (4, 3), (2, 0), (2, 3), 0),
    Shape("empty", torch.int64, (0, 5), (0, 0), (0, 5), 3),
    Shape("c", torch.float64, (7,), (0,), (7,), 4),
)


def test_a_layout_is_read_as_it_was_written() -> None:
    layout = make_layout(SHAPES)
    assert read_layout(layout.text, layout.objects_offset) == layout


def test_tied_weights_share_a_place_and_others_do_not_overlap() -> None:
    first, scalar, tied, empty, last = make_layout(SHAPES).entries
    assert (first.start, first.sizes) == (tied.start, tied.sizes)
    assert first.start + first.num_bytes <= scalar.start < scalar.start + scalar.num_bytes <= last.start
    assert empty.num_bytes == 0


def test_another_shape_is_another_layout() -> None:
    digests = {make_layout(SHAPES[:count]).digest for count in range(1, 6)}
    assert len(digests) == 5


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(["a", "float32", [4], [0], [5], 0], id="part beyond the whole"),
        pytest.param(["a", "float32", [1000], [0], [1000], 0], id="beyond the content"),
        pytest.param(["a", "float32", [4], [0], [4], -64], id="before the content"),
        pytest.param(["a", "float32", [4, 4], [0], [4], 0], id="other number of dimensions"),
        pytest.param(["a", "evil", [4], [0], [4], 0], id="unknown type"),
        pytest.param(["a", "float32", [True], [0], [1], 0], id="no number"),
        pytest.param([1, "float32", [4], [0], [4], 0], id="no name"),
        pytest.param(["a", "float32", [1 << 60], [0], [1 << 60], 0], id="huge"),
        pytest.param({"a": 1}, id="no list"),
        pytest.param(["a", "float32", [4], [0], [4], 0, 0], id="one too many"),
    ],
)
def test_a_layout_that_leads_outside_is_refused(entry: Any) -> None:
    with pytest.raises(WireError, match="layout: want a list of tensors"):
        read_layout(json.dumps([entry]).encode(), 4096 + 64)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        assert read_layout(noise, 10_000).entries == ()
    except WireError:
        pass
