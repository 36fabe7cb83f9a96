"""What the coordinator is told, and what it wants done."""

from dataclasses import dataclass
from typing import Union

from unbroken_core.protocol.messages import Heartbeat, Hello, Observation, RendezvousMessage, Report


@dataclass(frozen=True)
class AgentJoined:
    """A connection said Hello. `session` names the connection; no two connections ever share a name."""

    session: str
    hello: Hello
    can_halt: bool = False
    """Whether the agent knows Halt; said with the connection, since an older one would refuse the message."""


@dataclass(frozen=True)
class AgentReported:
    """A connection sent its state."""

    session: str
    message: Union[Report, Heartbeat]


@dataclass(frozen=True)
class AgentDisconnected:
    """A connection is closed or broken."""

    session: str


@dataclass(frozen=True)
class Observed:
    """The operator told what it sees."""

    observation: Observation


@dataclass(frozen=True)
class Tick:
    """`next_deadline_s` has come."""


Event = Union[AgentJoined, AgentReported, AgentDisconnected, Observed, Tick]


@dataclass(frozen=True)
class Send:
    """Send a message on a connection. Messages of one connection keep their order."""

    session: str
    message: RendezvousMessage


@dataclass(frozen=True)
class Close:
    """Close a connection after what was sent before."""

    session: str
    why: str = ""
    """What its agent has said that cannot be; "" when it did nothing wrong."""


Action = Union[Send, Close]
