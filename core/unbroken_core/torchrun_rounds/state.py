"""What is known of a run's nodes and its newest round, and what follows from it for each node. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum

from unbroken_core.pod.liveness import RECOVERY_RECONNECT_S
from unbroken_core.torchrun_rounds.forming import FormingRound, RoundCandidate, growth_due_s
from unbroken_core.torchrun_rounds.messages import Departure, EndOfRounds, Intent, Limits, NodeReport, Stage, Standing


class RoundPhase(Enum):
    """Of the newest round."""

    FORMING = "forming"
    STARTING = "starting"
    RUNNING = "running"


@dataclass
class Node:
    """One node, as the rendezvous knows it."""

    report: NodeReport
    session: str | None
    near_address: str
    """Of the rendezvous, as this node reaches it."""
    far_address: str
    """Where its connection comes from."""
    heard_at_s: float
    away_since_s: float | None = None
    joined_at_s: float | None = None
    """Since when it wants to be in the next round; None: it does not."""
    admitted_attempt: int = 0
    """The wish that a round has fulfilled."""
    has_left: bool = False
    was_released: bool = False
    told: Standing | None = None
    """On its present connection."""

    @property
    def name(self) -> str:
        """For people."""
        return self.report.name


@dataclass
class RoundState:
    """All of one run. Seconds are of one monotonic clock."""

    nodes: dict[str, Node] = field(default_factory=dict)
    """By uid."""
    limits: Limits | None = None
    """None before the first node."""
    phase: RoundPhase = RoundPhase.FORMING
    started_at_s: float = -math.inf
    """When the phase STARTING has begun."""
    called_at_s: float = -math.inf
    """When the nodes of the round before were called to the next one."""
    number: int = -1
    """Of the newest round that has formed."""
    seen_number: int = -1
    """The highest number that any node knows."""
    world: tuple[str, ...] = ()
    """Uids of that round by rank."""
    places: dict[str, int] = field(default_factory=dict)
    """The same the other way round."""
    run_round: int = -1
    """Number of the newest round that has run."""
    previous: dict[str, int] = field(default_factory=dict)
    """Rank by uid of its nodes, as far as they are known."""
    size: int = 0
    """Number of its nodes."""
    runners: dict[str, int] = field(default_factory=dict)
    """Rank by uid of those who are in it still."""
    num_unknown: int = 0
    """How many of its nodes this rendezvous has not met since it was started."""
    unknown_until_s: float = math.inf
    broken: str = ""
    """Why that round is over; "" while it is not."""
    enough_since_s: float | None = None
    """Since when `min_nodes` want to be in the next one; None: they do not."""
    closed: str = ""
    """Why there will be no further round; "" while there may be one."""
    finished_by: str = ""
    """The node that has finished first; then nobody comes in who was not in its round."""
    message: str = ""
    """What the next round waits for."""

    def joining(self) -> list[Node]:
        """Return who wants to be in the next round."""
        return [node for node in self.nodes.values() if node.joined_at_s is not None]

    def forming(self, joining: list[Node], limits: Limits) -> FormingRound:
        """Return what decides about the next round, if these are to be in it."""
        leave_until_s = self.called_at_s + limits.leave_s if self.runners else -math.inf
        unknown_until_s = self.unknown_until_s if self.num_unknown else -math.inf
        return FormingRound(
            candidates=tuple(self._candidate(node) for node in joining),
            num_pending=len(self.runners) + self.num_unknown,
            pending_until_s=max(leave_until_s, unknown_until_s),
            previous_size=self.size,
            enough_since_s=self.enough_since_s,
            limits=limits,
        )

    def _candidate(self, node: Node) -> RoundCandidate:
        report = node.report
        since_s = 0.0 if node.joined_at_s is None else node.joined_at_s
        rank = self.previous.get(report.uid)
        return RoundCandidate(report.uid, report.name, report.domains, since_s, rank, node.session is not None)

    def growth_due_s(self, limits: Limits) -> float:
        """Return when the round that runs is called to make room for more; inf: never."""
        since_s = [node.joined_at_s for node in self.joining() if node.joined_at_s is not None]
        return growth_due_s(since_s, limits.max_nodes - len(self.runners) - self.num_unknown, limits.last_call_s)

    def lost_at_s(self, node: Node, limits: Limits) -> float:
        """Return when a node is lost if it reports nothing more."""
        silent_s = node.heard_at_s + limits.heartbeat_s
        if node.away_since_s is None:
            return silent_s
        is_waited_for = self.phase is not RoundPhase.RUNNING
        grace_s = min(limits.reconnect_s, RECOVERY_RECONNECT_S) if is_waited_for else limits.reconnect_s
        return min(silent_s, node.away_since_s + grace_s)

    def is_ready(self, uid: str) -> bool:
        """Return whether a node of the round that starts has opened its store, or reaches it."""
        report = self.nodes[uid].report
        return report.ready_round == self.number and (uid != self.world[0] or report.store_port > 0)

    # ------------------------------------------------------------------------------------------------------ one node's

    def standing(self, node: Node) -> Standing:
        """Return what a node is told."""
        uid = node.report.uid
        if node.has_left:
            return self._stand(node, Stage.LEFT if self._may_end(node) else Stage.RUNNING)
        if self.phase is RoundPhase.STARTING and uid in self.places:
            return self._starting(node)
        if uid in self.runners:
            num_waiting = 0 if self.phase is RoundPhase.RUNNING else max(len(self.joining()), 1)
            end = EndOfRounds.CLOSED if self.closed else EndOfRounds.NO
            message = self.broken or self.closed
            return self._stand(node, Stage.RUNNING, self.runners[uid], num_waiting, end=end, message=message)
        if node.report.intent is Intent.RUN:
            # Its round is over.
            return self._stand(node, Stage.RUNNING, node.report.rank, 1, message="the others are in a newer round")
        stage = Stage.SPARE if self.phase is RoundPhase.RUNNING else Stage.WAITING
        end, message = self._end(node)
        return self._stand(node, stage, end=end, message=message or self.message)

    def _end(self, node: Node) -> tuple[EndOfRounds, str]:
        """Return whether a node that wants to be in the next round waits in vain, and why."""
        if node.was_released:
            return EndOfRounds.RELEASED, f"{self.finished_by} has finished"
        if self.closed or (self.finished_by and node.joined_at_s is None):
            return EndOfRounds.CLOSED, self.closed or f"{self.finished_by} has finished"
        return EndOfRounds.NO, ""

    def _stand(
        self,
        node: Node,
        stage: Stage,
        rank: int = -1,
        num_waiting: int = 0,
        *,
        end: EndOfRounds = EndOfRounds.NO,
        message: str = "",
    ) -> Standing:
        attempt = node.report.attempt
        return Standing(
            stage, attempt, self.run_round, rank, self.size, num_waiting=num_waiting, end=end, message=message
        )

    def _starting(self, node: Node) -> Standing:
        rank, attempt = self.places[node.report.uid], node.report.attempt
        address, port = "", 0
        first = self.nodes.get(self.world[0])
        if first is not None:
            address = self.store_address(first)
            port = first.report.store_port if self.is_ready(first.report.uid) else 0
        message = "the nodes connect to the store" if port else "the node of rank 0 opens the store"
        return Standing(Stage.STARTING, attempt, self.number, rank, len(self.world), address, port, message=message)

    def _may_end(self, node: Node) -> bool:
        """Return whether a node that leaves may go: the one with the store stays for those who finish as well."""
        is_first = self.previous.get(node.report.uid) == 0
        return not (is_first and node.report.departure is Departure.FINISHED and self.runners)

    def store_address(self, first: Node) -> str:
        """Return the address at which the others reach a node.

        Where it comes from leads to it, unless that is this host's own: then the way on which others come here is its
        way as well.
        """
        if first.report.address:
            return first.report.address
        if not _is_loopback(first.far_address):
            return first.far_address
        others = (node.near_address for node in self.nodes.values())
        return next((address for address in others if not _is_loopback(address)), first.far_address)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
