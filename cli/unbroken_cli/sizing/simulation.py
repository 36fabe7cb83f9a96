"""One run of a job, from fault to fault: observe what is due, account for the time until then, act.

    training ──fault──> detecting ──plan──> restarting ──> training
                            │  too few nodes     ▲
                            └──> waiting ──node──┘

All times are whole ticks, so that the terms add up to the time that has passed, exactly.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np

from unbroken_cli.sizing.checkpoints import CheckpointClock
from unbroken_cli.sizing.faults import TICKS, FaultEvent, is_lemon
from unbroken_cli.sizing.placement import PodPlacement
from unbroken_cli.sizing.scenario import LOSING, Scenario, Scope
from unbroken_cli.sizing.spreads import MAX_DRAWS, Distribution
from unbroken_core.vocabulary.reasons import Rung


class Term(IntEnum):
    """What a stretch of time was for."""

    PROGRESS = 0
    CHECKPOINT = 1
    REDO = 2
    DETECT = 3
    RESTART = 4
    WAITING = 5


TERMS = tuple(term.name.lower() for term in Term)
_RETURN, _REPAIRED, _GROW = range(3)
_ARRIVALS = (_RETURN, _REPAIRED)
_TRAINING, _DETECTING, _RESTARTING, _WAITING = range(4)
_TERM_OF = {_DETECTING: Term.DETECT, _RESTARTING: Term.RESTART, _WAITING: Term.WAITING}
NO_FAULT = "no fault"
GROWTH = "capacity returned"


@dataclass
class Outcome:
    """What became of one run. Ticks, and ticks times GPUs."""

    duration: int
    by_cause: list[list[int]]
    """Ticks by cause and term; causes are the scenario's classes, then GROWTH, then NO_FAULT."""
    missing_by_cause: list[list[int]]
    """As `by_cause`, times the GPUs that were wanted and were not there."""
    held_nodes: int = 0
    """Ticks times nodes that were active or spare."""
    num_interruptions: int = 0
    num_waits: int = 0
    """Interruptions that had to wait for a node."""
    most_out: int = 0


