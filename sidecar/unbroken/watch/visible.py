"""Which of the devices that a container sees are the pod's: a privileged one sees those of the whole node. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Device(Protocol):
    """What has to be known of one."""

    @property
    def uuid(self) -> str:
        """Its name."""

    @property
    def is_told(self) -> bool:
        """Whether the driver has told its UUID: of one that is lost it does not."""


@dataclass(frozen=True)
class Visible:
    """What NVIDIA_VISIBLE_DEVICES names; neither: nothing that tells devices from each other, as `all` does."""

    uuids: frozenset[str] = frozenset()
    numbers: frozenset[int] = frozenset()
    """As the driver counts the devices of the node."""

    @property
    def is_all(self) -> bool:
        """Whether all devices that are seen are the pod's, as far as it is known."""
        return not self.uuids and not self.numbers

    def own(self, devices: Sequence[Device]) -> list[int]:
        """Return the numbers of the pod's devices, of all that are seen, in their order.

        One that is lost has no UUID: it is the pod's unless all that the pod has are there.
        """
        is_complete = self.uuids <= {each.uuid for each in devices}
        return [
            number
            for number, each in enumerate(devices)
            if self.is_all
            or number in self.numbers
            or each.uuid in self.uuids
            or not (each.is_told or is_complete or self.numbers)
        ]


def read_visible(text: str, count: int) -> Visible:
    """Read NVIDIA_VISIBLE_DEVICES, of a container that sees so many devices.

    It has UUIDs (GPU-...), numbers (2), or the like of parts of a device (MIG-GPU-.../1/0, 2:0). Where no more devices
    are seen than are named the runtime has let through the pod's alone, and counts them anew.
    """
    uuids, numbers = set(), set()
    for name in filter(None, (each.strip() for each in text.split(","))):
        device = name.removeprefix("MIG-").partition("/")[0]
        number = name.partition(":")[0]
        if device.startswith("GPU-"):
            uuids.add(device)
        elif number.isascii() and number.isdecimal() and len(number) <= 4:
            numbers.add(int(number))
        else:
            return Visible()
    if numbers and (len(uuids) + len(numbers) >= count or max(numbers) >= count):
        return Visible()
    return Visible(frozenset(uuids), frozenset(numbers))
