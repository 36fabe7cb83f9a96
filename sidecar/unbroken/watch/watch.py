"""The watch: starts the lanes, gathers what they say, and tells the agent what has changed.

lane (thread) ──findings of a check──> Watch ──Health──> agent
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from unbroken.faults.findings import OrderedFinding, read_findings
from unbroken.watch.checks import node, pcie, ports
from unbroken.watch.checks.check import Check, clipped, not_checked
from unbroken.watch.checks.gpu import EVENTS, GPU, judge_gpus
from unbroken.watch.checks.injected import INJECTED, PERIOD_S, judge_injected
from unbroken.watch.checks.probe import make_checks
from unbroken.watch.checks.storage import STORAGE, StorageReader, judge_storage
from unbroken.watch.config import WatchConfig
from unbroken.watch.extensions import Extensions
from unbroken.watch.files import Files
from unbroken.watch.gpus import EventListener, GpuReader, adapters_bus_ids
from unbroken.watch.lane import Lane
from unbroken.watch.link import WatchLink
from unbroken_core.vocabulary.findings import STARTING, Finding, Health, Verdict, bounded, is_news

PATIENCE_S = 30.0
"""A check that has not come back after this long counts as one that could not look."""
_GATHER_S = 0.2
"""Between two messages: a flood of findings is one message in so long."""
_LOOK_S = 5.0
_ASLEEP_S = 3 * _LOOK_S
"""A watch that was not awake for so long, on a node without a core for it, has not seen what came back meanwhile."""
_FAST_S, _USUAL_S, _SLOW_S = 1.0, 10.0, 60.0


class Board:
    """What each check has said last. Lanes write, the watch reads."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._said: dict[str, tuple[Finding, ...]] = {}
        self.hanging: frozenset[str] = frozenset()
        """Checks that do not come back."""

    def put(self, check: str, findings: tuple[Finding, ...]) -> None:
        """Take what a check says."""
        findings = tuple(map(clipped, findings))
        with self._lock:
            if self._said.get(check) == findings:
                return
            self._said[check] = findings
        self._wake()

    def health(self) -> Health:
        """Return what all say. Of a check that hangs, what was wrong stays; that all was well does not."""
        with self._lock:
            said = dict(self._said)
        for check in self.hanging:
            kept = (each for each in said.get(check, ()) if each.verdict.severity > Verdict.OK.severity)
            said[check] = (*kept, not_checked(check, f"no answer for {PATIENCE_S:.0f} s or longer", "no-answer"))
        return bounded(tuple(finding for findings in said.values() for finding in findings))


class Watch:
    """One watch."""

    def __init__(self, config: WatchConfig) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._board = Board(self._wake)
        self._link = WatchLink(config.directory / "agent.sock")
        # Before the code of others runs: it may end the process.
        if self._link.connect(time.monotonic()):
            self._link.send(Health((STARTING,)), time.monotonic())
        probes = [Lane([check], self._board.put, is_wanted=True) for check in make_checks(config.probes)]
        extensions = Extensions({probe.name for probe in config.probes}, self._add)
        self._lanes = (
            *make_lanes(config, self._board),
            *probes,
            *_lane_of_faults(config, self._board),
            Lane([extensions.check()], self._board.put, is_wanted=True),
        )
        self._listener = EventListener(config.visible_devices, self._board.put, EVENTS)
        self._sent: Health | None = None
        self._sent_s = 0.0
        self._turned_s = time.monotonic()

    def run(self) -> None:
        """Watch until the process ends."""
        for lane in self._lanes:
            lane.start()
        threading.Thread(target=self._listener.run, name=EVENTS, daemon=True).start()
        while True:
            self._turn(time.monotonic())

    def _add(self, check: Check) -> None:
        """Begin with a check that was loaded; called in the thread that loads."""
        lane = Lane([check], self._board.put, is_wanted=True)
        self._lanes = (*self._lanes, lane)
        lane.start()

    def _turn(self, now_s: float) -> None:
        was_awake, self._turned_s = now_s - self._turned_s < _ASLEEP_S, now_s
        if was_awake:
            self._board.hanging = self._hanging(now_s)
        if self._link.connect(now_s):
            self._sent = None
        health = self._board.health()
        rest_s = _LOOK_S
        if health.findings and is_news(self._sent, health):
            rest_s = self._sent_s + _GATHER_S - now_s
            if rest_s <= 0:
                rest_s = _LOOK_S
                if self._link.send(health, now_s):
                    self._sent, self._sent_s = health, now_s
        self._wait(min(rest_s, _LOOK_S))

    def _hanging(self, now_s: float) -> frozenset[str]:
        """Return the checks that have not come back for long."""
        hanging = {lane.hanging(now_s, PATIENCE_S) for lane in self._lanes} - {""}
        return frozenset((*hanging, EVENTS) if self._listener.is_hanging(now_s, PATIENCE_S) else hanging)

    def _wait(self, seconds: float) -> None:
        """Wait for news, for the agent to go away, or for so long."""
        if self._link.socket is None:
            seconds = min(seconds, max(self._link.retry_at_s - time.monotonic(), 0.01))
        waits: list[int | socket.socket] = (
            [self._reader] if self._link.socket is None else [self._reader, self._link.socket]
        )
        ready, _, _ = select.select(waits, [], [], max(seconds, 0.0))
        if self._reader in ready:
            os.read(self._reader, 4096)
        if self._link.socket is not None and self._link.socket in ready:
            self._link.receive(time.monotonic())

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return  # It is awake.


def _lane_of_faults(config: WatchConfig, board: Board) -> Sequence[Lane]:
    """Return the lane of what is found on purpose, in pods that allow it."""
    if not config.allows_faults:
        return ()

    def sample() -> Sequence[OrderedFinding]:
        return read_findings(config.directory, time.monotonic())

    return (Lane([Check(INJECTED, PERIOD_S, sample, judge_injected)], board.put),)


def make_lanes(config: WatchConfig, board: Board) -> Sequence[Lane]:
    """Return the built-in checks by what they may wait for; each reads with descriptors of its own."""
    clock = time.monotonic
    links, system = Files(config.root), Files(config.root)
    gpus = GpuReader(config.visible_devices, clock)
    adapters = ports.PortReader(links, clock)
    interfaces = ports.InterfaceReader(links, clock)
    devices = pcie.PcieReader(system, lambda: [*gpus.own_bus_ids(), *adapters_bus_ids(system)], clock)
    storage = StorageReader(config.storage)
    return (
        Lane([Check(GPU, _USUAL_S, gpus.sample, judge_gpus)], board.put),
        Lane(
            [
                Check(ports.PORTS, _FAST_S, adapters.sample, ports.judge_adapters),
                Check(ports.NETWORK, _FAST_S, interfaces.sample, ports.judge_interfaces),
            ],
            board.put,
        ),
        Lane(
            [
                Check(pcie.PCIE, _USUAL_S, devices.sample, pcie.judge_pcie),
                Check(node.MEMORY, _USUAL_S, partial(node.read_pressure, system), node.judge_pressure),
                Check(node.OOM, _USUAL_S, partial(node.read_oom, system, clock), node.judge_oom),
                Check(node.CLOCK, _SLOW_S, node.read_clock, node.judge_clock),
            ],
            board.put,
        ),
        Lane([Check(STORAGE, _SLOW_S, storage.sample, judge_storage)], board.put),
    )
