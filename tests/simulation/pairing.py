"""Tests of pods with each other: which pods and links are broken, what pods say of it, and whom that may name."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unbroken_core.coordinator.events import Action, Send
from unbroken_core.coordinator.health.pairs import GRACE_S, PAIR_S
from unbroken_core.coordinator.state.phases import Forming
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.vocabulary.findings import PAIRS, Verdict

if TYPE_CHECKING:
    from tests.simulation.pod import Pod
    from tests.simulation.world import World

_SLACK_S = 1e-6


class PairingError(AssertionError):
    """Somebody is named that may not be, or waited for without an end, or disturbed while it trains."""


class Pairing:
    """Ground truth of pods and links, and what is told of tests between them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_on = world.settings.preflight_pairs
        self.random = random.Random(f"pairs of {world.schedule.seed}")
        self.bad: set[str] = set()
        """Uids of pods that fail with everybody."""
        self.links: set[frozenset[str]] = set()
        """Pairs that fail with each other alone."""
        self.num_orders = 0
        self.num_named = 0
        self._manner: dict[str, str] = {}
        """How each pod answers: well, never, late, wrong (to another order), unsure; old: it knows of no tests."""
        self._states: dict[str, PairState] = {}
        self._given: dict[tuple[int, int], list[Pod]] = {}
        """Who was told to test with whom."""
        self._named: set[str] = set()

    def begin(self, pod: Pod) -> None:
        """A pod is there."""
        if not self.is_on:
            return
        manner = self.random.choice(["well"] * 12 + ["never", "late", "wrong", "unsure", "old"])
        self._manner[pod.uid] = manner
        self._states[pod.uid] = PairState(29000, "10.0.0.1")
        if self.random.random() < 0.12:
            self.bad.add(pod.uid)
            self.world.guilty_pods.add(pod.uid)
        others = [uid for uid, each in self.world.pods.items() if each.is_alive and not self._has_link(uid)]
        if len(others) > 1 and self.random.random() < 0.2:
            # One of a pod's at most: two broken ones of few cannot be told from a broken pod.
            self.links.add(frozenset((pod.uid, self.random.choice([uid for uid in others if uid != pod.uid]))))

    def _has_link(self, uid: str) -> bool:
        return any(uid in link for link in self.links)

    def of(self, pod: Pod) -> PairState | None:
        """Return what an agent tells of its pod's tests."""
        if not self.is_on or self._manner.get(pod.uid) == "old":
            return None
        state = self._states[pod.uid]
        # Who has ranks takes no more tests, ever.
        return state if state.port and not self._has_ranks(pod) else self._end(pod)

    def _has_ranks(self, pod: Pod) -> bool:
        plan = pod.plan
        return plan is not None and plan.iteration > pod.interrupted and any(p.rank is not None for p in plan.ranks)

    def _end(self, pod: Pod) -> PairState:
        self._states[pod.uid] = replace(self._states[pod.uid], port=0)
        return self._states[pod.uid]

    def hear(self, pod: Pod, order: PairOrder) -> None:
        """A pod is told to test with another one: its end comes a moment later, or after its time."""
        if self._manner[pod.uid] == "old":
            raise PairingError(f"{pod.name} knows no such order: {order}")
        # A rendezvous that was lost with all of its pods begins with the same numbers again.
        told = [each for each in self._given.get((order.term, order.number), ()) if each.is_alive]
        self._given[order.term, order.number] = [*told, pod]
        self.world.after(self.random.uniform(0.2, 2.0), partial(self._finish, pod, order), "")

    def _finish(self, pod: Pod, order: PairOrder) -> None:
        pair = self._given[order.term, order.number]
        if len({each.uid for each in pair}) == 2 and all(each.is_alive for each in pair):
            uids = {each.uid for each in pair}
            has_passed = self.bad.isdisjoint(uids) and frozenset(uids) not in self.links
            self._say(pod, order, has_passed)
        else:
            # Nobody came: it fails once its time is over.
            self.world.after(order.within_s, partial(self._say, pod, order, False), "")

    def _say(self, pod: Pod, order: PairOrder, has_passed: bool) -> None:
        manner = self._manner[pod.uid]
        if manner == "never" or not pod.is_alive or not self._states[pod.uid].port:
            return
        if manner == "late":
            self.world.after(PAIR_S + GRACE_S + 1.0, partial(self._tell, pod, order, False), "")
            return
        if manner == "wrong":
            order = replace(order, number=order.number + self.random.choice([-1, 1, 7]))
        self._tell(pod, order, None if manner == "unsure" else has_passed)

    def _tell(self, pod: Pod, order: PairOrder, has_passed: bool | None) -> None:
        if pod.is_alive:
            state = self._states[pod.uid]
            self._states[pod.uid] = replace(state, term=order.term, number=max(order.number, 0), has_passed=has_passed)
            pod.report()

    # ------------------------------------------------------------------------------------------------------ what holds

    def check(self, actions: list[Action]) -> None:
        """Check what one step of the coordinator has ordered and said."""
        coordinator = self.world.coordinator
        if coordinator is None:
            return
        job = coordinator._job
        orders = [action for action in actions if isinstance(action, Send) and isinstance(action.message, PairOrder)]
        if orders and not self.is_on:
            raise PairingError(f"nobody wants tests of pairs: {orders}")
        if not self.is_on:
            return
        self.num_orders += len(orders)
        for action in orders:
            pod = self.world.connections[action.session].pod
            if job.members.by_uid[pod.uid].ranks:
                raise PairingError(f"{pod.name} has ranks, and is told to test: {action.message}")
        self._check_waits()
        for uid, findings in job.health.pairs.items():
            for finding in findings:
                self._check_finding(uid, finding.entity, finding.verdict)

    def _check_waits(self) -> None:
        """Check that tests end, and that the first plan waits for them no longer than it may."""
        coordinator = self.world.coordinator
        assert coordinator is not None
        job, now_s, due_s = coordinator._job, self.world.now_s, coordinator.next_deadline_s()
        flight = job.pairs.flight
        if flight is not None:
            latest_s = min(flight.until_s, flight.due_s)
            if due_s is None or due_s > latest_s or latest_s > now_s + PAIR_S + GRACE_S + _SLACK_S:
                raise PairingError(f"a round of tests that began before {now_s:.1f} s is looked at at {due_s}")
        if isinstance(job.phase, Forming) and "tests of pods with each other" in job.report.message:
            until_s = job.phase.pairs_until_s
            if until_s is not None and now_s > until_s + _SLACK_S and due_s is not None and due_s <= until_s:
                raise PairingError(f"the first plan still waits for tests that were to end at {until_s:.1f} s")

    def _check_finding(self, uid: str, entity: str, verdict: Verdict) -> None:
        if verdict.severity <= Verdict.OK.severity:
            return
        if not entity and uid not in self.bad:
            raise PairingError(f"{uid} is named by {PAIRS}, and is sound")
        if not entity and uid not in self._named:
            self._named.add(uid)
            self.num_named += 1
        if not entity:
            return
        # Of two pods either may be it; of those that test with others the link is.
        others = {each.uid for each in self.world.pods.values() if each.name == entity}
        if uid in self.bad or others & self.bad or any(frozenset((uid, other)) in self.links for other in others):
            return
        raise PairingError(f"the link of {uid} to {entity} is named, and is sound")
