"""What workers and the keeper of their pod say to each other: one Unix stream socket a worker, one JSON object a line.

worker -> keeper   Reserve, Find, Restored: each is answered      Sealed: not answered
keeper -> worker   Reserved or NoRoom; Found; Done
"""

from dataclasses import dataclass
from typing import Union

KEEPER_SOCKET = "keeper.sock"
"""Name of the keeper's socket in the pod's folder."""
MAX_LINE_BYTES = 4 << 20
"""Of an answer."""
MAX_REQUEST_BYTES = 4096
"""Of what a worker sends: a keeper has up to 256 connections, in the memory of the agent's container."""
MAX_SLOTS_FOUND = 4096
"""How many slots are told of at most, the newest first."""


@dataclass(frozen=True)
class Reserve:
    """Both slots of a place shall have this many bytes; a slot that has more stays as it is."""

    local_rank: int
    num_bytes: int


@dataclass(frozen=True)
class Reserved:
    """The slots are there, and each of their pages is allocated."""

    paths: tuple[str, ...]
    job: str
    """Hexadecimal digest of the job's uid, for the heads."""


@dataclass(frozen=True)
class NoRoom:
    """The slots would not fit; nothing was changed."""

    needed_bytes: int
    """What this pod needs in all, when each of its workers asks for as much."""
    limit_bytes: int
    detail: str


@dataclass(frozen=True)
class Sealed:
    """A slot was sealed: digest it when there is time."""

    local_rank: int
    index: int


@dataclass(frozen=True)
class Find:
    """Which checkpoints can be read on this host? The keeper answers once it has digested all of them."""


@dataclass(frozen=True)
class FoundSlot:
    """One sealed slot whose content was digested."""

    path: str
    serial: int
    term: int
    iteration: int
    step: int
    rank: int
    world_size: int
    layout_digest: str


@dataclass(frozen=True)
class Found:
    """The answer to Find."""

    slots: tuple[FoundSlot, ...]
    bad: tuple[str, ...] = ()
    """Sealed slots that must not be read, and why; for the log."""


@dataclass(frozen=True)
class Restored:
    """This checkpoint was restored, on all ranks: newer ones belong to a dead timeline, and are void."""

    term: int
    iteration: int
    step: int


@dataclass(frozen=True)
class Done:
    """The answer to Restored."""


ToKeeper = Union[Reserve, Sealed, Find, Restored]
FromKeeper = Union[Reserved, NoRoom, Found, Done]
