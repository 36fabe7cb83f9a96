"""Where what was saved lies: what all ranks say stands in a checkpoint once, and each has its own in the same world."""

import json
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken.memory.new_state.places import CheckpointPlaces, Places, merge, of_checkpoint

FIRST = Places(
    {"it.a": ("it", "a"), "it.7": ("it", 7)},
    {"it.x": (("it", "x"), "cpu", 0), "it.first": (("it", "first"), "cpu", -1)},
    [["model.w"]],
)
SECOND = Places(
    {"it.a": ("it", "a"), "it.7": ("it", "7")},
    {"it.x": (("it", "x"), "cpu", 1), "it.second": (("it", "second"), "cpu", 1)},
    [["model.v"], ["model.w"]],
)


def content(*of_rank: Places) -> bytes:
    return json.dumps(merge(of_rank)).encode()


def test_what_all_say_stands_there_once() -> None:
    found = merge([FIRST] * 100)
    assert (found["of_rank"], found["world_size"]) == ({}, 100)
    assert of_checkpoint(content(*[FIRST] * 100), 3, 7) == CheckpointPlaces(FIRST, {"it"}, set())


def test_a_rank_has_its_own_in_the_world_that_saved_it() -> None:
    """As the stages of a pipeline have. A group is a number of its rank alone."""
    found = of_checkpoint(content(FIRST, SECOND), 1, 2)
    assert found.of_some == {"it.7", "it.first", "it.second"}
    places = found.own
    assert places.objects == {"it.a": ("it", "a"), "it.7": ("it", "7")}
    group = {name: [*places.alike[one[2]]] for name, one in places.tensors.items()}
    assert group == {"it.x": ["model.w"], "it.second": ["model.w"]}


def test_in_another_world_it_has_what_all_had() -> None:
    found = of_checkpoint(content(FIRST, SECOND), 1, 3)
    assert found.roots == {"it"}
    assert found.own == Places({"it.a": ("it", "a")}, {"it.x": FIRST.tensors["it.x"]}, FIRST.alike)


def test_ranks_without_any_leave_no_file() -> None:
    assert merge([Places(), Places()]) == {}


def test_keys_that_are_neither_text_nor_numbers_are_left_out() -> None:
    assert Places({"a": ("it", 1.5), "b": ("it", True), "c": ("it", [3])}).to_json()[0] == {"c": ("it", [3])}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("[]", id="a list"),
        pytest.param("{}", id="nothing"),
        pytest.param('{"common": 5, "of_rank": {}, "world_size": 1}', id="no places"),
        pytest.param('{"common": [{}, {}, []], "of_rank": [], "world_size": 1}', id="no ranks"),
        pytest.param('{"common": [{"a": []}, {}, []], "of_rank": {}, "world_size": 1}', id="no path"),
        pytest.param('{"common": [{"a": [[3]]}, {}, []], "of_rank": {}, "world_size": 1}', id="no part of a state"),
        pytest.param('{"common": [{"a": [["x"]]}, {}, []], "of_rank": {}, "world_size": 1}', id="text in a list"),
        pytest.param('{"common": [{}, {"a": [["it"], "cpu", 0]}, []], "of_rank": {}, "world_size": 1}', id="no group"),
        pytest.param('{"common": [{}, {}, []], "of_rank": {"0": [{}, {}]}, "world_size": 1}', id="half a rank"),
    ],
)
def test_anything_else_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError):  # JSON's own error is one as well
        of_checkpoint(text.encode(), 0, 1)


def test_a_tensor_of_which_nobody_saved_the_whole_gets_no_place() -> None:
    """It was divided, and what is divided alike is not known."""

    def about(*sizes: int) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(torch.Size((at,)), torch.Size((one,))) for at, one in enumerate(sizes)]
        return TensorStorageMetadata(TensorProperties(), torch.Size((sum(sizes),)), chunks)

    paths = {name: ((name,), "cpu", -1) for name in ("half", "whole", "unknown")}
    known: dict[str, Any] = {"half": about(1, 1), "whole": about(2)}
    found = Places({}, paths).make({}, Metadata(known))
    assert [one.path for one in found] == [("whole",)]
    assert found[0].make is not None
    assert found[0].make().shape == (2,)
