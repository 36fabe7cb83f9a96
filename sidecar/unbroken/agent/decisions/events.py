"""What happens to a pod (events) and what its agent does about it (actions)."""

from dataclasses import dataclass, field
from typing import Union

from unbroken_core.pod.memory_messages import OfAgent
from unbroken_core.pod.pod_messages import Attach, Lines, Processes, ToLauncher, ToWorker, WorkerReport
from unbroken_core.pod.stamps import WorkerStamps
from unbroken_core.protocol.messages import AgentMessage, CertificateRequest, PairState, Plan, RendezvousMessage
from unbroken_core.vocabulary.checkpoints import Held
from unbroken_core.vocabulary.findings import Health

# ------------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class LauncherAttached:
    """The launcher connected; its Processes follow."""


@dataclass(frozen=True)
class LauncherReported:
    """The launcher reported the whole state of its processes."""

    message: Processes


@dataclass(frozen=True)
class LinesReported:
    """The launcher reported what workers have printed, by the log rules of the job."""

    message: Lines


@dataclass(frozen=True)
class PreflightReported:
    """The launcher says what the pod has found of itself before its first process."""

    message: Health


@dataclass(frozen=True)
class PairsReported:
    """The launcher says whether the pod tests with others, and how the last such test went."""

    message: PairState


@dataclass(frozen=True)
class LauncherLost:
    """The launcher's connection closed: it has ended, and its workers with it."""


@dataclass(frozen=True)
class WorkerAttached:
    """A worker's library connected; its WorkerReport follows."""

    attach: Attach


@dataclass(frozen=True)
class WorkerReported:
    """A worker reported its state."""

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
    """A worker's main thread has ended inside the wrapped call: its process is ending, or now runs another program."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class WatchReported:
    """The watch on devices and links says what it sees."""

    message: Health


@dataclass(frozen=True)
class WatchLost:
    """The watch's connection closed."""


@dataclass(frozen=True)
class Connected:
    """The WebSocket to the rendezvous is open; Hello is to be sent."""


@dataclass(frozen=True)
class RendezvousSent:
    """The rendezvous sent a message on the open connection."""

    message: RendezvousMessage


@dataclass(frozen=True)
class Disconnected:
    """The WebSocket to the rendezvous is closed."""


@dataclass(frozen=True)
class ConnectionRefused:
    """A connection was refused: nothing listens where the rendezvous should be."""


@dataclass(frozen=True)
class Ticked:
    """Time passed. `slots` are the stamps of all places in local order, or None when the page was not read."""

    slots: tuple[WorkerStamps, ...] | None = None
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Frames, innermost last, by local rank of the workers whose stacks were requested."""


@dataclass(frozen=True)
class KeeperSeen:
    """What the pod's memory holds."""

    held: Held


@dataclass(frozen=True)
class KeeperStarted:
    """There is a new keeper, which knows nothing."""


@dataclass(frozen=True)
class KeeperAsked:
    """The keeper wants a certificate, with which it shows other keepers of which pod it is."""

    request: CertificateRequest


@dataclass(frozen=True)
class Terminated:
    """The agent received SIGTERM."""


Event = Union[
    LauncherAttached,
    LauncherReported,
    LinesReported,
    PreflightReported,
    PairsReported,
    LauncherLost,
    WorkerAttached,
    WorkerReported,
    WorkerLost,
    WorkerDied,
    WatchReported,
    WatchLost,
    Connected,
    RendezvousSent,
    Disconnected,
    ConnectionRefused,
    Ticked,
    KeeperSeen,
    KeeperStarted,
    KeeperAsked,
    Terminated,
]

# ----------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class SendToRendezvous:
    """Send on the WebSocket."""

    message: AgentMessage


@dataclass(frozen=True)
class SendToWorker:
    """Send to the worker that is attached at this place."""

    local_rank: int
    message: ToWorker


@dataclass(frozen=True)
class SendToLauncher:
    """Send to the launcher."""

    message: ToLauncher


@dataclass(frozen=True)
class SendToKeeper:
    """Send to the keeper that runs."""

    message: OfAgent


@dataclass(frozen=True)
class CloseConnection:
    """Close the WebSocket and connect again, not before `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Remember:
    """Keep on disk what a restarted agent cannot learn from its pod."""

    memory: "AgentMemory"


@dataclass(frozen=True)
class Exit:
    """End the agent."""

    code: int


Action = Union[SendToRendezvous, SendToWorker, SendToLauncher, SendToKeeper, CloseConnection, Remember, Exit]


@dataclass(frozen=True)
class AgentMemory:
    """What an agent must still know after it was restarted."""

    term: int = 0
    """Highest term obeyed."""
    interrupted: int = -1
    """Highest iteration that is known to be over."""
    plan: Plan | None = None
    planned: tuple[int, ...] = ()
    """Incarnation of each place, in local order, for which the plan was made."""
