"""Tensors that are more than their memory, or have none."""

import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from unbroken.memory import Checkpointer
from unbroken.memory.shard import ShardReader, unwrapped
from unbroken.memory.slots import Author, Slot
from unbroken_core.pod.memory_slots import EMPTY, Moment, pack_head

VALUES = torch.complex(torch.arange(32.0), torch.arange(32.0) + 1)


def test_a_tensor_and_its_conjugate_are_two_although_they_share_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "0-0.slot"
    path.write_bytes(pack_head(EMPTY) * 2 + bytes(1 << 16))
    state = {"values": VALUES, "conjugate": VALUES.conj(), "negative": torch._neg_view(VALUES)}
    shard = ShardReader().read(state)
    slot = Slot(str(path))
    slot.begin(Author(b"j" * 16, Moment(1, 0, 5), 0, 1), shard)
    samples = slot.copy(shard, lambda: True)
    saved = {entry.name: view.tolist() for entry, view in zip(shard.layout.entries, slot._targets(shard), strict=True)}
    slot.close()
    assert saved == {name: one.tolist() for name, one in state.items()}
    # The source's memory is compared with the copy: not where a flag says that the values are others.
    first = next(entry for entry in shard.layout.entries if entry.name == "values")
    assert all(first.start <= one.offset < first.start + first.num_bytes for one in samples)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.empty(4, device="meta"), "meta"),
        # Nothing can be copied into such a one: each load would fail.
        (lambda: torch.ones(2, 1).expand(2, 3), "Tensor that was expanded: clone"),
        # torch has the name of this type, and copies no values of it.
        (lambda: torch.empty(4, dtype=vars(torch)["uint4"]), "uint4"),
        # Seen before: what both have went into one place, and both came back as the second one.
        (lambda: TwoTensor(torch.ones(4), torch.zeros(4)), "TwoTensor"),
    ],
)
def test_a_tensor_that_cannot_be_copied_by_its_bytes_is_refused_by_name(
    make: Callable[[], torch.Tensor], kind: str
) -> None:
    with pytest.raises(TypeError, match=f"table: want a dense tensor.*{kind}"):
        ShardReader().read({"table": make()})


class Wrapped(torch.Tensor):
    """Built around another tensor, as torchao's weights for float8 are; its own memory is nowhere."""

    within: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.within = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["within"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub has fixed types
        plain = [one.within if isinstance(one, Wrapped) else one for one in args]
        found = func(*plain, **(kwargs or {}))
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


def test_tensors_that_are_built_around_others_are_told_apart() -> None:
    """Seen before: two of one shape were taken for tied weights, and the first one was restored as the second."""
    first, second = Wrapped(torch.ones(4)), Wrapped(torch.full((4,), 2.0))
    shard = ShardReader().read({"first": first, "second": second, "tied": first})
    assert [one.tolist() for one in shard.sources] == [[1.0] * 4, [2.0] * 4, [1.0] * 4]
    starts = {one.name: one.start for one in shard.layout.entries}
    assert starts["first"] == starts["tied"] != starts["second"]
    assert unwrapped(first.detach()).data_ptr() == first.within.data_ptr()


def test_a_tensor_that_becomes_one_of_another_kind_is_looked_at_again() -> None:
    reader = ShardReader()
    reader.read({"table": torch.ones(4)})
    with pytest.raises(TypeError, match=r"table: want a dense tensor.*TwoTensor"):
        reader.read({"table": TwoTensor(torch.ones(4), torch.zeros(4))})


@pytest.mark.parametrize("make", [UserDict, MappingProxyType])
def test_what_is_no_dictionary_and_looks_like_one_is_refused_by_name(make: Any) -> None:
    """Seen before: a restore filled another one, and the tensors in that of the script stayed as they were."""
    with pytest.raises(TypeError, match=r"scores.1.best: want a dictionary.*, got"):
        ShardReader().read({"weights": torch.ones(1), "scores": [1, {"best": make({"a": torch.ones(1)})}]})


def deep(levels: int) -> dict[str, Any]:
    """Return dictionaries in each other."""
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def within_itself() -> dict[str, Any]:
    """Return a state that has itself, in a list."""
    state: dict[str, Any] = {"best": {"of": [1]}}
    state["best"]["of"].append(state["best"])
    return state


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {1: 2, "1": 3}}, r"a\.1: want one value of this name, got two, .* \['a', 1\] and \['a', '1'\]: .*"),
        ({"a": {"b": {"c": 1}, "b.c": 2}}, r"a\.b\.c: want .* \['a', 'b', 'c'\] and \['a', 'b\.c'\]: .* rename one .*"),
        ({"a": [torch.ones(1)], "a.0": 2}, r"a\.0: want .* the keys \['a', 0\] and \['a\.0'\]: .*"),
        (within_itself(), r"best\.of\.1: want values that end, got a dictionary or list that contains itself"),
        (deep(2000), "state: want dictionaries and lists that are less deep.*"),
        ({3: {"a": 1}}, "state: want text as names, got 3, of dict"),
    ],
    ids=["a number and its text", "a dot", "a list", "within itself", "deep", "a number as a name"],
)
def test_what_has_no_name_of_its_own_is_refused_with_what_to_do(state: dict[str, Any], problem: str) -> None:
    """Seen before: `duplicated flatten key a.1`, and RecursionError and KeyError of whatever was called last."""
    with pytest.raises(TypeError) as refused:
        ShardReader().read(state)
    assert re.fullmatch(problem, str(refused.value))


@pytest.mark.parametrize("what", ["save", "reserve", "load"])
@pytest.mark.parametrize("state", [None, [1]])
def test_what_is_no_dictionary_is_no_state(what: str, state: Any) -> None:
    calls: dict[str, Callable[[Checkpointer], object]] = {
        "save": lambda one: one.save(state, 0), "reserve": lambda one: one.reserve(state),
        "load": lambda one: one.load(state),
    }  # fmt: skip
    with pytest.raises(TypeError, match=f"{what}: want the state, a dictionary .* got {type(state).__name__}"):
        calls[what](Checkpointer())


def test_a_truth_value_is_no_step() -> None:
    with pytest.raises(ValueError, match=r"step: want a number from 0 to \d+, got True"):
        Checkpointer().save({"a": 1}, True)
