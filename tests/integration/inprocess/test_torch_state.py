"""What torch keeps of a former rank, in one process with groups that are made up: rank 1 becomes rank 0."""

import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.distributed
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.checkpoint._async_process_executor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state import caches, mesh_identity
from unbroken.inprocess.torch_state.groups import take_groups
from unbroken.inprocess.torch_state.renewal import Layout, TorchState
from unbroken_core.reasons import Cause

from .agent_double import AgentDouble, Policy

KEPT: list[Any] = []
"""A global of the script, as far as the product knows."""


@pytest.fixture(autouse=True)
def _no_groups() -> Iterator[None]:
    yield
    KEPT.clear()
    take_groups()
    caches.empty_all()
    torch.compiler.reset()


def join(rank: int, world_size: int = 4) -> DeviceMesh:
    """Join a group of ranks that do not exist; return a mesh of all."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def offset(mesh: DeviceMesh) -> int:
    """Return where torch places this rank's part of a tensor of two rows a rank, as a checkpoint would do it."""
    sharded = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    found: Any = sharded.detach() * 1
    shape = torch.Size((2 * mesh.size(), 3))
    return compute_local_shape_and_global_offset(shape, found.device_mesh, found.placements)[1][0]


def here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in this thread."""
    return function(*arguments)


@pytest.fixture(params=["main thread", "thread that stays"])
def call(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """How what uses tensors is called: the caches of a thread that stays are nobody else's to empty."""
    if request.param == "main thread":
        yield here
        return
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def test_torch_itself_gives_the_former_offset_which_the_check_sees(call: Callable[..., Any]) -> None:
    """If this fails, torch has learned to tell meshes of one rank from those of another."""
    former = join(rank=1)
    assert call(offset, former) == 2
    call(mesh_identity.check, former)
    take_groups()
    mesh = join(rank=0)
    assert call(offset, mesh) == 2
    with pytest.raises(StaleStateError, match="returns the mesh of an earlier iteration"):
        call(mesh_identity.check, mesh)


def test_rank_that_becomes_another_has_its_own_offset(call: Callable[..., Any]) -> None:
    state = TorchState()
    for number, (rank, world_size) in enumerate([(1, 4), (1, 4), (0, 4), (1, 2), (3, 4)]):
        with state.watched(number):
            state.take(Layout(rank, world_size))
            mesh = join(rank, world_size)
            assert call(offset, mesh) == 2 * rank
        del mesh
        take_groups()
        state.empty()
        # What the cache of another thread keeps is left, and no script's doing.
        gc.collect()


def test_meshes_and_groups_of_an_iteration_are_gone_once_it_was_left() -> None:
    state = TorchState()
    with state.watched(0):
        state.take(Layout(1, 4))
        mesh = join(rank=1)
        offset(mesh)
        watched: list[weakref.ref[Any]] = [weakref.ref(one) for one in (mesh, *mesh.get_all_groups())]
    del mesh
    take_groups()
    state.empty()
    gc.collect()
    assert [one() for one in watched] == [None] * len(watched)


def test_every_name_of_the_list_is_in_this_torch() -> None:
    slow, missing = caches.empty_all()
    assert (slow, missing) == ([], [])


def test_process_that_writes_checkpoints_is_handed_over_to_be_ended() -> None:
    module: Any = torch.distributed.checkpoint._async_process_executor
    writer = object()
    module._CHECKPOINT_PROCESS = writer
    assert caches.empty_all() == ([writer], [])
    assert module._CHECKPOINT_PROCESS is None


