"""Health checks: ours, and the extension's checks of GPU, NVLink and network adapter that run at each restart.

A check that has nothing to look at says so in the log, once, and leaves `has_checked` False: it has neither passed nor
failed, and no metric says otherwise.
"""

import datetime
import logging
import os
from collections.abc import Callable

from unbroken.inprocess.bounded import call_bounded
from unbroken.inprocess.exception import HealthCheckError
from unbroken.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded, HealthCheck
from unbroken.inprocess.state import FrozenState
from unbroken.nvrx.nics import links_lost, nearest_adapter
from unbroken.nvrx.nvml import RECOVERY_ACTIONS, DeviceError, NotCheckedError, Nvml

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "HealthCheck",
]

logger = logging.getLogger(__name__)

_TIMEOUT = datetime.timedelta(seconds=30)
"""A driver may not answer when its device is lost."""


class _DeviceCheck(HealthCheck):
    """Looks at one device, or at all that this process sees."""

    def __init__(self, device_index: int | None = None, *, nvml: Callable[[], Nvml] = Nvml) -> None:
        self.device_index = device_index
        self.has_checked = False
        """Whether the last call has looked at anything."""
        self._nvml = nvml
        self._has_said = False

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise HealthCheckError when a device is not healthy."""
        self.has_checked = False
        name = type(self).__name__
        try:
            call_bounded(self._look, _TIMEOUT, name, f"{name}: want the driver to answer")
            self.has_checked = True
        except NotCheckedError as error:
            self._say_not_checked(error)
        except DeviceError as error:
            raise HealthCheckError(f"{name}: device {self.device_index}: {error}") from error
        return state

    def _look(self) -> None:
        """Look at the device: each kind of check has its own. Raises NotCheckedError, DeviceError."""
        raise NotImplementedError(f"{type(self).__name__} looks at nothing")

    def _say_not_checked(self, reason: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning("%s: not checked: %s", type(self).__name__, reason)


class ChainedGPUHealthCheck(_DeviceCheck):
    """Raises HealthCheckError when the driver wants the GPU reset, or its node rebooted."""

    def _look(self) -> None:
        nvml = self._nvml()
        for device in nvml.devices(self.device_index):
            action = nvml.recovery_action(device)
            if action:
                raise DeviceError(RECOVERY_ACTIONS.get(action, f"the driver wants recovery action {action}"))


class ChainedNVLHealthCheck(_DeviceCheck):
    """Warns of NVLinks that are not active. The worker stays, as with the extension: others may not be in use."""

    def _look(self) -> None:
        nvml = self._nvml()
        down = {number: nvml.links_down(device) for number, device in enumerate(nvml.devices(self.device_index))}
        found = {number: links for number, links in down.items() if links}
        if found:
            logger.warning("ChainedNVLHealthCheck: NVLinks not active: device=%s links=%s", self.device_index, found)
            # It has not passed, and nobody acts on it.
            raise NotCheckedError("links are not active, which is no reason to leave")


class ChainedNicHealthCheck(_DeviceCheck):
    """Raises HealthCheckError when the network adapter nearest to the GPU has lost its link since the last look."""

    def __init__(self, device_index: int | None = None, *, nvml: Callable[[], Nvml] = Nvml) -> None:
        super().__init__(device_index, nvml=nvml)
        self._lost: dict[str, int] = {}
        try:
            # What was lost before this job is none of its business.
            call_bounded(self._look, _TIMEOUT, type(self).__name__, "ChainedNicHealthCheck: want the driver to answer")
        except Exception as error:
            self._say_not_checked(error)

    def _look(self) -> None:
        nvml = self._nvml()
        grown = []
        for number, device in enumerate(nvml.devices(self.device_index)):
            index = number if self.device_index is None else self.device_index
            adapter = nearest_adapter(nvml.bus_id(device), index)
            lost = links_lost(adapter)
            before = self._lost.setdefault(adapter, lost)
            self._lost[adapter] = lost
            if lost > before:
                grown.append(f"{adapter} has lost its link {lost - before} times since the last look")
        if grown:
            raise DeviceError("; ".join(grown))


def checks_of_this_worker() -> list[HealthCheck]:
    """Return the checks that the extension adds at each restart: with LOCAL_RANK in the environment."""
    text = os.environ.get("LOCAL_RANK", "")
    if not text.isdecimal():
        return []
    index = int(text)
    return [ChainedGPUHealthCheck(index), ChainedNVLHealthCheck(index), ChainedNicHealthCheck(index)]
