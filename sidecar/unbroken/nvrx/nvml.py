"""What NVIDIA's management library says of a device. Read with ctypes: a training process needs no package for it."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from unbroken_core.errors import UnbrokenError

LIBRARY = "libnvidia-ml.so.1"
RECOVERY_ACTIONS = {
    1: "the GPU needs a reset",
    2: "the node needs a reboot",
    3: "peer-to-peer traffic needs to be drained",
    4: "it runs at reduced capacity: drain it, then reset it",
}
"""What the driver wants done, from release 570 on; 0 is nothing."""

_FIELD_RECOVERY_ACTION = 230
_MAX_LINKS = 36
_INVALID, _UNSUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NO_DRIVER, _NO_LIBRARY, _NO_FUNCTION = 2, 3, 4, 6, 9, 12, 13
_TELLS_NOTHING = (_INVALID, _UNSUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NO_DRIVER, _NO_LIBRARY, _NO_FUNCTION)


class NotCheckedError(UnbrokenError):
    """Nothing can be said of the device: the message says why."""


class DeviceError(UnbrokenError):
    """The device, or its driver, answers with an error."""


class _Value(ctypes.Union):
    _fields_ = (("as_double", ctypes.c_double), ("as_uint", ctypes.c_uint), ("as_ulonglong", ctypes.c_ulonglong))


class _Field(ctypes.Structure):
    _fields_ = (
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("code", ctypes.c_uint),
        ("value", _Value),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Nvml:
    """The library, loaded and initialised."""

    def __init__(self, library: Any = None) -> None:
        """Raises NotCheckedError where there is none, or no driver."""
        try:
            self._library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as error:
            raise NotCheckedError(f"{LIBRARY} cannot be loaded: {error}") from error
        self._call("nvmlInit_v2")

    def devices(self, index: int | None, environment: Mapping[str, str] = os.environ) -> list[ctypes.c_void_p]:
        """Return the device that CUDA calls `index` in this process; all that it sees for None.

        Raises NotCheckedError where there is no such device.
        """
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            names = [str(number) for number in range(count.value)]
        else:
            names = [name.strip() for name in visible.split(",") if name.strip()]
        if index is not None and not 0 <= index < len(names):
            raise NotCheckedError(f"device {index} is none of the {len(names)} that this process sees")
        return [self._device(name) for name in (names if index is None else [names[index]])]

    def recovery_action(self, device: ctypes.c_void_p) -> int:
        """Return what the driver wants done; raises NotCheckedError where it does not tell."""
        field = _Field(field_id=_FIELD_RECOVERY_ACTION)
        self._call("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(field))
        _check("recovery action", field.code)
        return int(field.value.as_uint)

    def links_down(self, device: ctypes.c_void_p) -> list[int]:
        """Return the NVLinks that are not active; raises NotCheckedError for a device without any."""
        down, num_links = [], 0
        for link in range(_MAX_LINKS):
            is_active = ctypes.c_uint()
            try:
                self._call("nvmlDeviceGetNvLinkState", device, link, ctypes.byref(is_active))
            except NotCheckedError:
                continue
            num_links += 1
            if not is_active.value:
                down.append(link)
        if not num_links:
            raise NotCheckedError("the device has no NVLink")
        return down

    def bus_id(self, device: ctypes.c_void_p) -> str:
        """Return the address of a device as /sys has it, such as 0000:3b:00.0."""
        pci = _Pci()
        self._call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
        domain, _, rest = pci.bus_id.decode(errors="replace").lower().partition(":")
        return f"{domain[-4:]}:{rest}"

    def _device(self, name: str) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        if name.isdecimal():
            self._call("nvmlDeviceGetHandleByIndex_v2", int(name), ctypes.byref(device))
        else:
            self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise NotCheckedError(f"{LIBRARY} has no {name}: the driver is too old") from error
        _check(name, function(*arguments))


def _check(what: str, code: int) -> None:
    if code in _TELLS_NOTHING:
        raise NotCheckedError(f"{what}: not told by this driver or device (code {code})")
    if code:
        raise DeviceError(f"{what}: code {code} of NVML")
