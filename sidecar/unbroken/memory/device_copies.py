"""Copies of tensors on CUDA devices into a slot: on a stream of their own, into memory that is registered with CUDA.

Without it a device copies through a small buffer of the driver, several times slower, and nobody can end the wait.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

VARIABLE = "UNBROKEN_MEMORY_PINNED"
_LOOK_S = 0.0002
_CLOSE_S = 5.0


class Event(Protocol):
    """What a stream has come to."""

    def query(self) -> bool:
        """Return whether it is there."""


class Runtime(Protocol):
    """What is needed of CUDA."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device."""

    def register(self, device: torch.device, memory: torch.Tensor) -> str:
        """Let devices write to memory of the host; return why they cannot, "" when they can."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Take it back."""

    def stream(self, device: torch.device) -> Any:
        """Return a new stream of a device."""

    def copy(self, stream: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Copy (target, source) on a stream, once all is done that their device has to do now."""


class Cuda:
    """Torch's CUDA, which is ROCm as well."""

    _PORTABLE = 1  # For the contexts of all devices.

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device."""
        return tensor.is_cuda

    def register(self, device: torch.device, memory: torch.Tensor) -> str:
        """Register it. Takes a second for some gibibytes, and lets the other threads run."""
        cudart: Any = torch.cuda.cudart()
        # A thread begins with device 0, and would make a context on it.
        with torch.cuda.device(device):
            code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), self._PORTABLE))
        return "" if code == 0 else f"cudaHostRegister: error {code}"

    def unregister(self, memory: torch.Tensor) -> None:
        """Take it back. Raises nothing: the memory is unmapped in any case."""
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostUnregister(memory.data_ptr()))
        if code != 0:
            logger.warning("memory for checkpoints stays registered with CUDA: cudaHostUnregister: error %d", code)

    def stream(self, device: torch.device) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(device)

    def copy(self, stream: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Copy on the stream, behind the present one."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event: Event = stream.record_event()
        return event


class DeviceCopies:
    """Copies into the memory of one slot. The thread that writes the slot calls it; another one may register it."""

    def __init__(self, memory: torch.Tensor, runtime: Runtime) -> None:
        self._memory = memory
        self._runtime = runtime
        self._is_registered = False
        self._streams: dict[torch.device, Any] = {}
        self._events: list[Event] = []

    def register(self, device: torch.device) -> None:
        """Make the memory fit for `copy`. Without it the slot is written as if there were none of this."""
        problem = self._runtime.register(device, self._memory)
        if problem:
            logger.warning("checkpoints in memory are copied from GPUs the slow way: %s", problem)
        self._is_registered = not problem

    def takes(self, source: torch.Tensor) -> bool:
        """Return whether `copy` is for this tensor."""
        return self._is_registered and self._runtime.owns(source)

    @property
    def are_under_way(self) -> bool:
        """Whether a device still writes: nobody else may, and nothing of it may be read."""
        self._events = [event for event in self._events if not event.query()]
        return bool(self._events)

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], may_go_on: Callable[[], bool]) -> bool:
        """Copy (target, source) and wait; return False when it may not go on, with copies under way still.

        Raises RuntimeError when a device fails.
        """
        for device, ours in _by_device(pairs).items():
            if device not in self._streams:
                self._streams[device] = self._runtime.stream(device)
            self._events.append(self._runtime.copy(self._streams[device], ours))
        while self.are_under_way:
            if not may_go_on():
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> bool:
        """Take the memory back; return False when a device may still write to it: then it has to stay mapped."""
        if not self._is_registered:
            return True
        end_s = time.monotonic() + _CLOSE_S
        try:
            while self.are_under_way:
                if time.monotonic() > end_s:
                    return False
                time.sleep(_LOOK_S)
            self._runtime.unregister(self._memory)
        except RuntimeError as error:
            logger.warning("memory for checkpoints stays mapped: the device fails: %s", str(error)[:300])
            return False
        self._is_registered = False
        return True


def are_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the user wants slots to be registered."""
    return (os.environ if environment is None else environment).get(VARIABLE) == "1"


def _by_device(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]:
    found: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in pairs:
        found.setdefault(source.device, []).append((target, source))
    return found
