"""Import torchtitan on a machine without a GPU: stand-ins for what it asks of a device, before it asks.

torchtitan 0.3 takes CUDA where it finds no device, wants a function of the next torch, and divides gradients in a
reduction that gloo lacks. Its Trainer, data, optimizers, schedules, meshes, FSDP2 and checkpoints are the real ones.
"""

import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    set_device=_nothing,
    current_device=lambda: 0,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_stats=lambda device: {},
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 34),
)
utils.get_local_device = lambda: torch.device("cpu")
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _nothing  # type: ignore[attr-defined]  # torch 2.13 lacks it

_divide = FSDPModule.set_gradient_divide_factor


def _divide_by_sums(self: FSDPModule, factor: float) -> None:
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _divide_by_sums  # type: ignore[method-assign]  # a stand-in

import torchtitan.trainer  # noqa: E402, F401  # after the stand-ins, which it takes
