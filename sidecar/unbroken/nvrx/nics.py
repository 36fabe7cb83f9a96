"""Network adapters of a device: which one is nearest, and how often its link was lost."""

import os
from itertools import takewhile
from pathlib import Path

from unbroken.nvrx.nvml import NotCheckedError

SYSTEM = Path("/sys")


def nearest_adapter(bus_id: str, index: int, system: Path = SYSTEM) -> str:
    """Return the InfiniBand or RoCE adapter nearest to a PCI device; `index` chooses among equally near ones.

    Raises NotCheckedError where there is none on the same PCI root.
    """
    device = _parts(system / "bus/pci/devices" / bus_id)
    found: dict[str, int] = {}
    folder = system / "class/infiniband"
    for adapter in sorted(folder.iterdir()) if folder.is_dir() else []:
        found[adapter.name] = _num_shared(device, _parts(adapter / "device"))
    near = max(found.values(), default=0)
    # Without a common PCI root any adapter would be as good as another.
    if near <= len(_parts(system / "devices")):
        raise NotCheckedError(f"none of {len(found)} InfiniBand adapters is on the PCI root of {bus_id}")
    names = [name for name, shared in found.items() if shared == near]
    return names[index % len(names)]


def links_lost(adapter: str, system: Path = SYSTEM) -> int:
    """Return how often the adapter has lost a link. Raises NotCheckedError where it does not tell."""
    counters = sorted((system / "class/infiniband" / adapter).glob("ports/*/counters/link_downed"))
    try:
        values = [int(counter.read_text()) for counter in counters]
    except (OSError, ValueError) as error:
        raise NotCheckedError(f"link_downed of {adapter}: {error}") from error
    if not values:
        raise NotCheckedError(f"{adapter} has no counter link_downed")
    return sum(values)


def _parts(path: Path) -> tuple[str, ...]:
    return Path(os.path.realpath(path)).parts


def _num_shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
