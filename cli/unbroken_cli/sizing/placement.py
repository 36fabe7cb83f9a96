"""Who is active, and who is spare: with the product's planner, or by counts that give its answer in less time.

Where a spare may be promoted anywhere, the world's size depends on the number of healthy nodes alone, so counting them
is enough. Where spares stay within a domain or rack, only the planner knows.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from unbroken_cli.sizing.scenario import Scenario
from unbroken_core.ranks.ranking import Ranking
from unbroken_core.ranks.worlds import Shortage
from unbroken_core.vocabulary.layers import Layer


class PodPlacement(Protocol):
    """One job's nodes."""

    gpus: int
    """Active ranks of the last plan, less those that were lost since."""
    healthy: int
    """Nodes that are active or spare."""

    def is_active(self, node: int) -> bool:
        """Return whether a node is in the world."""

    def is_out(self, node: int) -> bool:
        """Return whether a node was lost."""

    def lose(self, nodes: Iterable[int]) -> int:
        """Take healthy nodes out; return how many of them were active."""

    def restore(self, node: int) -> None:
        """Bring a lost node back, as a spare."""

    def plan(self) -> bool:
        """Cut the next world; return whether it is large enough. If not, nothing changes."""

    def may_grow(self) -> bool:
        """Return whether the next plan would be larger."""


def make_placement(scenario: Scenario, with_planner: bool = False) -> PodPlacement:
    """Return the faster one that gives the planner's answer."""
    if with_planner or scenario.stays_within is not None:
        return PlannerPlacement(scenario)
    return CountPlacement(scenario)


_SPARE, _ACTIVE, _OUT = range(3)


