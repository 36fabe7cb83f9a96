"""What torch keeps of a previous rank, in one process with groups that are made up: rank 1 becomes rank 0."""

import gc
import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.distributed
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.checkpoint._async_process_executor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state import caches, mesh_identity
from unbroken.inprocess.torch_state.groups import take_groups
from unbroken.inprocess.torch_state.modes import Modes
from unbroken.inprocess.torch_state.renewal import RankLayout, TorchState
from unbroken_core.vocabulary.reasons import Cause

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
    assert "returns the mesh of an earlier iteration" in call(mesh_identity.check, mesh)


def test_rank_that_becomes_another_has_its_own_offset() -> None:
    state = TorchState()
    for number, (rank, world_size) in enumerate([(1, 4), (1, 4), (0, 4), (1, 2), (3, 4)]):
        with state.watched(number):
            state.take(RankLayout(rank, world_size))
            mesh = join(rank, world_size)
            assert offset(mesh) == 2 * rank
        del mesh
        take_groups()
        state.empty()
        gc.collect()


def test_what_the_cache_of_a_thread_keeps_is_never_found_again_and_refused_to_another_rank() -> None:
    state = TorchState()
    with ThreadPoolExecutor(1) as pool:
        for number in (0, 1):
            with state.watched(number):
                state.take(RankLayout(1, 4))
                mesh = join(rank=1)
                assert pool.submit(offset, mesh).result() == 2
                assert pool.submit(mesh_identity.check, mesh).result() == ""
            del mesh
            take_groups()
            state.empty()
            gc.collect()
        with state.watched(2), pytest.raises(StaleStateError, match=r"a mesh of that time is kept: by .* C"):
            state.take(RankLayout(0, 4))


def test_meshes_and_groups_of_an_iteration_are_gone_once_it_was_left() -> None:
    state = TorchState()
    with state.watched(0):
        state.take(RankLayout(1, 4))
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


def test_what_torch_knows_of_shapes_does_not_grow_with_each_iteration() -> None:
    """It is keyed by groups: four entries came with each restart of FSDP2."""
    cache = FakeTensorMode.cache
    cache.clear()
    with FakeTensorMode():
        assert torch.ones(2).add(1).shape == (2,)
    assert cache
    caches.empty_all()
    assert not cache


def leave_grad_off() -> None:
    torch._C._set_grad_enabled(False)


def leave_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leave_autocast_on() -> None:
    torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()


def leave_device() -> None:
    torch.device("meta").__enter__()


def leave_dispatch_mode() -> None:
    FlopCounterMode(display=False).__enter__()


def leave_saved_tensors() -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(lambda tensor: None, lambda nothing: torch.zeros(1))


@pytest.mark.parametrize(
    "leave",
    [leave_grad_off, leave_dtype, leave_autocast_on, leave_device, leave_dispatch_mode, leave_saved_tensors],
    ids=lambda leave: leave.__name__.removeprefix("leave_"),
)
def test_what_an_interruption_leaves_switched_is_as_before_in_the_next_iteration(leave: Callable[[], None]) -> None:
    """It came after torch had turned a switch, and before Python knew that a `with` block was entered."""
    state = TorchState()
    state.take(RankLayout(1, 4))
    before = Modes.read()
    for _ in range(3):
        leave()
    assert Modes.read() != before
    state.take(RankLayout(1, 4))
    assert Modes.read() == before
    weight = torch.ones(2, requires_grad=True)
    (weight * weight).sum().backward()
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


def test_switches_of_the_script_itself_are_kept() -> None:
    with torch.device("cpu"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = Modes.read()
        state = TorchState()
        state.take(RankLayout(0, 1))
        torch.set_grad_enabled(True)
        leave_device()
        state.take(RankLayout(0, 1))
        assert Modes.read() == before != Modes()


def test_inference_mode_that_stays_on_gets_a_new_process() -> None:
    state = TorchState()
    state.take(RankLayout(0, 1))
    with torch.inference_mode(), pytest.raises(StaleStateError, match=r"inference of this thread: want False"):
        state.take(RankLayout(0, 1))


def test_process_that_writes_checkpoints_is_killed_and_handed_over() -> None:
    module: Any = torch.distributed.checkpoint._async_process_executor
    killed: list[bool] = []
    writer = SimpleNamespace(_save_process=SimpleNamespace(is_alive=lambda: True, kill=lambda: killed.append(True)))
    module._CHECKPOINT_PROCESS = writer
    assert caches.empty_all() == ([writer], [])
    assert module._CHECKPOINT_PROCESS is None
    assert killed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "state"), [("process", "writing"), ("process", "starting"), ("thread", "writing")])
