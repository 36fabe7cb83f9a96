"""What happens to a pod, and what its agent does about it: the words between `member` (pure) and the shell."""

from dataclasses import dataclass, field
from typing import Union

from unbroken_core.messages import AgentMessage, Plan, RendezvousMessage
from unbroken_core.pod.pod_messages import Attach, Processes, ToLauncher, ToWorker, WorkerReport
from unbroken_core.pod.stamps import Slot

# ------------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class LauncherAttached:
    """The launcher connected; its Processes follow."""


@dataclass(frozen=True)
class LauncherSaid:
    """The launcher told the whole state of its processes."""

    message: Processes


@dataclass(frozen=True)
class LauncherLost:
    """The launcher's connection closed: it has ended, and its workers with it."""


@dataclass(frozen=True)
class WorkerAttached:
    """A worker's library connected; its WorkerReport follows."""

    attach: Attach


@dataclass(frozen=True)
class WorkerSaid:
    """A worker told its state."""

    local_rank: int
    incarnation: int
    message: WorkerReport


@dataclass(frozen=True)
class WorkerLost:
    """A worker's connection closed."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class WorkerDied:
    """A worker's main thread has ended inside of the wrapped call: its process is ending, or is another program now."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Connected:
    """The WebSocket to the rendezvous is open; Hello is to be sent."""


@dataclass(frozen=True)
class RendezvousSaid:
    """The rendezvous sent a message on the open connection."""

    message: RendezvousMessage


@dataclass(frozen=True)
class Disconnected:
    """The WebSocket to the rendezvous is closed."""


@dataclass(frozen=True)
class Absent:
    """A connection was refused: nobody listens where the rendezvous should be."""


@dataclass(frozen=True)
class Ticked:
    """Time passed. `slots` are the stamps of all places in local order, or None when the page was not read."""

    slots: tuple[Slot, ...] | None = None
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Frames by local rank of those whose stacks were asked for, innermost last."""


@dataclass(frozen=True)
class Terminated:
    """The agent was told to end (SIGTERM)."""


Event = Union[
    LauncherAttached,
    LauncherSaid,
    LauncherLost,
    WorkerAttached,
    WorkerSaid,
    WorkerLost,
    WorkerDied,
    Connected,
    RendezvousSaid,
    Disconnected,
    Absent,
    Ticked,
    Terminated,
]

# ----------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class TellRendezvous:
    """Send on the WebSocket."""

    message: AgentMessage


@dataclass(frozen=True)
class TellWorker:
    """Send to the worker that is attached at this place."""

    local_rank: int
    message: ToWorker


@dataclass(frozen=True)
class TellLauncher:
    """Send to the launcher."""

    message: ToLauncher


@dataclass(frozen=True)
class HangUp:
    """Close the WebSocket and connect again, not before `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Remember:
    """Keep this on disk: it is all that an agent which was restarted cannot learn from its pod."""

    memory: "Memory"


@dataclass(frozen=True)
class Exit:
    """End the agent."""

    code: int


Action = Union[TellRendezvous, TellWorker, TellLauncher, HangUp, Remember, Exit]


@dataclass(frozen=True)
class Memory:
    """What an agent must know again after a restart of its own."""

    generation: int = 0
    """Highest generation obeyed."""
    interrupted: int = -1
    """Highest iteration that is known to be over."""
    plan: Plan | None = None
    planned: tuple[int, ...] = ()
    """Incarnation of each place, in local order, for which the plan was made."""
