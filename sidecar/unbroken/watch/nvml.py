"""NVIDIA's management library, by ctypes: a training process needs no package for it."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.watch.errors import NotCheckedError
from unbroken.watch.visible import read_visible

LIBRARY = "libnvidia-ml.so.1"
MAX_DEVICES = 32
MAX_LINKS = 36
_XID = 0x8
_FIELD_RECOVERY_ACTION = 230
_UNCORRECTED, _SINCE_LOAD = 1, 0
_LINK_RECOVERIES = 1
_TIMEOUT, _LOST, _RESET_REQUIRED = 10, 15, 16
_UNREAD = 999
"""No word of the driver: a device that is one too many to be looked at."""


class CallError(NotCheckedError):
    """A call that does not answer the question; `code` is NVML's."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: code {code} of NVML")
        self.code = code


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


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Gpu:
    """One device of the pod."""

    uuid: str
    handle: int
    bus_id: str
    """As /sys has it, such as 0000:3b:00.0; "" where it is not told."""

    @property
    def is_told(self) -> bool:
        """Whether the driver has told which one it is."""
        return self.handle >= 0


@dataclass(frozen=True)
class GpuSample:
    """What one device tells. What it does not tell is not in `readings`."""

    uuid: str
    lost_code: int = 0
    """NVML's code of a device that has fallen off the bus, or needs a reset; 0: it answers."""
    readings: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[int, bool] = field(default_factory=dict)
    """Whether each NVLink is active."""
    counted_links: frozenset[int] = frozenset()
    """Those that are in the number of recoveries."""
    not_told: tuple[str, ...] = ()


