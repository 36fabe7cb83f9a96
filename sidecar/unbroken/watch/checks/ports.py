"""Links: ports of InfiniBand and RoCE adapters that the pod has, and network interfaces with a device behind them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from unbroken.watch.checks.check import Judgement, not_checked, quantity, verdicts
from unbroken.watch.counters import Key, Looks, Rises, look_again
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.files import Files, number_of
from unbroken_core.vocabulary.findings import Finding, Verdict

PORTS, NETWORK = "ports", "network"
COUNTERS_PERIOD_S = 10.0
HOLD_S = 600.0
_ADAPTERS = "/sys/class/infiniband"
_COUNTERS: Final = {
    "link_downed": 1,
    "link_error_recovery": 1,
    "local_link_integrity_errors": 1,
    "symbol_error": 10,
    "port_rcv_errors": 10,
}
"""By how much each must rise between two samples to say something."""
_MAX_PORTS = 64
_MOST_NAMES = 4096
"""Of a folder: on a node's own network each of its pods has an interface, and few have a device."""


@dataclass(frozen=True)
class PortSample:
    """All ports at one time."""

    states: Mapping[str, bool | None]
    """Whether each is active; None: what tells it is not there."""
    at_s: float
    counters: Mapping[Key, int] | None = None
    """None: not read this time."""
    num_more: int = 0
    """Ports that are too many to be looked at."""


@dataclass(frozen=True)
class PortHistory:
    """What is remembered of the samples before."""

    active: frozenset[str] = frozenset()
    """Ports that were active: of others nobody knows whether they are meant to be."""
    looks: Looks = field(default_factory=dict)
    rises: Rises = field(default_factory=Rises)
    states: Mapping[str, bool | None] = field(default_factory=dict)
    """Those of the last sample."""
    findings: tuple[Finding, ...] = ()
    """What they meant."""


