"""Who writes what of a checkpoint on the disk: each part once, all of them, or nothing."""

import json
from typing import Any

import pytest
import torch

from unbroken.memory.background.plans import PlanError, decide, describe
from unbroken.memory.layout import Entry
from unbroken.memory.new_state.places import Places


def rank(
    *tensors: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], objects: tuple[str, ...] = ()
) -> bytes:
    """Return what a rank says of tensors: name, size of the whole, offsets and sizes of its part."""
    entries = [Entry(name, torch.float32, size, offsets, sizes, 0) for name, size, offsets, sizes in tensors]
    return json.dumps(describe(entries, objects, {"model.a": ("model", "a")}, Places())).encode()


def test_what_all_ranks_have_is_written_once_and_by_all_of_them() -> None:
    """DDP: 8 tensors and an object on 4 ranks."""
    names = [f"w{index}" for index in range(8)]
    whole = rank(*((name, (4, 4), (0, 0), (4, 4)) for name in names), objects=("epoch",))
    plan = decide([whole] * 4)
    assert sorted(index for of_rank in plan.of_rank for index in of_rank) == list(range(9))
    assert all(plan.of_rank), "a rank has nothing to do while others write two"
    assert plan.keys == {(name, (0, 0)) for name in names} | {("epoch", None)}


def test_shards_are_written_by_those_who_have_them_and_their_copies_are_not() -> None:
    """HSDP: two halves on two ranks each, and ranks with names of their own, as stages of a pipeline have."""
    halves = [("model.a", (4, 2), (0, 0), (2, 2)), ("model.a", (4, 2), (2, 0), (2, 2))]
    own = [(f"stage{number}", (3,), (0,), (3,)) for number in range(4)]
    plan = decide([rank(halves[number % 2], own[number]) for number in range(4)])
    assert plan.keys == {("model.a", (0, 0)), ("model.a", (2, 0)), *((name, (0,)) for name, *_ in own)}
    assert sum(0 in of_rank for of_rank in plan.of_rank) == 2
    assert all(1 in of_rank for of_rank in plan.of_rank)
    assert plan.metadata.planner_data["model.a"] == ("model", "a")


def test_the_same_ranks_make_the_same_plan_and_others_another_one() -> None:
    first, second = rank(("a", (2,), (0,), (2,))), rank(("b", (2,), (0,), (2,)))
    assert decide([first, second]).plan_id == decide([first, second]).plan_id != decide([second, first]).plan_id


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ([rank(("a", (4,), (0,), (2,)))], "a: ranks have 2 of its 4 values"),
        ([rank(("a", (4,), (0,), (3,))), rank(("a", (4,), (2,), (2,)))], "make no checkpoint"),
        ([b"{}"], "cannot be read"),
        ([b"[]"], "cannot be read"),
        ([b"garbage"], "make no checkpoint"),
        ([json.dumps({"entries": [["a", "load", [1], [0], [1]]], "objects": [], "paths": {}}).encode()], "no type"),
        ([json.dumps({"entries": [["a", "float32"]], "objects": [], "paths": {}}).encode()], "cannot be read"),
    ],
    ids=["a hole", "an overlap", "nothing", "a list", "no JSON", "no type", "half an entry"],
)
def test_parts_that_make_no_whole_are_refused(contents: list[bytes], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        decide(contents)


def test_a_form_that_differs_between_ranks_is_refused() -> None:
    """Two ranks with a plain tensor of one name, and another size: no reader could tell which is meant."""
    with pytest.raises(PlanError, match="a: its shape, type or part differs between ranks"):
        decide([rank(("a", (2,), (0,), (2,))), rank(("a", (3,), (0,), (3,)))])


def test_all_is_named_as_plain_data() -> None:
    found: dict[str, Any] = json.loads(rank(("a", (2, 0), (0, 0), (2, 0)), objects=("b",)))
    assert found == {
        "entries": [["a", "float32", [2, 0], [0, 0], [2, 0]]],
        "objects": ["b"],
        "paths": {"a": ["a"], "b": ["b"]},
        "places": [{}, {}, []],
    }
