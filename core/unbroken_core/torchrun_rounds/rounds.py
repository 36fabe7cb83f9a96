"""The rounds of one run: who is in the next one, when it begins, and who is to leave the one that runs. Pure.

    FORMING ──enough nodes──> STARTING ──all reach the store──> RUNNING
       ^                         │ a node is lost                  │ a node wants another round, is lost, gives up,
       └─────────────────────────┴─────────────────────────────────┘ or there is room for one that waits

In FORMING nodes of the round before may still run: they are called, and waited for. What a node says is its whole state
(`round_messages`), so all of this is rebuilt from the nodes when the rendezvous was started again: a round whose nodes
come back is taken over, and those of its nodes that do not come in `heartbeat_s` are lost.
"""

import math
from dataclasses import dataclass, replace
from typing import Union

from unbroken_core.torchrun_rounds.forming import NotYet, decide_round
from unbroken_core.torchrun_rounds.messages import Departure, Intent, Limits, NodeReport, Rejected, ToNode, check_report
from unbroken_core.torchrun_rounds.state import Node, RoundPhase, RoundState
from unbroken_core.vocabulary.plurals import counted

KEEP_S = 10.0
"""So long a run that has ended turns away nodes that come late; then its name is free again."""
_MAX_NAMES = 16


@dataclass(frozen=True)
class SendToNode:
    """Send a message on a connection."""

    session: str
    message: ToNode


@dataclass(frozen=True)
class Disconnect:
    """Close a connection after what was sent before."""

    session: str


@dataclass(frozen=True)
class Note:
    """One line for the log."""

    text: str


Action = Union[SendToNode, Disconnect, Note]