def test_save_that_hangs_when_its_iteration_ends_is_in_nobodys_way(tmp_path: Path, kind: str, state: str) -> None:
    """Its thread kept the process from ending, for ever; a process that had just begun was that of the next save."""
    command = [sys.executable, "-m", "tests.integration.inprocess.workloads.hung_save", str(tmp_path), kind, state]
    # The workload waits as tests do, and so does the process that it starts.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert (tmp_path / "saved").exists(), done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("is_kept", "layout", "is_stale"),
    [
        pytest.param(True, RankLayout(0, 4), True, id="kept, another rank"),
        pytest.param(True, RankLayout(1, 2), True, id="kept, another world"),
        pytest.param(True, RankLayout(1, 4), False, id="kept, the same rank"),
        pytest.param(False, RankLayout(0, 4), False, id="not kept"),
    ],
)
def test_mesh_in_a_global_is_named_and_refused_to_another_rank(
    is_kept: bool, layout: RankLayout, is_stale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = TorchState()
    for number in (0, 1):
        with state.watched(number):
            state.take(RankLayout(1, 4))
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


def kept_by_a_function_that_runs(state: TorchState) -> None:
    """What most scripts are: a function around the wrapped one, with variables of its own."""
    cache: dict[str, Any] = {}

    def train() -> None:
        with state.watched(0):
            state.take(RankLayout(1, 4))
            cache["mesh"] = join(rank=1)

    train()
    take_groups()
    state.empty()
    gc.collect()
    with state.watched(1):
        state.take(RankLayout(0, 4))


def test_mesh_in_a_variable_of_a_running_function_is_named_and_refused() -> None:
    with pytest.raises(StaleStateError, match=r"DeviceMesh in dict in cache of kept_by_a_function_that_runs\(\)"):
        kept_by_a_function_that_runs(TorchState())


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda mesh: ContextVar("kept").set(mesh), id="context variable"),
        pytest.param(lambda mesh: KEPT.append(torch.compile(_Sharded(mesh), backend="eager")), id="compiled model"),
        pytest.param(lambda mesh: KEPT.append(_loss(mesh)), id="graph of a loss"),
    ],
)
def test_mesh_that_only_cplusplus_or_the_compiler_holds_is_refused_to_another_rank(keep: Callable[..., Any]) -> None:
    """A script may still come to it: what cannot be found is not what cannot be used."""
    state = TorchState()
    with state.watched(0):
        state.take(RankLayout(1, 4))
        kept = keep(join(rank=1))
    take_groups()
    state.empty()
    gc.collect()
    with state.watched(1), pytest.raises(StaleStateError, match="a mesh of that time is kept: "):
        state.take(RankLayout(0, 4))
    del kept


class _Sharded(torch.nn.Module):
    """A model with a sharded parameter."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        local = torch.zeros(2, 3)
        self.weight = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def _loss(mesh: DeviceMesh) -> torch.Tensor:
    whole: Any = _Sharded(mesh).weight
    local: torch.Tensor = whole.to_local()
    return (local * 2).sum()


def test_swallowed_error_of_the_check_comes_back_with_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_identity, "check", lambda _mesh, may_fail: "stale, says the test")
    state = TorchState()
    with state.watched(0):
        state.take(RankLayout(1, 4))
        join(rank=1)
        assert state.problem == ""
    take_groups()
    state.empty()
    gc.collect()
    with state.watched(1):
        state.take(RankLayout(0, 4))
        for _ in range(2):
            with pytest.raises(StaleStateError, match="stale, says the test"):
                dist.is_initialized() and take_groups()
                join(rank=0)
        assert state.problem == "stale, says the test"


def test_check_that_cannot_be_made_ends_nobody_who_keeps_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_mesh: DeviceMesh, _tensor: Any) -> str:
        raise RuntimeError("not on this device")

    monkeypatch.setattr(mesh_identity, "_problem", fail)
    state = TorchState()
    for number, layout in enumerate([RankLayout(1, 4), RankLayout(1, 4), RankLayout(0, 4)]):
        with state.watched(number):
            state.take(layout)
            if number < 2:
                join(rank=1)
            else:
                with pytest.raises(StaleStateError, match=r"the check of torch.s caches failed: .*not on this device"):
                    join(rank=0)
        take_groups()
        state.empty()
        gc.collect()


def test_check_is_made_of_real_tensors_where_the_script_makes_none() -> None:
    state = TorchState()
    for number in (0, 1):
        with state.watched(number), torch.device("meta"):
            state.take(RankLayout(1, 4))
            join(rank=1)
            assert state.problem == ""
        take_groups()
        state.empty()
        gc.collect()


def test_pickled_mesh_is_as_torch_writes_it() -> None:
    state = TorchState()
    with state.watched(3):
        state.take(RankLayout(1, 4))
        saved = pickle.dumps(join(rank=1))
    take_groups()
    assert pickle.loads(saved) == join(rank=1)


def test_torch_that_lacks_a_name_keeps_its_rank_or_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = caches.TorchCache("torch.distributed.device_mesh", "_renamed.cache", caches._clear)
    monkeypatch.setattr(caches, "MEMORIES", (*caches.MEMORIES, unknown))
    state = TorchState()
    with state.watched(0):
        state.take(RankLayout(1, 4))
    state.empty()
    with state.watched(1):
        state.take(RankLayout(1, 4))
    state.empty()
    with state.watched(2), pytest.raises(StaleStateError, match=r"device_mesh\._renamed\.cache"):
        state.take(RankLayout(0, 4))


def test_memory_that_fails_to_be_emptied_counts_as_one_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_holder: Any, _name: str) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(caches, "MEMORIES", (caches.TorchCache("torch", "compiler", fail),))
    assert caches.empty_all() == ([], ["torch.compiler"])


def test_mesh_that_is_unpickled_is_of_this_iteration_where_it_is_of_this_rank() -> None:
    state = TorchState()
    with state.watched(1):
        state.take(RankLayout(1, 4))
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
        state.take(RankLayout(1, 4))
        mesh: Any = join(rank=1)
    assert mesh._thread_id is None
    assert DeviceMesh.__init__ is original


def test_compiled_code_is_dropped_when_a_name_of_a_group_means_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(True))
    state = TorchState()
    for number, ranks in enumerate(([0, 1], [0, 1], [1, 2], [1, 2])):
        with state.watched(number):
            state.take(RankLayout(1, 4))
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
