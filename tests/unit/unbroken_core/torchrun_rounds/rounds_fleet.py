"""Nodes and a rendezvous that exist in one thread and on one clock: the rounds are the real one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unbroken_core.protocol import wire
from unbroken_core.torchrun_rounds.messages import (
    PROTOCOL,
    Departure,
    EndOfRounds,
    Intent,
    Limits,
    NodeReport,
    Rejected,
    Stage,
    Standing,
    ToNode,
)
from unbroken_core.torchrun_rounds.rounds import Disconnect, RunRounds, SendToNode

LIMITS = Limits(
    min_nodes=2, max_nodes=4, last_call_s=30.0, heartbeat_s=15.0, reconnect_s=2.0, leave_s=40.0, start_s=60.0
)


@dataclass
class Member:
    """One node, doing what the handler does."""

    report: NodeReport
    standing: Standing | None = None
    rejected: str = ""
    session: str | None = None
    is_dead: bool = False
    can_open: bool = True
    can_connect: bool = True
    is_obedient: bool = True
    """Comes to the next round as soon as it is called."""

    @property
    def running(self) -> int:
        """The round that its workers run in; -1: none."""
        return self.report.round if self.report.intent is Intent.RUN else -1


class Fleet:
    """Everything that happens is a call; time passes in `sleep` alone."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.rounds = RunRounds()
        self.now_s = 100.0
        self.members: dict[str, Member] = {}
        self.begun: dict[int, dict[int, str]] = {}
        """Name by rank, by round: who was told that it runs."""
        self.is_store_reachable = True
        self._num_sessions = 0

    # ------------------------------------------------------------------------------------------------------- the nodes

    def add(self, *names: str, **facts: Any) -> None:
        """Connect nodes, which want to be in the next round."""
        for name in names:
            report = NodeReport(PROTOCOL, f"uid-{name}", name, "", (), self.limits, Intent.IDLE)
            self.members[name] = Member(replace(report, **facts))
            self.connect(name)
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        """Call `next_rendezvous`."""
        report = self.members[name].report
        self.say(name, intent=Intent.JOIN, attempt=report.attempt + 1)

    def leave(self, name: str, departure: Departure = Departure.FINISHED, **changes: Any) -> None:
        """Call `shutdown`."""
        self.say(name, intent=Intent.LEAVE, departure=departure, detail="words", **changes)

    def kill(self, name: str) -> None:
        """End its process: the connection breaks."""
        self.members[name].is_dead = True
        self.disconnect(name)

    def say(self, name: str, **changes: Any) -> None:
        """Change a report, and send it."""
        member = self.members[name]
        member.report = replace(member.report, **changes)
        self._send(name)
        self.settle()

    # --------------------------------------------------------------------------------------------------------- network

    def connect(self, name: str) -> None:
        """Open a new connection."""
        self._num_sessions += 1
        self.members[name].session = f"session-{self._num_sessions}"
        self._send(name)
        self.settle()

    def disconnect(self, name: str) -> None:
        """Break the connection."""
        session, self.members[name].session = self.members[name].session, None
        if session is not None:
            self.rounds.lose(session, self.now_s)
        self.settle()

    def restart_rendezvous(self) -> None:
        """Begin with a rendezvous that knows nothing but the number and size of the newest round."""
        self.rounds = RunRounds(self.rounds.newest)
        for member in self.members.values():
            member.session = None

    def pass_time(self, seconds: float, *, silent: tuple[str, ...] = ()) -> None:
        """Let virtual time pass; whoever is connected sends heartbeats, but for those that are named."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            wanted_s = self.rounds.deadline_s if self.rounds.num_nodes else until_s
            self.now_s = min(until_s, max(wanted_s, self.now_s + 1e-6), self.now_s + self.limits.heartbeat_s / 3)
            for name in self.members:
                if name not in silent:
                    self._send(name)
            self.settle()

    # ------------------------------------------------------------------------------------------------------- internals

    def _send(self, name: str) -> None:
        member = self.members[name]
        if member.session is not None and not member.is_dead:
            report: NodeReport = wire.decode(wire.encode(member.report), NodeReport)
            if not self.rounds.receive(member.session, report, ("10.0.0.1", f"10.0.1.{len(name)}"), self.now_s):
                self._perform(self.rounds.answers())

    def settle(self) -> None:
        """Let the rounds decide, and the nodes obey, until nothing happens any more."""
        for _ in range(200):
            if not self._perform(self.rounds.settle(self.now_s)):
                return
        raise AssertionError("want the fleet to come to rest, it does not")

    def _perform(self, actions: list[Any]) -> bool:
        is_changed = False
        for action in actions:
            name = next((n for n, m in self.members.items() if m.session == getattr(action, "session", "")), None)
            if name is None:
                continue
            if isinstance(action, SendToNode):
                is_changed |= self._obey(name, wire.decode(wire.encode(action.message), ToNode))
            elif isinstance(action, Disconnect):
                self.members[name].session = None
                self.rounds.lose(action.session, self.now_s)
                is_changed = True
        return is_changed

    def _obey(self, name: str, message: Standing | Rejected) -> bool:
        member = self.members[name]
        if member.is_dead:
            return False
        if isinstance(message, Rejected):
            member.rejected = message.message
            return False
        member.standing, before = message, member.report
        report = replace(before, seen_round=max(before.seen_round, message.round))
        if message.stage is not Stage.STARTING and message.round > before.known_round:
            report = replace(report, known_round=message.round, known_size=message.size)
        if message.attempt == before.attempt and before.intent is Intent.JOIN:
            report = self._after(member, report, message)
        elif before.intent is Intent.RUN and message.num_waiting and member.is_obedient:
            report = replace(report, intent=Intent.JOIN, attempt=report.attempt + 1)
        member.report = report
        is_new = report != before
        if is_new:
            self._send(name)
        return is_new

    def _after(self, member: Member, report: NodeReport, standing: Standing) -> NodeReport:
        """Return what a node says that waits for a round."""
        if standing.stage is Stage.STARTING and report.ready_round != standing.round:
            if standing.rank == 0 and member.can_open:
                return replace(report, ready_round=standing.round, store_port=4000 + standing.round)
            if standing.rank > 0 and standing.store_port and member.can_connect and self.is_store_reachable:
                return replace(report, ready_round=standing.round, store_port=0)
        if standing.stage is Stage.RUNNING and standing.round == report.ready_round:
            ranks = self.begun.setdefault(standing.round, {})
            assert standing.rank not in ranks, f"two nodes with rank {standing.rank} in round {standing.round}"
            ranks[standing.rank] = report.name
            return replace(report, intent=Intent.RUN, round=standing.round, rank=standing.rank)
        return report

    # ------------------------------------------------------------------------------------------------------- to assert

    def world(self) -> list[str]:
        """Return who runs in the newest round, by rank; [] where somebody is elsewhere."""
        return [self.begun[max(self.begun)][rank] for rank in sorted(self.begun[max(self.begun)])] if self.begun else []

    def where(self, condition: Callable[[Member], bool]) -> set[str]:
        """Return the nodes that live of which something is true."""
        return {name for name, member in self.members.items() if not member.is_dead and condition(member)}

    def runners(self) -> set[str]:
        """Return who runs in the newest round and need not leave it."""
        newest = max(self.begun, default=-1)
        return self.where(lambda m: m.running == newest >= 0 and (m.standing is None or m.standing.num_waiting == 0))

    def end_of(self, name: str) -> EndOfRounds:
        """Return what a node was told of the end."""
        standing = self.members[name].standing
        return EndOfRounds.NO if standing is None else standing.end
