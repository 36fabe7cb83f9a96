"""What is read for a state: where nothing is resharded, the same as torch's own planner says, found faster."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unbroken.memory.layout import Shape, make_layout, read_layout
from unbroken.memory.new_state import nested
from unbroken.memory.new_state.nested import LoadPlanner, unchanged


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two by two, seen by its third rank; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def saved(*chunks: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...]) -> TensorStorageMetadata:
    """Return what is known of a tensor of this size, of which parts (offsets, sizes) were saved."""
    parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), parts)


def whole(*size: int) -> TensorStorageMetadata:
    return saved(((0,) * len(size), size), size=size)


def sharded(mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state of DTensors, tensors and objects, and what is known of the same when it was saved here."""
    placements = [Shard(0), Replicate()]
    state = {
        "weight": DTensor.from_local(torch.ones(3, 4), mesh, placements),
        "exp_avg": DTensor.from_local(torch.ones(3, 4), mesh, placements),
        "columns": DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1), Replicate()]),
        "same": DTensor.from_local(torch.ones(5), mesh, [Replicate(), Replicate()]),
        "plain": torch.nn.Parameter(torch.ones(7, 2)),
        "step": torch.tensor(3.0),
        "rate": 0.1,
    }
    about = {
        "weight": saved(((3, 0), (3, 4)), size=(6, 4)),
        "exp_avg": saved(((3, 0), (3, 4)), size=(6, 4)),
        "columns": saved(((0, 2), (6, 2)), size=(6, 4)),
        "same": whole(5),
        "plain": whole(7, 2),
        "step": whole(),
        "rate": BytesStorageMetadata(),
    }
    return state, about


def plans(state: dict[str, Any], about: dict[str, Any]) -> tuple[Any, Any]:
    """Return our plan and torch's."""
    found = []
    for planner in (LoadPlanner(), DefaultLoadPlanner()):
        planner.set_up_planner(dict(state), Metadata(dict(about)))
        found.append(planner.create_local_plan())
    return found[0], found[1]


def test_a_part_that_was_saved_as_it_is_has_the_plan_of_torch(mesh: DeviceMesh) -> None:
    state, about = sharded(mesh)

    ours, theirs = plans(state, about)

    assert ours == theirs
    assert unchanged(state, Metadata(about)) == theirs.items


@pytest.mark.parametrize(
    ("name", "known"),
    [
        pytest.param("weight", saved(((0, 0), (3, 4)), ((3, 0), (3, 4)), size=(6, 4)), id="several shards are read"),
        pytest.param("weight", saved(((2, 0), (4, 4)), size=(6, 4)), id="cut elsewhere"),
        pytest.param("plain", saved(((0, 0), (4, 2)), ((4, 0), (3, 2)), size=(7, 2)), id="saved in parts"),
    ],
)
def test_what_was_saved_in_other_parts_is_planned_by_torch(
    mesh: DeviceMesh, name: str, known: TensorStorageMetadata
) -> None:
    state, about = sharded(mesh)
    about[name] = known

    ours, theirs = plans(state, about)

    assert unchanged(state, Metadata(about)) is None
    assert ours == theirs
    assert len(ours.items) >= len(state)


def test_empty_parts_and_names_that_only_one_side_has_are_planned_by_torch(mesh: DeviceMesh) -> None:
    state, about = sharded(mesh)

    assert unchanged({**state, "empty": torch.ones(0)}, Metadata({**about, "empty": whole(0)})) is None
    assert unchanged(state, Metadata({**about, "more": BytesStorageMetadata()})) is None
    assert unchanged({**state, "more": 1}, Metadata(about)) is None
    assert unchanged({**state, "rate": torch.ones(1)}, Metadata(about)) is None
    assert unchanged({**state, "plain": 1}, Metadata(about)) is None


def test_a_tensor_of_another_size_is_refused_in_torchs_words(mesh: DeviceMesh) -> None:
    state, about = sharded(mesh)
    about["plain"] = replace(whole(7, 2), size=torch.Size((8, 2)))

    planner = LoadPlanner()
    planner.set_up_planner(state, Metadata(about))
    with pytest.raises(ValueError, match="Size mismatch"):
        planner.create_local_plan()


def test_torch_is_asked_where_a_dtensor_says_itself_what_lies_where(mesh: DeviceMesh) -> None:
    class Told(torch.Tensor):
        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            raise AssertionError("torch asks it")

    state = {"weight": DTensor.from_local(torch.ones(3, 4).as_subclass(Told), mesh, [Shard(0), Replicate()])}

    assert nested.unchanged(state, Metadata({"weight": saved(((3, 0), (3, 4)), size=(6, 4))})) is None


def test_a_layout_is_read_anew_unless_it_is_the_last_one() -> None:
    def layout(name: str) -> Any:
        return make_layout((Shape(name, torch.float32, (4,), (0,), (4,), 0),))

    first, second = layout("first"), layout("other")

    assert read_layout(second.text, second.objects_offset) is second
    assert read_layout(second.text, second.objects_offset + 64).objects_offset == second.objects_offset + 64
    assert read_layout(first.text, first.objects_offset) == first
    assert read_layout(second.text, second.objects_offset) == second