class PortReader:
    """Samples ports of adapters. Which ones the pod has, its device files say: /sys shows those of the whole node."""

    def __init__(self, files: Files, clock: Callable[[], float]) -> None:
        self._files, self._clock = files, clock
        self._ports: dict[str, str] = {}
        """Where the state of each is."""
        self._counted_s: float | None = None
        self._num_more = 0

    def sample(self) -> PortSample:
        """Raises NotCheckedError where the pod has no adapter."""
        now_s = self._clock()
        is_due = self._counted_s is None or now_s - self._counted_s >= COUNTERS_PERIOD_S
        if is_due:
            self._counted_s = now_s
            self._find()
        if not self._ports:
            raise NotCheckedError("the pod has no InfiniBand or RoCE adapter (/dev/infiniband)")
        states: dict[str, bool | None] = {}
        for port, path in self._ports.items():
            state = self._files.read(path)
            states[port] = None if state is None else number_of(state.partition(":")[0]) == 4
        return PortSample(states, now_s, self._counters() if is_due else None, self._num_more)

    def _find(self) -> None:
        """Add ports that are new; one that is gone stays known."""
        self._num_more = 0
        for name in self._files.names("/dev/infiniband", _MOST_NAMES):
            if not name.startswith("uverbs"):
                continue
            adapter = (self._files.read(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip()
            if not adapter or "/" in adapter:
                continue
            for number in self._files.names(f"{_ADAPTERS}/{adapter}/ports"):
                port = f"{adapter}/{number}"
                if port in self._ports or len(self._ports) < _MAX_PORTS:
                    self._ports[port] = f"{_path(port)}/state"
                else:
                    self._num_more += 1

    def _counters(self) -> dict[Key, int]:
        found = {
            (port, name): self._files.number(f"{_path(port)}/counters/{name}")
            for port in self._ports
            for name in _COUNTERS
        }
        return {key: value for key, value in found.items() if value is not None}


class InterfaceReader:
    """Samples network interfaces of the pod that have a device; those without are the cluster's own."""

    def __init__(self, files: Files, clock: Callable[[], float]) -> None:
        self._files, self._clock = files, clock
        self._names: dict[str, str] = {}
        """Where the state of each is."""
        self._looked_s: float | None = None
        self._num_more = 0

    def sample(self) -> PortSample:
        """Raises NotCheckedError where there is none."""
        now_s = self._clock()
        is_due = self._looked_s is None or now_s - self._looked_s >= COUNTERS_PERIOD_S
        if is_due:
            self._looked_s = now_s
            self._find()
        if not self._names:
            raise NotCheckedError("no network interface of the pod has a device of its own")
        states: dict[str, bool | None] = {}
        for name, path in self._names.items():
            state = self._files.read(path)
            states[name] = None if state is None else state.strip() == "up"
        counters = None
        if is_due:
            found = {
                (name, "link_downed"): self._files.number(f"/sys/class/net/{name}/carrier_down_count")
                for name in states
            }
            counters = {key: value for key, value in found.items() if value is not None}
        return PortSample(states, now_s, counters, self._num_more)

    def _find(self) -> None:
        """Add interfaces that are new; one that is gone stays known."""
        self._num_more = 0
        for name in self._files.names("/sys/class/net", _MOST_NAMES):
            if not self._files.exists(f"/sys/class/net/{name}/device"):
                continue
            if name in self._names or len(self._names) < _MAX_PORTS:
                self._names[name] = f"/sys/class/net/{name}/operstate"
            else:
                self._num_more += 1


def judge_ports(check: str, history: PortHistory | None, sample: PortSample) -> Judgement:
    """Return what the states and counters of ports mean."""
    before = history or PortHistory()
    if history is not None and sample.counters is None and not before.looks and sample.states == before.states:
        # Nine samples of ten, in most jobs' whole lives: it is looked at each second, so it must cost next to nothing.
        return Judgement(before.findings, before)
    active = before.active | {port for port, is_active in sample.states.items() if is_active}
    amiss = {(port, _amiss(is_active)) for port, is_active in sample.states.items() if port in active and not is_active}
    rises = before.rises
    if sample.counters is not None:
        rises = rises.follow(sample.counters, _COUNTERS, sample.at_s, HOLD_S)
    after = PortHistory(frozenset(active), look_again(before.looks, amiss), rises, sample.states)
    found = [*_states(check, after), *_rises(check, after)]
    idle = sorted(port for port in sample.states if port not in active)
    if idle:
        text = f"not active since the watch began: {', '.join(idle[:8])}"
        found.append(Finding(check, "", Verdict.UNKNOWN, "never-active", message=text))
    if sample.num_more:
        found.append(not_checked(check, f"{quantity(sample.num_more, 'link')} beyond {_MAX_PORTS}"))
    findings = verdicts(check, found, quantity(len(active), "link"))
    return Judgement(findings, replace(after, findings=findings))


def judge_adapters(history: PortHistory | None, sample: PortSample) -> Judgement:
    """Return what the ports of adapters say."""
    return judge_ports(PORTS, history, sample)


def judge_interfaces(history: PortHistory | None, sample: PortSample) -> Judgement:
    """Return what network interfaces say."""
    return judge_ports(NETWORK, history, sample)


def _states(check: str, history: PortHistory) -> Iterator[Finding]:
    for (port, code), looks in sorted(history.looks.items()):
        text = "its link is down" if code == "link-down" else "it is not there any more"
        yield Finding(check, port, Verdict.SUSPECT, code, "look at cable, switch and adapter", text, sum(looks))


def _rises(check: str, history: PortHistory) -> Iterator[Finding]:
    ports: dict[str, list[str]] = {}
    for port, name in history.rises.times_s:
        ports.setdefault(port, []).append(name)
    for port, names in sorted(ports.items()):
        if "link_downed" in names:
            seen, text = history.rises.seen((port, "link_downed")), "its link was down for a moment"
            yield Finding(check, port, Verdict.SUSPECT, "link-flapped", "look at cable and switch", text, seen)
        others: Sequence[str] = sorted(name for name in names if name != "link_downed")
        if others:
            seen = max(history.rises.seen((port, name)) for name in others)
            text = f"errors were counted: {', '.join(others)}"
            yield Finding(check, port, Verdict.DEGRADED, "link-errors", "look at cable and switch", text, seen)


def _amiss(is_active: bool | None) -> str:
    return "port-gone" if is_active is None else "link-down"


def _path(port: str) -> str:
    adapter, _, number = port.partition("/")
    return f"{_ADAPTERS}/{adapter}/ports/{number}"