class Run:
    """The state of one run; `simulate` drives it."""

    def __init__(self, scenario: Scenario, placement: PodPlacement) -> None:
        self._scenario, self._placement = scenario, placement
        self._clock = CheckpointClock(scenario.tiers)
        self._growth = len(scenario.faults)
        self._nothing = self._growth + 1
        self.outcome = Outcome(
            0,
            [[0] * len(Term) for _ in range(self._nothing + 1)],
            [[0] * len(Term) for _ in range(self._nothing + 1)],
        )
        self._now = 0
        """Until when the time is accounted for; a job that trains may have gone on since."""
        self._held_until = 0
        self._total = scenario.total_nodes
        self._full = scenario.num_nodes * scenario.gpus_per_node
        self._removes_lemons = scenario.lemons.removed_after is not None
        self._state, self._until = _TRAINING, 0
        self._cause = self._nothing
        self._restart = 0
        self._restore = 0
        self._peak = 0
        """Most work that was ever done: what is below is done again."""
        self._due: list[tuple[int, int, int, int]] = []
        self._num_tickets = 0
        self._waiting_out: dict[int, int] = {}
        """Node by ticket, of those that are out until they are repaired."""
        self._free = scenario.refill.nodes if scenario.refill is not None else 0
        self._chance = random.Random(0)
        self._lemon_faults: dict[int, int] = {}
        self._grow_at: int | None = None
        self._members: dict[tuple[Scope, int], list[int]] = {}
        self._domains = scenario.domains()
        self._severity = [[scenario.severity(fault, rung) for rung, _share in fault.rungs] for fault in scenario.faults]
        self._rungs = [[rung for rung, _share in fault.rungs] for fault in scenario.faults]
        self._in_process = dict(scenario.restart)[Rung.IN_PROCESS]

    # ------------------------------------------------------------------------------------------------------- time

    def advance(self, until: int) -> None:
        """Let the time pass: what is due until then happens."""
        due = self._due
        while due and due[0][0] <= until:
            at, kind, ticket, node = heappop(due)
            if kind in _ARRIVALS:
                # A spare more is nothing to a job that trains.
                if self._state != _TRAINING:
                    self._pass(at)
                self._come_back(kind, ticket, node, at)
            else:
                self._pass(at)
                self._grow()
        self._pass(until)

    def end(self, at: int) -> None:
        """The run is over."""
        self.advance(at)
        self._hold(at)
        self.outcome.duration = at

    def _hold(self, at: int) -> None:
        """Account for the nodes that were held until now; before their number changes."""
        self.outcome.held_nodes += (at - self._held_until) * self._placement.healthy
        self._held_until = at

    def _pass(self, until: int) -> None:
        """Account for the time until then, phase by phase."""
        while self._now < until:
            if self._state == _TRAINING:
                self._train(until - self._now)
                self._now = until
                return
            end = until if self._state == _WAITING else min(self._until, until)
            self._spend(_TERM_OF[self._state], end - self._now)
            self._now = end
            if self._state != _WAITING and end == self._until:
                self._next_phase()
        # A phase of no length ends at once.
        while self._state in (_DETECTING, _RESTARTING) and self._until <= self._now:
            self._next_phase()

    def _next_phase(self) -> None:
        if self._state == _RESTARTING:
            self._state = _TRAINING
        elif self._placement.plan():
            self._state, self._until = _RESTARTING, self._now + self._restart + self._restore
        else:
            self.outcome.num_waits += 1
            self._state = _WAITING

    def _spend(self, term: Term, ticks: int) -> None:
        self.outcome.by_cause[self._cause][term] += ticks
        held = self._placement.healthy * self._scenario.gpus_per_node
        missing = self._full - (min(held, self._full) if term is Term.WAITING else self._placement.gpus)
        if missing:
            self.outcome.missing_by_cause[self._cause][term] += ticks * missing

    def _train(self, ticks: int) -> None:
        clock, peak = self._clock, self._peak
        before = clock.work
        stood = clock.run(ticks)
        after = clock.work
        again = 0
        if before < peak:
            again = (after if after < peak else peak) - before
        if after > peak:
            self._peak = after
        outcome = self.outcome
        plain = outcome.by_cause[self._nothing]
        plain[Term.PROGRESS] += ticks - stood - again
        plain[Term.CHECKPOINT] += stood
        outcome.by_cause[self._cause][Term.REDO] += again
        missing = self._full - self._placement.gpus
        if missing:
            plain = outcome.missing_by_cause[self._nothing]
            plain[Term.PROGRESS] += (ticks - stood - again) * missing
            plain[Term.CHECKPOINT] += stood * missing
            outcome.missing_by_cause[self._cause][Term.REDO] += again * missing

    # ----------------------------------------------------------------------------------------------------- faults

    def strike(self, event: FaultEvent) -> None:
        """A fault happens now."""
        fault = self._scenario.faults[event.fault]
        rung = self._rungs[event.fault][event.rung]
        if fault.scope is Scope.SOFTWARE:
            if self._state == _WAITING:
                return  # Nothing of the job runs.
        elif not self._hit(event, takes=fault.repair is not None and rung in LOSING):
            return
        self._interrupt(event.fault, event.detect, event.restart, self._severity[event.fault][event.rung])

    def _hit(self, event: FaultEvent, takes: bool) -> bool:
        """Take the nodes out that are hit; return whether the job must be interrupted."""
        placement, nodes = self._placement, self._nodes(event)
        if self._removes_lemons and self._is_spared(event):
            return False
        if not takes:
            return any(placement.is_active(node) for node in nodes)
        lost = [node for node in nodes if not placement.is_out(node)]
        if not lost:
            return False
        self._hold(self._now)
        num_active = placement.lose(lost)
        for node in lost:
            self._send_to_repair(node, event.repair)
        self.outcome.most_out = max(self.outcome.most_out, self._total - placement.healthy)
        return num_active > 0

    def _nodes(self, event: FaultEvent) -> list[int]:
        fault = self._scenario.faults[event.fault]
        if fault.scope not in (Scope.DOMAIN, Scope.SWITCH):
            return [event.target]
        domain = self._domains[event.target]
        key = (fault.scope, domain if fault.scope is Scope.DOMAIN else self._scenario.rack_of(domain))
        members = self._members.get(key)
        if members is None:
            names = self._domains
            if fault.scope is Scope.SWITCH:
                names = [self._scenario.rack_of(domain) for domain in names]
            members = self._members[key] = [node for node, name in enumerate(names) if name == key[1]]
        if fault.share == 1:
            return members
        chance = random.Random(event.seed)
        return [node for node in members if chance.random() < fault.share]

    def _is_spared(self, event: FaultEvent) -> bool:
        """Return whether a fault of a lemon does not happen, as a sound node has taken its place."""
        node, lemons = event.target, self._scenario.lemons
        if self._scenario.faults[event.fault].scope in (Scope.DOMAIN, Scope.SWITCH) or not is_lemon(
            self._scenario, node
        ):
            return False
        count = self._lemon_faults.get(node, 0)
        if count >= (lemons.removed_after or 0) and event.chance * lemons.factor >= 1:
            return True
        self._lemon_faults[node] = count + 1
        return False

    def _interrupt(self, cause: int, detect: int, restart: int, severity: int | None) -> None:
        """End the iteration; without severity it is planned, after a step that is saved, and nothing is lost."""
        restore = 0
        if severity is not None:
            _lost, restore, _tier = self._clock.go_back(severity)
        self.outcome.num_interruptions += 1
        self._restart, self._restore, self._cause = restart, restore, cause
        if self._state == _WAITING:
            return
        until = self._now + detect
        self._until = max(until, self._until) if self._state == _DETECTING else until
        self._state = _DETECTING
        self._pass(self._now)

    # ------------------------------------------------------------------------------------------------------ nodes

    def _send_to_repair(self, node: int, repair: int) -> None:
        refill = self._scenario.refill
        self._num_tickets += 1
        ticket = self._num_tickets
        if self._free and refill is not None:
            self._free -= 1
            heappush(self._due, (self._now + self._draw(refill.after), _RETURN, ticket, node))
            heappush(self._due, (self._now + repair, _REPAIRED, ticket, -1))
            return
        self._waiting_out[ticket] = node
        heappush(self._due, (self._now + repair, _REPAIRED, ticket, node))

    def _draw(self, spread: Distribution) -> int:
        """Return a sample in ticks, of what no fault has brought with it."""
        draws = np.array([[self._chance.random() for _ in range(MAX_DRAWS)]])
        return round(float(spread.sample(draws)[0]) * TICKS)

    def _come_back(self, kind: int, ticket: int, node: int, at: int) -> None:
        if kind == _REPAIRED and self._waiting_out.pop(ticket, None) is None:
            self._supply(at)
            return
        self._hold(at)
        self._placement.restore(node)
        if self._state == _WAITING and self._placement.plan():
            self._state, self._until = _RESTARTING, self._now + self._restart + self._restore
            return
        grow_back_s = self._scenario.grow_back_s
        if grow_back_s is not None and self._grow_at is None and self._placement.may_grow():
            self._grow_at = at + round(grow_back_s * TICKS)
            heappush(self._due, (self._grow_at, _GROW, 0, 0))

    def _supply(self, at: int) -> None:
        """A repaired node is free: it replaces one that is still out, or waits."""
        refill = self._scenario.refill
        if not self._waiting_out or refill is None:
            self._free += 1
            return
        ticket = next(iter(self._waiting_out))
        node = self._waiting_out.pop(ticket)
        heappush(self._due, (at + self._draw(refill.after), _RETURN, ticket, node))

    def _grow(self) -> None:
        self._grow_at = None
        if self._state == _TRAINING and self._placement.may_grow():
            self._interrupt(self._growth, 0, self._draw(self._in_process), None)


def simulate(scenario: Scenario, placement: PodPlacement, events: Iterable[FaultEvent]) -> Outcome:
    """Return what becomes of a job that these faults hit, in the order of time."""
    run = Run(scenario, placement)
    for event in events:
        run.advance(event.at)
        run.strike(event)
    run.end(round(scenario.duration_s * TICKS))
    return run.outcome


def cause_names(scenario: Scenario) -> list[str]:
    """Return the names of `by_cause`."""
    return [*(fault.name for fault in scenario.faults), GROWTH, NO_FAULT]
