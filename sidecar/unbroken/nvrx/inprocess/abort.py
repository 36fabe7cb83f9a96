"""Aborts under the extension's names and arguments."""

import os
import sys

from unbroken.inprocess import abort as ours
from unbroken.inprocess.abort import Abort, AbortTransformerEngine
from unbroken.inprocess.state import FrozenState

__all__ = ["Abort", "AbortPersistentCheckpointProcesses", "AbortTorchDistributed", "AbortTransformerEngine"]

_CHECKPOINTING = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


class AbortTorchDistributed(ours.AbortTorchDistributed):
    """Ends all collectives and store operations of torch.distributed in this process."""

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        """`torch_fr_trace_path`: folder for torch's flight recorder; default: the environment's NVRX_FR_TRACE_PATH."""
        self.torch_fr_trace_path = torch_fr_trace_path or os.environ.get("NVRX_FR_TRACE_PATH")
        super().__init__(flight_recorder_dir=self.torch_fr_trace_path)


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the extension's processes that write checkpoints, where its checkpointing is in use."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """End them."""
        checkpointing = sys.modules.get(_CHECKPOINTING)
        if checkpointing is not None:
            checkpointing.abort_nvrx_checkpoint()
        return state