class CountPlacement:
    """Promotes the nearest spare: of the domain, of the rack, then any."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rules = scenario.rules
        self._size = scenario.gpus_per_node
        self._domain = scenario.domains()
        self._rack = [scenario.rack_of(domain) for domain in range(scenario.num_domains)]
        self._role = bytearray(scenario.total_nodes)
        self._by_domain: dict[int, list[int]] = {}
        self._by_rack: dict[int, list[int]] = {}
        self._anywhere: list[int] = []
        self._vacated: list[int] = []
        self._worlds: dict[int, int] = {}
        self.healthy = scenario.total_nodes
        self._active = 0
        self.gpus = 0
        wanted = -(-self._rules.wanted_ranks // self._size)
        self._role[:wanted] = bytes([_ACTIVE]) * wanted
        self._active = wanted
        for node in range(scenario.total_nodes - 1, wanted - 1, -1):
            self._note_spare(node)
        self.gpus = self._world(self.healthy)

    def is_active(self, node: int) -> bool:
        """Return whether a node is in the world."""
        return self._role[node] == _ACTIVE

    def is_out(self, node: int) -> bool:
        """Return whether a node was lost."""
        return self._role[node] == _OUT

    def lose(self, nodes: Iterable[int]) -> int:
        """Take healthy nodes out; return how many of them were active."""
        num_active = 0
        for node in nodes:
            role = self._role[node]
            if role == _ACTIVE:
                num_active += 1
                self._vacated.append(node)
            self.healthy -= role != _OUT
            self._role[node] = _OUT
        self._active -= num_active
        self.gpus = max(self.gpus - num_active * self._size, 0)
        return num_active

    def restore(self, node: int) -> None:
        """Bring a lost node back, as a spare."""
        self._role[node] = _SPARE
        self.healthy += 1
        self._note_spare(node)

    def plan(self) -> bool:
        """Cut the next world; return whether it is large enough. If not, nothing changes."""
        gpus = self._world(self.healthy)
        if gpus == 0:
            return False
        want = -(-gpus // self._size)
        for node in self._vacated:
            if self._active < want:
                self._promote(node)
        self._vacated = []
        while self._active < want:
            self._promote(None)
        while self._active > want:
            last = self._role.rfind(_ACTIVE)
            self._role[last] = _SPARE
            self._active -= 1
            self._note_spare(last)
        self.gpus = gpus
        return True

    def may_grow(self) -> bool:
        """Return whether the next plan would be larger."""
        return self._world(self.healthy) > self.gpus

    def _world(self, healthy: int) -> int:
        found = self._worlds.get(healthy)
        if found is None:
            rules = self._rules
            count = min(healthy, rules.replicas)
            is_enough = count >= rules.least_pods
            found = self._worlds[healthy] = rules.world_size(count * self._size) if is_enough else 0
        return found

    def _note_spare(self, node: int) -> None:
        domain = self._domain[node]
        self._by_domain.setdefault(domain, []).append(node)
        self._by_rack.setdefault(self._rack[domain], []).append(node)
        self._anywhere.append(node)

    def _promote(self, near: int | None) -> None:
        if near is not None:
            domain = self._domain[near]
            for nodes in (self._by_domain.get(domain), self._by_rack.get(self._rack[domain])):
                if nodes and self._take(nodes):
                    return
        self._take(self._anywhere)

    def _take(self, nodes: list[int]) -> bool:
        # A node is in several lists, and stays in some of them when it has been promoted or lost.
        while nodes:
            node = nodes.pop()
            if self._role[node] == _SPARE:
                self._role[node] = _ACTIVE
                self._active += 1
                return True
        return False


class PlannerPlacement:
    """The coordinator's own ranking; each node is a pod, and another one when it comes back.

    A plan of 2,000 nodes takes milliseconds.
    """

    def __init__(self, scenario: Scenario) -> None:
        within = scenario.stays_within
        layers = (Layer("rack", replace_from=within != "domain"), Layer("domain"))
        root = Layer(replace_from=within is None)
        self._ranking = Ranking(replace(scenario.rules, layers=layers, root=root))
        self._locals = tuple(range(scenario.gpus_per_node))
        self._domains = scenario.domains()
        self._racks = [scenario.rack_of(domain) for domain in range(scenario.num_domains)]
        self._uid = [""] * scenario.total_nodes
        """Of the pod on each node; empty while it is out."""
        self._visits = [0] * scenario.total_nodes
        self.healthy = 0
        self.gpus = 0
        for node in range(scenario.total_nodes):
            self.restore(node)
        outcome = self._ranking.first(frozenset(self._uid[: scenario.num_nodes]))
        if not isinstance(outcome, Shortage):
            self._ranking.take()
            self.gpus = outcome.world_size

    def is_active(self, node: int) -> bool:
        """Return whether a node is in the world."""
        return bool(self._uid[node]) and self._ranking.has_rank(self._uid[node], 0)

    def is_out(self, node: int) -> bool:
        """Return whether a node was lost."""
        return not self._uid[node]

    def lose(self, nodes: Iterable[int]) -> int:
        """Take healthy nodes out; return how many of them were active."""
        num_active = 0
        for node in nodes:
            if self._uid[node]:
                num_active += self.is_active(node)
                self._ranking.remove(self._uid[node])
                self._uid[node] = ""
                self.healthy -= 1
        self.gpus = max(self.gpus - num_active * len(self._locals), 0)
        return num_active

    def restore(self, node: int) -> None:
        """Bring a lost node back, as a spare."""
        self._visits[node] += 1
        domain = self._domains[node]
        uid = self._uid[node] = f"{node}.{self._visits[node]}"
        self._ranking.place(uid, f"node-{node}", (f"rack-{self._racks[domain]}", f"domain-{domain}"))
        self._ranking.fit(uid, self._locals)
        self.healthy += 1

    def plan(self) -> bool:
        """Cut the next world; return whether it is large enough. If not, nothing changes."""
        outcome = self._ranking.following(may_promote=True, may_grow=True)
        if isinstance(outcome, Shortage):
            return False
        self._ranking.take()
        self.gpus = outcome.world_size
        return True

    def may_grow(self) -> bool:
        """Return whether the next plan would be larger."""
        outcome = self._ranking.following(may_promote=True, may_grow=True)
        size = 0 if isinstance(outcome, Shortage) else outcome.world_size
        _ = self._ranking.tree  # Takes the plan back, so that `is_active` speaks of the world that counts.
        return size > self.gpus
