"""PCI Express: errors that the kernel has counted of the pod's GPUs and adapters (AER)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from unbroken.watch.checks.check import Judgement, quantity, verdicts
from unbroken.watch.counters import Key, Looks, Rises, look_again
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.files import Files, table_of
from unbroken_core.vocabulary.findings import Finding, Verdict

PCIE: Final = "pcie"
HOLD_S: Final = 600.0
_DEVICES: Final = "/sys/bus/pci/devices"
_MAX_DEVICES: Final = 128
_TOTALS: Final = {"fatal": "TOTAL_ERR_FATAL", "nonfatal": "TOTAL_ERR_NONFATAL", "correctable": "TOTAL_ERR_COR"}
_LEAST: Final = {"correctable": 100}


@dataclass(frozen=True)
class PcieSample:
    """All devices at one time."""

    is_there: Mapping[str, bool]
    counters: Mapping[Key, int]
    at_s: float


@dataclass(frozen=True)
class PcieHistory:
    """What is remembered of the samples before."""

    known: frozenset[str] = frozenset()
    looks: Looks = field(default_factory=dict)
    rises: Rises = field(default_factory=Rises)


class PcieReader:
    """Samples the counters. /sys shows the devices of the whole node: `own` says which are the pod's."""

    def __init__(self, files: Files, own: Callable[[], Iterable[str]], clock: Callable[[], float]) -> None:
        self._files, self._own, self._clock = files, own, clock

    def sample(self) -> PcieSample:
        """Raises NotCheckedError where the pod has no such device."""
        devices = sorted(set(self._own()))[:_MAX_DEVICES]
        if not devices:
            raise NotCheckedError("no GPU or adapter of the pod is known")
        counters: dict[Key, int] = {}
        for device in devices:
            for name, total in _TOTALS.items():
                value = table_of(self._files.read(f"{_DEVICES}/{device}/aer_dev_{name}")).get(total)
                if value is not None:
                    counters[device, name] = value
        is_there = {device: self._files.exists(f"{_DEVICES}/{device}") for device in devices}
        return PcieSample(is_there, counters, self._clock())


def judge_pcie(history: PcieHistory | None, sample: PcieSample) -> Judgement:
    """Return what the counters mean."""
    before = history or PcieHistory()
    known = before.known | {device for device, is_there in sample.is_there.items() if is_there}
    gone = {(device, "gone") for device, is_there in sample.is_there.items() if device in known and not is_there}
    after = PcieHistory(
        known,
        look_again(before.looks, gone),
        before.rises.follow(sample.counters, _LEAST, sample.at_s, HOLD_S),
    )
    found = [
        Finding(
            PCIE, device, Verdict.SUSPECT, "pci-gone", "drain the node", "it is not on the bus any more", sum(looks)
        )
        for (device, _code), looks in sorted(after.looks.items())
    ]
    for (device, name), times in sorted(after.rises.times_s.items()):
        verdict = Verdict.SUSPECT if name == "fatal" else Verdict.DEGRADED
        text = f"{name} errors of its PCI Express link were counted"
        found.append(Finding(PCIE, device, verdict, f"aer-{name}", "look at slot and riser", text, len(times)))
    counting = {device for device, _name in sample.counters}
    silent = sorted(device for device in sample.is_there if device not in counting)
    if silent:
        text = f"errors are not counted for {len(silent)} of {len(sample.is_there)} devices"
        found.append(Finding(PCIE, "", Verdict.UNKNOWN, "aer", message=text))
    return Judgement(verdicts(PCIE, found, quantity(len(counting), "device")), after)