class Library:
    """The library, loaded and initialised, and what single calls answer. Any may block for as long as the driver does.

    Each raises CallError where it does not answer.
    """

    def __init__(self, library: Any = None) -> None:
        """Raises NotCheckedError where there is none, or no driver."""
        try:
            self._library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as error:
            raise NotCheckedError(f"{LIBRARY} cannot be loaded: {error}") from error
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a code."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CallError(f"{LIBRARY} has no {name}", 13) from error
        _check(name, function(*arguments))

    def num_devices(self) -> int:
        """Return how many there are."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value

    def device(self, name: int | str) -> ctypes.c_void_p:
        """Return a device by its number, or by its UUID."""
        device = ctypes.c_void_p()
        if isinstance(name, int):
            self.call("nvmlDeviceGetHandleByIndex_v2", name, ctypes.byref(device))
        else:
            self.call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
        return device

    def bus_id(self, device: ctypes.c_void_p) -> str:
        """Return the address of a device as /sys has it, such as 0000:3b:00.0."""
        pci = _Pci()
        self.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
        domain, _, rest = pci.bus_id.decode(errors="replace").lower().partition(":")
        return f"{domain[-4:]}:{rest}" if rest else ""

    def recovery_action(self, device: ctypes.c_void_p) -> int:
        """Return what the driver wants done."""
        value = _Field(field_id=_FIELD_RECOVERY_ACTION)
        self.call("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(value))
        # The call may be well and the field not.
        _check("recovery action", value.code)
        return int(value.value.as_uint)

    def is_link_active(self, device: ctypes.c_void_p, link: int) -> bool:
        """Return whether an NVLink is active."""
        state = ctypes.c_uint()
        self.call("nvmlDeviceGetNvLinkState", device, link, ctypes.byref(state))
        return bool(state.value)


class Nvml:
    """What the watch reads of the devices of its pod."""

    def __init__(self, library: Any = None) -> None:
        """Raises NotCheckedError where there is none, or no driver."""
        self._library = Library(library)
        self._call = self._library.call

    def devices(self, visible: str = "") -> list[Gpu]:
        """Return the devices of this pod. `visible`: NVIDIA_VISIBLE_DEVICES; a privileged pod sees those of others.

        Raises NotCheckedError where there are none.
        """
        count = self._library.num_devices()
        named = read_visible(visible, count)
        seen: list[Gpu] = []
        for index in range(min(count, 2 * MAX_DEVICES)):
            if (
                index >= MAX_DEVICES
                and not named.is_all
                and not named.numbers
                and named.uuids <= {g.uuid for g in seen}
            ):
                break
            try:
                gpu = self._device(index) if index < MAX_DEVICES else Gpu(f"GPU {index}", -_UNREAD, "")
            except CallError as error:
                # Which one it is cannot be said any more, only that it is one that this container has.
                gpu = Gpu(f"GPU {index}", -error.code, "")
            seen.append(gpu)
        found = [seen[number] for number in named.own(seen)]
        if not found:
            raise NotCheckedError(f"none of {count} GPUs is one of this pod")
        return found

    def read(self, gpu: Gpu) -> GpuSample:
        """Return what a device tells now."""
        if gpu.handle < 0:
            is_gone = -gpu.handle in (_LOST, _RESET_REQUIRED)
            return GpuSample(gpu.uuid, -gpu.handle if is_gone else 0, not_told=() if is_gone else ("device",))
        readings: dict[str, int] = {}
        not_told: list[str] = []
        device = ctypes.c_void_p(gpu.handle)
        for names, read in (
            (("recovery-action",), self._recovery_action),
            (("remap-pending", "remap-failed"), self._remapped_rows),
            (("ecc-uncorrected",), self._uncorrected),
            (("throttle",), self._throttle),
        ):
            try:
                readings.update(zip(names, read(device), strict=True))
            except CallError as error:
                if error.code in (_LOST, _RESET_REQUIRED):
                    return GpuSample(gpu.uuid, error.code)
                not_told += names
        links, counted = self._links(device, readings)
        if not links:
            not_told.append("nvlink")
        return GpuSample(gpu.uuid, 0, readings, links, counted, tuple(not_told))

    def _recovery_action(self, device: ctypes.c_void_p) -> Sequence[int]:
        return (self._library.recovery_action(device),)

    def _remapped_rows(self, device: ctypes.c_void_p) -> Sequence[int]:
        values = [ctypes.c_uint() for _ in range(4)]
        self._call("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, values))
        return (int(values[2].value), int(values[3].value))

    def _uncorrected(self, device: ctypes.c_void_p) -> Sequence[int]:
        count = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_LOAD, ctypes.byref(count))
        return (int(count.value),)

    def _throttle(self, device: ctypes.c_void_p) -> Sequence[int]:
        reasons = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(reasons))
        return (int(reasons.value),)

    def _links(self, device: ctypes.c_void_p, readings: dict[str, int]) -> tuple[dict[int, bool], frozenset[int]]:
        """Return the state of each NVLink, and whose recoveries were added up."""
        links: dict[int, bool] = {}
        counted: set[int] = set()
        for link in range(MAX_LINKS):
            count = ctypes.c_ulonglong()
            try:
                is_active = self._library.is_link_active(device, link)
            except CallError:
                if not links:
                    break  # The first tells whether there are any: 36 refusals of each device would cost more.
                continue
            links[link] = is_active
            try:
                self._call("nvmlDeviceGetNvLinkErrorCounter", device, link, _LINK_RECOVERIES, ctypes.byref(count))
            except CallError:
                continue
            counted.add(link)
            readings["nvlink-recoveries"] = readings.get("nvlink-recoveries", 0) + int(count.value)
        return links, frozenset(counted)

    def _device(self, index: int) -> Gpu:
        device, uuid = self._library.device(index), ctypes.create_string_buffer(96)
        name, bus_id = f"GPU {index}", ""
        try:
            self._call("nvmlDeviceGetUUID", device, uuid, len(uuid))
            name = uuid.value.decode(errors="replace")[:96] or name
            bus_id = self._library.bus_id(device)
        except CallError as error:
            if error.code in (_LOST, _RESET_REQUIRED):
                raise
        return Gpu(name, device.value or 0, bus_id)

    def listen(self, gpus: Sequence[Gpu]) -> "Events":
        """Return what waits for events of these devices. Raises NotCheckedError where none can be listened to."""
        events = ctypes.c_void_p()
        self._call("nvmlEventSetCreate", ctypes.byref(events))
        heard, why = {}, "there is no device"
        for gpu in gpus:
            if gpu.handle < 0:
                continue
            try:
                self._call("nvmlDeviceRegisterEvents", ctypes.c_void_p(gpu.handle), ctypes.c_ulonglong(_XID), events)
                heard[gpu.handle] = gpu.uuid
            except CallError as error:
                why = str(error)
        if not heard:
            self._call("nvmlEventSetFree", events)
            raise NotCheckedError(f"events: {why}")
        deaf = tuple(gpu.uuid for gpu in gpus if gpu.handle not in heard)
        return Events(self._call, events, heard, deaf)


class Events:
    """Waits for XIDs of some devices."""

    def __init__(self, call: Any, events: ctypes.c_void_p, heard: Mapping[int, str], deaf: tuple[str, ...]) -> None:
        self._call, self._events, self._heard = call, events, heard
        self.deaf = deaf
        """Devices that cannot be listened to."""

    def wait(self, timeout_ms: int) -> tuple[str, int] | None:
        """Return the next event as (UUID, XID); the UUID is "" for a device of somebody else. None: there was none.

        Raises CallError.
        """
        event = _Event()
        try:
            self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), timeout_ms)
        except CallError as error:
            if error.code == _TIMEOUT:
                return None
            raise
        if not event.type & _XID:
            return None
        return self._heard.get(event.device or 0, ""), int(event.data)


def _check(what: str, code: int) -> None:
    if code:
        raise CallError(what, code)
