"""What torch remembers of meshes, ranks and groups for the whole process, and how each memory is emptied.

torch's caches compare two meshes by their ranks and layout, not by the rank that asks: to one of them, the mesh of
the iteration that has ended *is* the new one, and its offsets are those of the previous rank. A checkpoint written with
them reads back wrong, without an error. The list was made by reading torch 2.13; for each entry, what it does when
stale was tried. Accelerate's states are on it as well. A name that the torch at hand does not have is reported, not
skipped: nobody knows then what took its place.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unbroken.inprocess.torch_state import async_saves

logger = logging.getLogger(__name__)

DTENSOR = "torch.distributed.tensor"


@dataclass(frozen=True)
class TorchCache:
    """One thing that torch keeps; it exists only where `module` was imported."""

    module: str
    name: str
    """Path of the attribute within the module."""
    empty: Callable[[Any, str], object]
    """Called with the object that holds the attribute, and the attribute's name. What it returns is still referenced by
    somebody who takes long to drop: the caller destroys it in the background. None: nothing."""
    is_optional: bool = False
    """Whether other releases of torch lack it because they lack the feature: its absence says nothing then."""


def empty_all() -> tuple[list[object], list[str]]:
    """Empty everything that this process has; return what is to be destroyed slowly, and the names of what is missing.

    Belongs to the thread that runs the function: one of the caches is the thread's own. What another thread keeps is
    never found again, because each iteration's meshes differ from all before (`mesh_identity`).
    """
    slow: list[object] = []
    missing: list[str] = []
    for memory in MEMORIES:
        module = sys.modules.get(memory.module)
        if module is None:
            continue
        try:
            holder, name = _find(module, memory.name)
            kept = memory.empty(holder, name)
        except AttributeError:
            if not memory.is_optional:
                missing.append(f"{memory.module}.{memory.name}")
        except Exception as error:
            logger.warning("torch's memory cannot be emptied: name=%s.%s error=%s", memory.module, memory.name, error)
            missing.append(f"{memory.module}.{memory.name}")
        else:
            if kept is not None:
                slow.append(kept)
    return slow, missing


def _find(module: Any, path: str) -> tuple[Any, str]:
    """Return who holds the last name of this path. Raises AttributeError where one of the names is not there."""
    *outer, name = path.split(".")
    holder = module
    for part in outer:
        holder = getattr(holder, part)
    getattr(holder, name)
    return holder, name


def _clear(holder: Any, name: str) -> None:
    getattr(holder, name).clear()


def _clear_cache(holder: Any, name: str) -> None:
    getattr(holder, name).cache_clear()


def _call(holder: Any, name: str) -> None:
    getattr(holder, name)()


def _want_empty(holder: Any, name: str) -> None:
    """Raise RuntimeError where something is there: C++ keeps a copy that nobody can empty."""
    if getattr(holder, name):
        raise RuntimeError("want it empty, got groups that C++ remembers by name")


def _forget(holder: Any, name: str) -> None:
    setattr(holder, name, None)


def _count_from_zero(holder: Any, name: str) -> None:
    setattr(holder, name, 0)


def _renew(holder: Any, name: str) -> None:
    """Put an empty one in the place of a cache of which every thread has its own."""
    setattr(holder, name, type(getattr(holder, name))(holder.propagate_op_sharding_non_cached))


def _take_out(holder: Any, name: str) -> None:
    """Take the losses of `loss_parallel` out of what sharded tensors do; only its end would, and no exception does."""
    for operation in getattr(holder, name):
        holder.DTensor._op_dispatcher._custom_op_handlers.pop(operation, None)


def _put_back(holder: Any, name: str) -> None:
    """Put the function back that `context_parallel` has replaced, and forget all replacements, which hold its mesh."""
    holder._restore_function(holder.F.scaled_dot_product_attention, holder.F)
    getattr(holder, name).clear()


_PROPAGATOR = "DTensor._op_dispatcher.sharding_propagator"
_PLANNER = "torch.distributed.checkpoint.planner"
_RPC = "torch.distributed.rpc"
_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"

MEMORIES: tuple[TorchCache, ...] = (
    # An operation on a sharded tensor returns the mesh, and so the offset, of the iteration before.
    TorchCache(f"{DTENSOR}._api", f"{_PROPAGATOR}.propagate_op_sharding", _renew),
    TorchCache("torch", "_C._clear_DTensor_sharding_propagator_cache", _call),
    TorchCache(f"{DTENSOR}._api", f"{_PROPAGATOR}._propagate_tensor_meta_cached", _clear_cache),
    # Uneven shards in nested meshes fail to redistribute.
    TorchCache(f"{DTENSOR}._redistribute", "_gen_transform_infos", _clear_cache),
    TorchCache(f"{DTENSOR}._redistribute", "clear_redistribute_planner_cache", _call),
    TorchCache(f"{DTENSOR}._collective_utils", "MeshTopoInfo.build_from_mesh", _clear_cache),
    TorchCache(f"{DTENSOR}._random", "_rng_tracker", _forget),
    TorchCache("torch.distributed.device_mesh", "_mesh_resources.mesh_stack", _clear),
    TorchCache("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP", _forget),
    # After an exception within it, losses outside of it fail, or are computed in another order.
    TorchCache(f"{DTENSOR}.parallel.loss", "customized_loss_ops", _take_out),
    # One more with each entry, for ever.
    TorchCache(f"{DTENSOR}.experimental._context_parallel._attention", "_replaced_functions", _put_back),
    # Methods of models.
    TorchCache("torch.distributed.checkpoint.state_dict", "_patched_state_dict", _clear),
    # Plans of the previous ranks: survivors and a new coordinator do not agree on what is written.
    TorchCache(_PLANNER, "SavePlanner._cached_save_plan", _clear),
    TorchCache(_PLANNER, "SavePlanner._cached_final_save_plan", _clear),
    TorchCache(_PLANNER, "SavePlanner._cached_all_plans", _clear),
    TorchCache(_PLANNER, "SavePlanner._cached_global_plan", _clear),
    TorchCache(_PLANNER, "SavePlanner._cached_metadata", _clear),
    # A process that writes checkpoints, in a group of such processes of the previous ranks, and threads that write.
    TorchCache("torch.distributed.checkpoint._async_process_executor", "_CHECKPOINT_PROCESS", async_saves.end_all),
    # Keyed by names of groups, which begin again at "0".
    TorchCache(_SYMMETRIC_MEMORY, "_group_name_to_store", _want_empty, is_optional=True),
    TorchCache(_SYMMETRIC_MEMORY, "_group_name_to_workspace_tensor", _clear, is_optional=True),
    # Keyed by groups, too, of which each iteration has others: it would grow with each restart.
    TorchCache("torch._subclasses.fake_tensor", "FakeTensorMode.cache", _clear, is_optional=True),
    # Counts of how often things were done, which new processes have not; they are in names that ranks agree on.
    TorchCache(_RPC, "_init_counter", _count_from_zero, is_optional=True),
    TorchCache(f"{_RPC}.api", "_all_gather_sequence_id", _clear, is_optional=True),
    TorchCache(f"{_RPC}.api", "_all_gather_sequence_id_to_states", _clear, is_optional=True),
    # Groups of the compiler's own.
    TorchCache("torch._dynamo.distributed", "_COMPILE_PG", _forget),
    TorchCache("torch._dynamo.distributed", "_GUARD_PG", _forget, is_optional=True),
    # Accelerate's states are shared by all objects of a process: a new Accelerator() takes rank and world from them.
    TorchCache("accelerate.state", "GradientState._reset_state", _call),
    TorchCache("accelerate.state", "AcceleratorState._reset_state", _call),
    TorchCache("accelerate.state", "PartialState._reset_state", _call),
)
