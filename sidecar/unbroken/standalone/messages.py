"""Messages between workers, host processes and the root until the job has formed. Standard library only.

    worker <-> host   Unix stream socket `workers.sock` in the host's folder; open until the wrapped call is over
    host   <-> root   TCP; open until the root has sent the pod assignments

One JSON message a line, in `unbroken_core.protocol.wire` form.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Union

from unbroken_core.protocol.settings import JobSettings, Timeouts

MAX_LINE_BYTES = 1 << 20
SOCKET_NAME = "workers.sock"
CONFIG_NAME = "config.json"
ASSIGNMENT_NAME = "assignment.json"
"""The assignment of the root's owner, in the owner's folder: another root can resume with it."""

# ------------------------------------------------------------------------------------------------------ worker <-> host


@dataclass(frozen=True)
class Register:
    """First and only message of a worker; the end of its connection means that its call is over."""

    rank: int
    """From the environment; unique in the job."""
    local_rank: int
    """-1 where the environment has none."""
    pid: int
    timeouts: Timeouts
    """From its wrapper's options; those of the lowest rank count."""
    no_progress_limit: int | None = None
    """From the same; None: only the very same fault again and again ends the job."""


@dataclass(frozen=True)
class Placement:
    """Answer once the job has formed: where this worker is in its pod."""

    local_rank: int
    num_places: int
    address: str
    """Numeric address at which this host is reached."""
    is_first: bool
    """Whether the root runs on this host."""


@dataclass(frozen=True)
class Waiting:
    """What the job waits for, in words for people."""

    message: str


@dataclass(frozen=True)
class Busy:
    """A job or worker of the same name is still here and should be gone soon: try again."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The job cannot form."""

    message: str
    is_timeout: bool = False
    """Whether it ran out of time."""


ToRegistered = Union[Placement, Waiting, Busy, Failed]

# -------------------------------------------------------------------------------------------------------- host <-> root


@dataclass(frozen=True)
class Challenge:
    """First message of a host: the root must prove that it knows the job's key."""

    nonce: str


@dataclass(frozen=True)
class Proof:
    """The root's proof, and its own challenge to the host."""

    proof: str
    nonce: str


@dataclass(frozen=True)
class Attendance:
    """The workers on this host, sent again at each change. The first one carries the host's proof."""

    proof: str
    uid: str
    node: str
    ranks: tuple[int, ...]
    num_places: int
    is_owner: bool
    """Whether this host started the root."""
    timeouts: Timeouts
    """Those of its lowest rank."""
    no_progress_limit: int | None = None
    """That of its lowest rank."""


@dataclass(frozen=True)
class PodAssignment:
    """The job has formed: where the rendezvous is, and which pod this host is."""

    pod: str
    settings: JobSettings
    port: int
    token: str
    """Of this pod."""
    address: str
    job_key: str = ""
    """For the root's owner only, which may have to start another root: what all tokens follow from."""


ToHost = Union[PodAssignment, Waiting, Busy, Failed]


def make_key(*parts: str) -> str:
    """Return the key of a job, which everyone with the same parts can compute."""
    return hashlib.sha256("\0".join(("unbroken-standalone-1", *parts)).encode()).hexdigest()


def prove(key: str, role: str, own_nonce: str, other_nonce: str) -> str:
    """Return the proof that the sender, "root" or "host", knows the key."""
    text = "\0".join((role, own_nonce, other_nonce)).encode()
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


# ----------------------------------------------------------------------------------------- worker -> new host -> root


@dataclass(frozen=True)
class StandaloneConfig:
    """Settings of a host process and of the root, in the file `config.json`."""

    key: str
    world_size: int
    """Workers that the job waits for."""
    master_host: str
    ports: tuple[int, ...]
    """Ports of the root, in the order in which they are tried."""
    limit_s: float
    """How long the job may take to form."""
    address: str = ""
    """Numeric address at which the other hosts reach this one; "" to find it."""
    is_first: bool | None = None
    """Whether the root is started here; None: if rank 0 is here."""
    log_file: str = ""
    """"" keeps the log in the host's folder, which is removed at the end."""