class RunRounds:
    """One run. Seconds are of one monotonic clock.

    Say what happened (`receive`, `lose`), then let it `settle`: it says what is to be done. `deadline_s` says when to
    settle at the latest. It does not matter how many events lie between two.
    """

    def __init__(self, earlier: tuple[int, int] = (-1, 0)) -> None:
        """`earlier`: number and size of the newest round that a rendezvous before this one has begun; -1: none."""
        self._state = RoundState()
        self._earlier = earlier
        self._uid_by_session: dict[str, str] = {}
        self._empty_since_s: float | None = None
        self._out: list[Action] = []
        self.num_begun = 0
        """Rounds that have begun in this run, not those that it took over."""
        self.deadline_s = math.inf

    # --------------------------------------------------------------------------------------------------------- observe

    def receive(self, session: str, report: NodeReport, addresses: tuple[str, str], now_s: float) -> bool:
        """Take in what a node says; return whether anything is new, so that `settle` is called for.

        `addresses` are those of the rendezvous and of the node, of their connection. Raises WireError when the report
        cannot be.
        """
        node = self._state.nodes.get(report.uid)
        if node is not None and node.session == session and node.report == report:
            node.heard_at_s, node.told = now_s, None
            self._report(node)
            return False
        check_report(report)
        refusal = self._refusal(report) if node is None else ""
        if refusal:
            self._out += [SendToNode(session, Rejected(refusal)), Disconnect(session)]
            return True
        if node is None:
            node = self._meet(session, report, addresses, now_s)
        elif node.session != session:
            self._move(node, session, addresses)
        # Each report is answered: a node without answers takes its connection for broken.
        node.heard_at_s, node.away_since_s, node.report, node.told = now_s, None, report, None
        self._take_over(node, now_s)
        self._take_intent(node, now_s)
        if report.closes and not self._state.closed:
            self._state.closed = f"{node.name} has closed it" + (f": {report.detail}" if report.detail else "")
        return True

    def lose(self, session: str, now_s: float) -> None:
        """Note that a connection is closed."""
        uid = self._uid_by_session.pop(session, None)
        if uid is not None:
            node = self._state.nodes[uid]
            node.session, node.away_since_s, node.told = None, now_s, None

    def answers(self) -> list[Action]:
        """Return what is to be done without settling: the answers to heartbeats."""
        out, self._out = self._out, []
        return out

    @property
    def newest(self) -> tuple[int, int]:
        """Number and size of the newest round that has run, for `earlier` of the next rendezvous."""
        return max((self._state.run_round, self._state.size), self._earlier)

    @property
    def num_nodes(self) -> int:
        """Nodes that are known, those that left included until their connection is closed."""
        return len(self._state.nodes)

    def is_over(self, now_s: float) -> bool:
        """Return whether everything about this run may be forgotten."""
        if self._empty_since_s is None:
            return False
        return now_s >= self._empty_since_s + (KEEP_S if self._state.closed or self._state.finished_by else 0.0)

    # ---------------------------------------------------------------------------------------------------------- decide

    def settle(self, now_s: float) -> list[Action]:
        """Decide all that can be decided now; return what is to be done."""
        state, limits = self._state, self._state.limits
        if limits is not None:
            self._reap(limits, now_s)
            while self._advance(limits, now_s):
                pass
            for node in state.nodes.values():
                self._report(node)
            self.deadline_s = self._next_deadline_s(limits, now_s)
        if state.nodes:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s
        return self.answers()

    def _advance(self, limits: Limits, now_s: float) -> bool:
        """Take one step; return whether there may be another."""
        match self._state.phase:
            case RoundPhase.RUNNING:
                return self._call(limits, now_s)
            case RoundPhase.STARTING:
                return self._begin_or_give_up(limits, now_s)
            case RoundPhase.FORMING:
                return self._form(limits, now_s)

    def _call(self, limits: Limits, now_s: float) -> bool:
        state = self._state
        if state.num_unknown and now_s >= state.unknown_until_s:
            self._break(f"{counted(state.num_unknown, 'node has', 'nodes have')} not come back to the rendezvous")
        if not state.broken and state.growth_due_s(limits) <= now_s:
            state.broken = "more nodes can take part"
        if not state.broken and (state.runners or state.num_unknown):
            return False
        self._note(f"round over: round={state.run_round} reason={state.broken or 'all nodes have left'}")
        state.phase, state.called_at_s = RoundPhase.FORMING, now_s
        return True

    def _form(self, limits: Limits, now_s: float) -> bool:
        state = self._state
        self._close_when_hopeless(limits)
        joining = [] if state.closed else state.joining()
        if len(joining) < limits.min_nodes:
            state.enough_since_s = None
        elif state.enough_since_s is None:
            state.enough_since_s = now_s
        decision = decide_round(state.forming(joining, limits), now_s)
        if isinstance(decision, NotYet):
            state.message = decision.reason
            return False
        state.number = max(state.number, state.seen_number) + 1
        state.world, state.enough_since_s = decision, None
        state.places = {uid: rank for rank, uid in enumerate(decision)}
        state.phase, state.started_at_s = RoundPhase.STARTING, now_s
        names = ",".join(state.nodes[uid].name for uid in decision[:_MAX_NAMES])
        self._note(f"round formed: round={state.number} size={len(decision)} nodes={names}")
        return True

    def _begin_or_give_up(self, limits: Limits, now_s: float) -> bool:
        state = self._state
        nodes = [state.nodes.get(uid) for uid in state.world]
        num_lost = sum(node is None or node.joined_at_s is None for node in nodes)
        if num_lost:
            self._note(f"round given up: round={state.number} lost={num_lost}")
            state.phase = RoundPhase.FORMING
            return True
        late = [uid for uid in state.world if not state.is_ready(uid)]
        if not late:
            self._begin(now_s)
            return True
        if now_s < state.started_at_s + limits.start_s:
            return False
        self._turn_out(late, limits.start_s)
        return True

    def _begin(self, now_s: float) -> None:
        state = self._state
        state.runners = dict(state.places)
        state.previous, state.size, state.run_round = dict(state.places), len(state.world), state.number
        state.num_unknown, state.unknown_until_s, state.broken, state.message = 0, math.inf, "", ""
        for node in state.nodes.values():
            if node.report.uid in state.runners:
                node.joined_at_s, node.admitted_attempt = None, node.report.attempt
            elif node.report.intent is Intent.JOIN:
                # It was in the round before, perhaps, and has never begun it.
                self._admit(node, now_s)
        state.phase = RoundPhase.RUNNING
        self.num_begun += 1
        self._note(f"round runs: round={state.number} size={state.size}")

    def _turn_out(self, late: list[str], start_s: float) -> None:
        """Reject who kept a round from starting: the node with the store when most do not reach it, else those few."""
        state = self._state
        first = state.nodes[state.world[0]]
        where = f"store of {first.name} at {state.store_address(first)}:{first.report.store_port}"
        if first.report.uid in late:
            late, why = [first.report.uid], f"want the store of {first.name} open within {start_s:g} s, it is not"
        elif 2 * len(late) > len(state.world):
            late, why = [first.report.uid], f"{len(late)} of {len(state.world) - 1} nodes do not reach the {where}"
        else:
            why = f"want the {where} to be reached within {start_s:g} s, it was not"
        for uid in late:
            node = state.nodes[uid]
            self._note(f"node turned out: name={node.name} reason={why}")
            if node.session is not None:
                self._out.append(SendToNode(node.session, Rejected(why)))
            self._forget(node)

    def _close_when_hopeless(self, limits: Limits) -> None:
        """After a node has finished nobody takes its place: close when those who are left are too few."""
        state = self._state
        if state.closed or not state.finished_by:
            return
        num_left = len(state.joining()) + len(state.runners)
        if num_left < limits.min_nodes:
            state.closed = f"{state.finished_by} has finished, {_left(num_left)}, want {limits.min_nodes}"

    # ---------------------------------------------------------------------------------------------------------- nodes

    def _refusal(self, report: NodeReport) -> str:
        limits = self._state.limits
        if limits is None or not self._state.nodes:
            return ""
        ours, theirs = (limits.min_nodes, limits.max_nodes), (report.limits.min_nodes, report.limits.max_nodes)
        if ours == theirs:
            return ""
        return f"nnodes: want {ours[0]}:{ours[1]}, as the other nodes of this run, got {theirs[0]}:{theirs[1]}"

    def _meet(self, session: str, report: NodeReport, addresses: tuple[str, str], now_s: float) -> Node:
        if not self._state.nodes:
            self._state.limits = report.limits
        node = self._state.nodes[report.uid] = Node(report, session, *addresses, heard_at_s=now_s)
        self._uid_by_session[session] = report.uid
        self._note(f"node came: name={node.name} address={node.far_address}")
        return node

    def _move(self, node: Node, session: str, addresses: tuple[str, str]) -> None:
        """Its newest connection is the one that counts."""
        if node.session is not None:
            self._uid_by_session.pop(node.session, None)
            self._out.append(Disconnect(node.session))
        node.session, node.told = session, None
        node.near_address, node.far_address = addresses
        self._uid_by_session[session] = node.report.uid

    def _take_over(self, node: Node, now_s: float) -> None:
        """Learn from a node what an earlier rendezvous has done."""
        state, report = self._state, node.report
        state.seen_number = max(state.seen_number, report.seen_round, report.known_round, self._earlier[0])
        known = max((report.known_round, report.known_size), self._earlier)
        if known[0] > state.run_round and state.limits is not None:
            state.run_round, state.size = known
            state.previous, state.runners, state.world, state.places, state.broken = {}, {}, (), {}, ""
            state.num_unknown, state.unknown_until_s = state.size, now_s + state.limits.heartbeat_s
            state.phase = RoundPhase.RUNNING
            self._note(f"round taken over: round={state.run_round} size={state.size}")
        if not state.num_unknown or report.uid in state.previous:
            return
        if report.round == state.run_round:
            state.num_unknown -= 1
            state.previous[report.uid] = state.runners[report.uid] = report.rank
            node.admitted_attempt = report.attempt - 1 if report.intent is Intent.JOIN else report.attempt
        elif report.ready_round == state.run_round and report.intent is Intent.JOIN:
            # The rendezvous ended before it could report the beginning of the round to this one.
            state.num_unknown -= 1
            self._break(f"{node.name} has not begun it")

    def _take_intent(self, node: Node, now_s: float) -> None:
        state, report = self._state, node.report
        if report.intent is Intent.LEAVE or node.has_left:
            self._let_go(node)
        elif report.intent is Intent.JOIN and (report.attempt > node.admitted_attempt or not self._is_in(node)):
            if state.runners.pop(report.uid, None) is not None:
                self._break(f"{node.name} has come to the next round")
            self._admit(node, now_s)

    def _admit(self, node: Node, now_s: float) -> None:
        is_late = bool(self._state.finished_by) and node.report.uid not in self._state.previous
        if node.joined_at_s is None and not is_late:
            node.joined_at_s = now_s

    def _is_in(self, node: Node) -> bool:
        return node.report.uid in self._state.runners

    def _let_go(self, node: Node) -> None:
        if node.has_left:
            return
        state, departure = self._state, node.report.departure
        node.has_left, node.joined_at_s = True, None
        was_running = state.runners.pop(node.report.uid, None) is not None
        self._note(f"node leaves: name={node.name} departure={departure} detail={node.report.detail!r}")
        if node.report.uid not in state.previous:
            return
        if departure is Departure.FINISHED:
            self._finish(node.name)
            return
        if was_running:
            self._break(f"{node.name} has left: {node.report.detail or departure}")
        if departure is Departure.FAILED and state.limits is not None and not state.closed:
            num_left = sum(not other.has_left for other in state.nodes.values())
            if num_left < state.limits.min_nodes:
                state.closed = f"{node.name} has failed, {_left(num_left)}, want {state.limits.min_nodes}"

    def _finish(self, name: str) -> None:
        """Let nobody in any more who was not in the round that has finished."""
        state = self._state
        state.finished_by = state.finished_by or name
        for node in state.joining():
            if node.report.uid not in state.previous:
                node.joined_at_s, node.was_released = None, True

    def _reap(self, limits: Limits, now_s: float) -> None:
        for node in list(self._state.nodes.values()):
            if node.has_left and node.session is None:
                self._forget(node)
            elif now_s >= self._state.lost_at_s(node, limits):
                is_away = node.away_since_s is not None
                how = "its connection broke" if is_away else f"silent for {limits.heartbeat_s:g} s"
                self._note(f"node lost: name={node.name} reason={how}")
                if node.report.uid in self._state.runners:
                    self._break(f"{node.name} is lost: {how}")
                self._forget(node)

    def _forget(self, node: Node) -> None:
        del self._state.nodes[node.report.uid]
        self._state.runners.pop(node.report.uid, None)
        if node.session is not None:
            self._uid_by_session.pop(node.session, None)
            self._out.append(Disconnect(node.session))

    def _break(self, reason: str) -> None:
        self._state.broken = self._state.broken or reason

    # ---------------------------------------------------------------------------------------------------------- report

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _report(self, node: Node) -> None:
        if node.session is None:
            return
        standing = self._state.standing(node)
        # What is waited for changes with each node that comes: it goes with the answer to the next heartbeat.
        if node.told is None or replace(standing, message="") != replace(node.told, message=""):
            node.told = standing
            self._out.append(SendToNode(node.session, standing))

    def _next_deadline_s(self, limits: Limits, now_s: float) -> float:
        state = self._state
        found = [state.lost_at_s(node, limits) for node in state.nodes.values()]
        if state.phase is RoundPhase.STARTING:
            found.append(state.started_at_s + limits.start_s)
        elif state.phase is RoundPhase.RUNNING:
            found += [state.growth_due_s(limits), state.unknown_until_s if state.num_unknown else math.inf]
        else:
            decision = decide_round(state.forming(state.joining(), limits), now_s)
            found.append(decision.until_s if isinstance(decision, NotYet) else math.inf)
        return min(found, default=math.inf)


def _left(num_nodes: int) -> str:
    return f"{counted(num_nodes, 'node is', 'nodes are')} left"
