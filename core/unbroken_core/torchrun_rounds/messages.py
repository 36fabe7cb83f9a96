"""What a node of torchrun and the rendezvous say to each other: `unbroken.rounds` carries it.

    node ──NodeReport──> rendezvous      its whole state: when it changes, on every new connection, and as heartbeat
    node <──Standing───  rendezvous      where it stands: when that changes, and as the answer to a heartbeat
    node <──Rejected───  rendezvous      it cannot take part; the connection is closed

Both are states, not events: one that is lost, repeated or late changes nothing, and a rendezvous that was started again
knows all when its nodes have come back. A *round* is one run of the workers on all nodes; torch calls it a rendezvous.
"""

from dataclasses import dataclass
from typing import Union

from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.reasons import Word

PROTOCOL = 1
MAX_NODES = 65_536
MAX_TEXT = 300
MAX_DOMAINS = 16
MAX_SECONDS = 7 * 86_400.0


class Intent(Word):
    """What a node is about."""

    IDLE = "idle"
    """Has not asked for anything."""
    JOIN = "join"
    """Wants to be in the next round; its workers do not run."""
    RUN = "run"
    """Its workers run."""
    LEAVE = "leave"
    """Is about to end."""


class Departure(Word):
    """Why a node leaves."""

    FINISHED = "finished"
    """Its workers have come to their end."""
    FAILED = "failed"
    """Its workers have failed more often than they are started again."""
    GONE = "gone"
    """Anything else: a signal, an error of its own."""


class Stage(Word):
    """Where a node stands."""

    WAITING = "waiting"
    """For the next round to form."""
    SPARE = "spare"
    """For a place: the round has as many nodes as it may have."""
    STARTING = "starting"
    """In a round that has formed: its store is opened, and connected to."""
    RUNNING = "running"
    """In a round whose nodes all reach the store; or in an older one that it is to leave."""
    LEFT = "left"
    """May end."""


class EndOfRounds(Word):
    """Whether there will be another round for a node."""

    NO = "no"
    CLOSED = "closed"
    RELEASED = "released"
    """The others have finished, and it was not needed."""


@dataclass(frozen=True)
class Limits:
    """What a run is made of. All nodes of a run say the same numbers of nodes; of the times, the first one's count."""

    min_nodes: int
    max_nodes: int
    last_call_s: float
    """So long more nodes are waited for once there are enough."""
    heartbeat_s: float
    """A node that is silent for so long is lost."""
    reconnect_s: float
    """A node whose connection broke is lost after this."""
    leave_s: float
    """So long a node of the round before is waited for, while it stops its workers."""
    start_s: float
    """So long a round may take from forming until all nodes reach its store."""


@dataclass(frozen=True)
class NodeReport:
    """The whole state of one node."""

    protocol: int
    uid: str
    """Of one torchrun process; nobody else knows it."""
    name: str
    """For people, and for the order of the first round."""
    address: str
    """At which the other nodes reach this one; "": where it comes from."""
    domains: tuple[str, ...]
    """In which it is, outermost first."""
    limits: Limits
    intent: Intent
    attempt: int = 0
    """Number of its wish to be in a round, from 1; 0: none yet."""
    ready_round: int = -1
    """The round whose store it has opened, as rank 0, or reaches."""
    store_port: int = 0
    """Where the store of `ready_round` listens; of rank 0 only."""
    round: int = -1
    """The round that its workers run in, or ran in last; -1 before the first."""
    rank: int = -1
    """Its rank in there."""
    known_round: int = -1
    """The newest round that it was told runs, whether or not it was in it."""
    known_size: int = 0
    """Nodes of that round."""
    seen_round: int = -1
    """The highest number of a round that it was told, also of one that has only formed."""
    departure: Departure = Departure.GONE
    detail: str = ""
    """Why it leaves, for people."""
    closes: bool = False
    """Whether there shall be no further round for anybody."""


@dataclass(frozen=True)
class Standing:
    """All that a node needs to know."""

    stage: Stage
    attempt: int
    """Of the node, as the rendezvous knows it: an answer to an older one says nothing about the newest."""
    round: int
    """The round that starts, where the node is in it; else the newest that has run; -1: there was none."""
    rank: int
    """In the round; -1 while it has none."""
    size: int
    """Number of nodes in the round."""
    store_address: str = ""
    store_port: int = 0
    """0 while it is not open."""
    num_waiting: int = 0
    """More than 0: the round is over, whoever is in it is to come to the next one. Nodes that wait for that, at least
    1."""
    end: EndOfRounds = EndOfRounds.NO
    message: str = ""
    """What is waited for, or why it is over, for people."""


@dataclass(frozen=True)
class Rejected:
    """The node cannot take part."""

    message: str


ToNode = Union[Standing, Rejected]


def check_report(report: NodeReport) -> None:
    """Raises WireError when a report says what cannot be."""
    _want(report.protocol == PROTOCOL, f"protocol: want {PROTOCOL}, got {report.protocol}")
    _want(0 < len(report.uid) <= 64, f"uid: want 1 to 64 characters, got {len(report.uid)}")
    _want(0 < len(report.name) <= MAX_TEXT, f"name: want 1 to {MAX_TEXT} characters, got {len(report.name)}")
    for name, text in {"address": report.address, "detail": report.detail}.items():
        _want(len(text) <= MAX_TEXT, f"{name}: want at most {MAX_TEXT} characters, got {len(text)}")
    _want(len(report.domains) <= MAX_DOMAINS, f"domains: want at most {MAX_DOMAINS}, got {len(report.domains)}")
    _want(all(len(domain) <= MAX_TEXT for domain in report.domains), f"domains: want at most {MAX_TEXT} characters")
    _want(0 <= report.store_port < 1 << 16, f"store_port: want 0 to 65535, got {report.store_port}")
    _want(0 <= report.known_size <= MAX_NODES, f"known_size: want 0 to {MAX_NODES}, got {report.known_size}")
    numbers = (report.ready_round, report.round, report.rank, report.known_round, report.seen_round, report.attempt - 1)
    _want(all(-1 <= number < 1 << 40 for number in numbers), f"rounds and rank: want -1 or more, got {report}")
    _check_limits(report.limits)


def _check_limits(limits: Limits) -> None:
    low, high = limits.min_nodes, limits.max_nodes
    _want(0 < low <= high <= MAX_NODES, f"nnodes: want 1 <= min <= max <= {MAX_NODES}, got {low}:{high}")
    for name, seconds in vars(limits).items():
        if name.endswith("_s"):
            _want(0 < seconds <= MAX_SECONDS, f"{name}: want more than 0, at most {MAX_SECONDS:g} s, got {seconds:g}")


def _want(is_right: bool, message: str) -> None:
    if not is_right:
        raise WireError(message)