@pytest.mark.parametrize(
    ("is_kept", "layout", "is_stale"),
    [
        pytest.param(True, Layout(0, 4), True, id="kept, another rank"),
        pytest.param(True, Layout(1, 2), True, id="kept, another world"),
        pytest.param(True, Layout(1, 4), False, id="kept, the same rank"),
        pytest.param(False, Layout(0, 4), False, id="not kept"),
    ],
)
def test_mesh_in_a_global_is_named_and_refused_to_another_rank(
    is_kept: bool, layout: Layout, is_stale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = TorchState()
    for number in (0, 1):
        with state.watched(number):
            state.take(Layout(1, 4))
            KEPT.extend([{"model": join(rank=1)}] if is_kept else [])
        take_groups()
        state.empty()
        gc.collect()
        with caplog.at_level(logging.WARNING):
            state.look_for_left_over()
    told = [record.getMessage() for record in caplog.records]
    where = f"in KEPT of module {__name__}"
    assert [where in text for text in told] == ([True] if is_kept else [])
    with state.watched(2):
        if is_stale:
            with pytest.raises(StaleStateError, match=f"rank 1 of 4 became rank .* kept: .*{where}"):
                state.take(layout)
        else:
            state.take(layout)


def test_torch_that_lacks_a_name_keeps_its_rank_or_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = caches.Memory("torch.distributed.device_mesh", "_renamed.cache", caches._clear)
    monkeypatch.setattr(caches, "MEMORIES", (*caches.MEMORIES, unknown))
    state = TorchState()
    with state.watched(0):
        state.take(Layout(1, 4))
    state.empty()
    with state.watched(1):
        state.take(Layout(1, 4))
    state.empty()
    with state.watched(2), pytest.raises(StaleStateError, match=r"device_mesh\._renamed\.cache"):
        state.take(Layout(0, 4))


def test_memory_that_fails_to_be_emptied_counts_as_one_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_holder: Any, _name: str) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(caches, "MEMORIES", (caches.Memory("torch", "compiler", fail),))
    assert caches.empty_all() == ([], ["torch.compiler"])


def test_mesh_that_is_unpickled_is_of_this_iteration_where_it_is_of_this_rank() -> None:
    state = TorchState()
    with state.watched(1):
        state.take(Layout(1, 4))
        mesh = join(rank=1)
        saved = pickle.dumps(mesh)
        assert pickle.loads(saved) == mesh
    for number, rank, is_same in ((2, 1, True), (3, 0, False)):
        take_groups()
        state.empty()
        with state.watched(number):
            mesh = join(rank=rank)
            assert (pickle.loads(saved) == mesh) is is_same


def test_first_iteration_leaves_meshes_as_torch_makes_them() -> None:
    state = TorchState()
    original = DeviceMesh.__init__
    with state.watched(0):
        state.take(Layout(1, 4))
        mesh: Any = join(rank=1)
    assert mesh._thread_id is None
    assert DeviceMesh.__init__ is original


def test_compiled_code_is_dropped_when_a_name_of_a_group_means_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(True))
    state = TorchState()
    for number, ranks in enumerate(([0, 1], [0, 1], [1, 2], [1, 2])):
        with state.watched(number):
            state.take(Layout(1, 4))
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
            dist.new_group(ranks)
        take_groups()
        state.empty()
    assert dropped == [True]


def test_error_of_a_stale_state_passes_handlers_of_exceptions() -> None:
    """Who swallows it would go on to write checkpoints."""
    assert not issubclass(StaleStateError, Exception)


@pytest.mark.timeout(300)
def test_worker_whose_script_keeps_a_mesh_gets_a_new_process_for_another_rank(tmp_path: Path) -> None:
    policy = Policy(2, 2, layouts=((0, 1), (1, 0)), does_respawn=True)
    with AgentDouble(tmp_path, "keeps_a_mesh", policy) as job:
        job.wait_for(lambda: len(job.events("returned")) == 2, "both return")
        stale = [report.fault for _, report in job.reports if report.fault and report.fault.cause is Cause.STALE_STATE]
        assert stale
        for fault in stale:
            assert "a mesh of that time is kept: " in fault.detail
            assert "MESHES of module " in fault.detail
        # Each new process has a mesh of its own rank, and no other.
        assert sorted(event.values["value"] for event in job.events("returned")) == [[0, 0], [1, 1]]
