"""What parts of torch that few scripts use leave behind after an exception, in one process with groups of doubles."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpointed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from unbroken.inprocess.torch_state import caches
from unbroken.inprocess.torch_state.groups import take_groups

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _no_groups() -> Iterator[None]:
    yield
    take_groups()
    caches.empty_all()


def join() -> DeviceMesh:
    """Join a group of ranks that do not exist; return a mesh of all."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    return init_device_mesh("cpu", (4,))


def left(mesh: DeviceMesh) -> weakref.ref[Any]:
    """Leave an iteration whose mesh this is; return what tells whether anything keeps it."""
    take_groups()
    assert caches.empty_all() == ([], [])
    return weakref.ref(mesh)


def loss(logits: Any, labels: Any) -> torch.Tensor:
    """Return the loss as a tensor of this rank."""
    found: Any = functional.cross_entropy(logits, labels)
    local: torch.Tensor = found.to_local()
    return local


def test_losses_outside_of_loss_parallel_are_as_before_after_an_exception_within_it() -> None:
    mesh = join()
    logits: Any = distribute_tensor(torch.randn(5, 12), mesh, [Replicate()])
    labels: Any = distribute_tensor(torch.arange(5), mesh, [Replicate()])
    want = loss(logits, labels)
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    with pytest.raises(ValueError, match="injected"), loss_parallel():
        raise ValueError("injected")
    # If this fails, torch has learned to end it.
    assert handlers != DTensor._op_dispatcher._custom_op_handlers
    caches.empty_all()
    assert handlers == DTensor._op_dispatcher._custom_op_handlers
    assert torch.equal(loss(logits, labels), want)


def test_losses_go_on_being_parallel_in_the_next_iteration() -> None:
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    with loss_parallel():
        within = dict(DTensor._op_dispatcher._custom_op_handlers)
    caches.empty_all()
    with loss_parallel():
        assert within == DTensor._op_dispatcher._custom_op_handlers
    assert handlers == DTensor._op_dispatcher._custom_op_handlers


def test_context_parallel_keeps_no_mesh_and_leaves_attention_as_it_was() -> None:
    attention = functional.scaled_dot_product_attention
    mesh = join()
    with context_parallel(mesh, buffers=[torch.zeros(1, 2, 16, 8)], buffer_seq_dims=[2]):
        assert functional.scaled_dot_product_attention is not attention
    within = context_parallel(mesh, buffers=[torch.zeros(1, 2, 16, 8)], buffer_seq_dims=[2])
    within.__enter__()
    # An interruption while it is entered, before Python knows that it has to be left.
    assert functional.scaled_dot_product_attention is not attention
    kept = left(mesh)
    assert functional.scaled_dot_product_attention is attention
    within.__exit__(None, None, None)
    del mesh, within
    gc.collect()
    assert kept() is None


def test_model_whose_state_dict_torch_has_patched_is_gone_with_its_iteration() -> None:
    model = torch.nn.Linear(2, 2)
    checkpointed._patch_model_state_dict(model)
    kept = weakref.ref(model)
    caches.empty_all()
    del model
    gc.collect()
    assert kept() is None


REMOTE_CALLS = """
import itertools, sys, torch
import torch.distributed.rpc as rpc
from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state.groups import take_groups
from unbroken.inprocess.torch_state.renewal import RankLayout, TorchState

stores = (f"file://{sys.argv[1]}/{number}" for number in itertools.count())

def begin(name):
    options = rpc.TensorPipeRpcBackendOptions(init_method=next(stores))
    rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync(name, max, args=(1, 2)) == 2
    # It counts: a new process would begin with 0.
    rpc.api._wait_all_workers(30)
    return rpc._init_counter, dict(rpc.api._all_gather_sequence_id)

def leave():
    take_groups()
    state.empty()

state = TorchState()
counts = []
for _ in range(3):
    state.take(RankLayout(0, 1))
    counts.append(begin("one"))
    rpc.shutdown(graceful=False)
    leave()
assert counts[0] == counts[1] == counts[2], counts
try:
    state.take(RankLayout(1, 2))
except StaleStateError as error:
    assert "keeps the rank" in str(error), error
else:
    raise SystemExit("want no other rank, got one")
state.take(RankLayout(0, 1))
begin("one")
leave()
try:
    state.take(RankLayout(0, 1))
except StaleStateError as error:
    assert "still runs" in str(error), error
else:
    raise SystemExit("want a new process where it still runs, got none")
# Begun before the call, it is the script's own.
own = TorchState()
own.take(RankLayout(0, 1))
own.empty()
own.take(RankLayout(1, 2))
rpc.shutdown(graceful=False)
print("as wanted")
"""


def test_remote_calls_begin_again_where_the_script_has_ended_them_else_a_new_process_comes(tmp_path: Path) -> None:
    # In a process of its own, of which C++ keeps the rank.
    command = [sys.executable, "-c", REMOTE_CALLS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "as wanted\n"), ended.stderr
