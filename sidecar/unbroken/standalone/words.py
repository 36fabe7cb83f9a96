"""What workers, host processes and the root say to each other until the job has formed. Standard library only.

    worker <-> host   Unix stream socket `home.sock` in the host's folder; open until the wrapped call is over
    host   <-> root   TCP; open until the root has dealt out the places

One JSON message a line, in `unbroken_core.wire` form.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Union

from unbroken_core.settings import JobSettings, Timeouts

MAX_LINE_BYTES = 1 << 20
SOCKET_NAME = "home.sock"
CONFIG_NAME = "home.json"
DEAL_NAME = "deal.json"
"""What the root has dealt out, in the folder of its owner: with it another root can go on."""

# ------------------------------------------------------------------------------------------------------ worker <-> host


@dataclass(frozen=True)
class Register:
    """First and only message of a worker; the end of its connection says that its call is over."""

    rank: int
    """Of the environment; unique in the job."""
    local_rank: int
    """-1 where the environment has none."""
    pid: int
    timeouts: Timeouts
    """What the options of its wrapper say; those of the lowest rank count."""


@dataclass(frozen=True)
class Seat:
    """Answer when the job has formed: where this worker is in its pod."""

    local_rank: int
    num_places: int
    address: str
    """Numeric address at which this host is reached."""
    is_first: bool
    """Whether the root runs on this host."""


@dataclass(frozen=True)
class Waiting:
    """What is being waited for, for people."""

    message: str


@dataclass(frozen=True)
class Busy:
    """Somebody of the same name is here, who should be gone soon: try again."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The job cannot form."""

    message: str
    is_timeout: bool = False
    """Whether time is what it was short of."""


ToRegistered = Union[Seat, Waiting, Busy, Failed]

# -------------------------------------------------------------------------------------------------------- host <-> root


@dataclass(frozen=True)
class Knock:
    """First message of a host: prove that you know the job's key."""

    nonce: str


@dataclass(frozen=True)
class Answer:
    """The root's proof, and what it wants the host to prove."""

    proof: str
    nonce: str


@dataclass(frozen=True)
class Present:
    """The workers that are on this host now; sent again at each change. The first one bears the host's proof."""

    proof: str
    uid: str
    node: str
    ranks: tuple[int, ...]
    num_places: int
    is_owner: bool
    """Whether this host has started the root."""
    timeouts: Timeouts
    """Those of its lowest rank."""


@dataclass(frozen=True)
class Deal:
    """The job has formed: where the rendezvous is, and which pod this host is."""

    pod: str
    settings: JobSettings
    port: int
    token: str
    address: str


ToHost = Union[Deal, Waiting, Busy, Failed]


def make_key(*parts: str) -> str:
    """Return the key of a job: everybody who has the same parts can compute it."""
    return hashlib.sha256("\0".join(("unbroken-home-1", *parts)).encode()).hexdigest()


def prove(key: str, role: str, own_nonce: str, other_nonce: str) -> str:
    """Return the proof that the speaker, "root" or "host", knows the key."""
    text = "\0".join((role, own_nonce, other_nonce)).encode()
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


# ----------------------------------------------------------------------------------------- worker -> new host -> root


@dataclass(frozen=True)
class HomeConfig:
    """What a host process, and the root, is told in its file `home.json`."""

    key: str
    world_size: int
    """Workers that the job waits for."""
    master_host: str
    ports: tuple[int, ...]
    """Ports of the root, in the order in which they are tried."""
    limit_s: float
    """So long the job may take to form."""
    address: str = ""
    """Numeric address at which the other hosts reach this one; "" where it is to be found."""
    is_first: bool | None = None
    """Whether the root is started here; None: where rank 0 is."""
    log_file: str = ""
    """"" drops the log with the folder."""
