"""What a process' devices say of themselves, in the words of the extension's checks; `watch.nvml` makes the calls."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.watch.errors import NotCheckedError
from unbroken.watch.nvml import LIBRARY, MAX_LINKS, CallError, Library
from unbroken_core.vocabulary.errors import UnbrokenError

RECOVERY_ACTIONS = {
    1: "the GPU needs a reset",
    2: "the node needs a reboot",
    3: "peer-to-peer traffic needs to be drained",
    4: "it runs at reduced capacity: drain it, then reset it",
}
"""What the driver wants done, from release 570 on; 0 is nothing."""

_INVALID, _UNSUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NO_DRIVER, _NO_LIBRARY, _NO_FUNCTION = 2, 3, 4, 6, 9, 12, 13
_TELLS_NOTHING = (_INVALID, _UNSUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NO_DRIVER, _NO_LIBRARY, _NO_FUNCTION)

__all__ = ["LIBRARY", "RECOVERY_ACTIONS", "DeviceError", "NotCheckedError", "Nvml"]


class DeviceError(UnbrokenError):
    """The device, or its driver, answers with an error."""


class Nvml:
    """The devices that CUDA shows this process. Each call raises NotCheckedError where nothing can be said."""

    def __init__(self, library: Any = None) -> None:
        """Raises NotCheckedError where there is no library, or no driver."""
        with _told():
            self._library = Library(library)

    def devices(self, index: int | None, environment: Mapping[str, str] = os.environ) -> list[ctypes.c_void_p]:
        """Return the device that CUDA calls `index` in this process; all that it sees for None.

        Raises NotCheckedError where there is no such device.
        """
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        with _told():
            if visible is None:
                names: list[int | str] = [*range(self._library.num_devices())]
            else:
                given = [name.strip() for name in visible.split(",") if name.strip()]
                names = [int(name) if name.isdecimal() else name for name in given]
            if index is not None and not 0 <= index < len(names):
                raise NotCheckedError(f"device {index} is none of the {len(names)} that this process sees")
            return [self._library.device(name) for name in (names if index is None else [names[index]])]

    def recovery_action(self, device: ctypes.c_void_p) -> int:
        """Return what the driver wants done; raises NotCheckedError where it does not tell."""
        with _told():
            return self._library.recovery_action(device)

    def links_down(self, device: ctypes.c_void_p) -> list[int]:
        """Return the NVLinks that are not active; raises NotCheckedError for a device without any."""
        states: dict[int, bool] = {}
        for link in range(MAX_LINKS):
            with contextlib.suppress(NotCheckedError), _told():
                states[link] = self._library.is_link_active(device, link)
        if not states:
            raise NotCheckedError("the device has no NVLink")
        return [link for link, is_active in states.items() if not is_active]

    def bus_id(self, device: ctypes.c_void_p) -> str:
        """Return the address of a device as /sys has it, such as 0000:3b:00.0."""
        with _told():
            return self._library.bus_id(device)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell what cannot be said from what a device says against itself."""
    try:
        yield
    except CallError as error:
        if error.code in _TELLS_NOTHING:
            raise NotCheckedError(f"not told by this driver or device: {error}") from error
        raise DeviceError(str(error)) from error
