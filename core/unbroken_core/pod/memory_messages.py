"""What workers and the keeper of their pod say to each other: one Unix stream socket a worker, one JSON object a line.

worker -> keeper   Reserve, Find, FetchShard, Loaded: each is answered      Sealed, Measured, Written: not answered
keeper -> worker   Reserved or NoRoom; Found; Fetched or NotFetched; Done

Agent and keeper talk on pipes, which no trainer reaches: the keeper is the agent's child.

agent -> keeper    Copying, Certificate, Buddies, Restarting, Unranked; all that holds, anew to each keeper
keeper -> agent    Counted, Holds, CertificateRequest; each whenever it has changed, and Counted every few seconds
"""

from dataclasses import dataclass
from typing import Union

from unbroken_core.pod.block_parts import Part
from unbroken_core.protocol.messages import Buddies, Certificate, CertificateRequest
from unbroken_core.vocabulary.checkpoints import Held, Load, OnDisk, Peer
from unbroken_core.vocabulary.reasons import Word

KEEPER_SOCKET = "keeper.sock"
"""Name of the keeper's socket in the pod's folder."""
MAX_LINE_BYTES = 4 << 20
"""Of an answer."""
MAX_REQUEST_BYTES = 4096
"""Of what a worker sends: a keeper has up to 256 connections, in the memory of the agent's container."""
TELL_AGAIN_S = 10.0
"""After so long a keeper also tells its agent what has not changed: one that stands still says nothing."""
MAX_SLOTS_FOUND = 4096
"""Most slots that one answer lists, the newest first."""


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

    @property
    def text(self) -> str:
        """Say it to people."""
        is_over = self.needed_bytes > self.limit_bytes
        limit = f"{'but' if is_over else 'and'} its limit is {self.limit_bytes}{':' if is_over else ', but'}"
        return (
            f"checkpoints in memory need {self.needed_bytes} bytes in this pod (two slots for each worker, three for "
            f"each copy), {limit} {self.detail}"
        )


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
class FetchShard:
    """Have blocks of a checkpoint that another pod has."""

    peer: Peer
    rank: int
    world_size: int
    term: int
    iteration: int
    step: int
    blocks: tuple[tuple[int, int], ...] = ()
    """(first, number) of each run; none: those with the layout and the objects."""
    restored_in: int = -1
    """The iteration that goes back to it: once that is over, nobody waits for its holder. -1: not said."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(start, length) in bytes of the content, instead of blocks: of a keeper that has said Fetched.takes_ranges."""


MAX_RUNS = 100
"""Of blocks, or ranges, in one FetchShard."""


@dataclass(frozen=True)
class Fetched:
    """They are in this file, with those that were asked for before unless it is another file by now."""

    slot: FoundSlot
    inode: int
    num_bytes: int
    """What came over the network for this request, at most."""
    takes_ranges: bool = False
    """Whether this keeper fetches ranges of bytes; one of an earlier release fetches blocks."""
    parts: tuple[Part, ...] = ()
    """The blocks that the ranges touch of which only pieces are here. All others are whole."""


@dataclass(frozen=True)
class NotFetched:
    """They are not."""

    reason: str
    has_answered: bool = False
    """Whether their holder was there, and had not this checkpoint, or not as it was sealed: it may have others."""


@dataclass(frozen=True)
class Loaded:
    """All ranks of an iteration went back to this: newer ones belong to a dead timeline, and are void."""

    load: Load


@dataclass(frozen=True)
class Written:
    """What is on the disk now, as the worker with rank 0 and its process beside it know it."""

    disk: OnDisk
    age_s: float = -1.0
    """Seconds since its newest step became whole; -1: not known."""


class Measure(Word):
    """What a worker has measured."""

    SAVED = "saved"
    SKIPPED = "skipped"
    LOADED = "loaded"
    UNWRITTEN = "unwritten"
    """Its part of a checkpoint was not written to the disk."""
    DIFFERS = "differs"
    """A checkpoint that it was to read is not what its keeper digested."""


SKIP_REASONS = ("no room", "tensors changed", "next iteration", "busy", "other")
"""Words of a skipped save; a keeper that nobody reaches counts none."""
LOAD_SOURCES = ("memory", "disk", "nothing")
"""Where a state came from; nothing: the training began anew."""
SAVE_BOUNDS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which saves are counted; a last one has no bound."""
MAX_MEASURED_S = 1e6


@dataclass(frozen=True)
class Measured:
    """What one worker has measured; for people only, nothing is decided by it."""

    what: Measure
    word: str = ""
    """One of SKIP_REASONS or LOAD_SOURCES."""
    seconds: float = 0.0
    steps_redone: int = -1
    """Of a load: steps that this process has made before and makes again; -1 when it does not know."""


@dataclass(frozen=True)
class Counted:
    """Sums since the keeper began: what its agent shows as metrics."""

    used_bytes: int = 0
    limit_bytes: int = 0
    saves: tuple[int, ...] = ()
    """By bucket of SAVE_BOUNDS_S."""
    save_seconds: float = 0.0
    skips: tuple[int, ...] = ()
    """By reason of SKIP_REASONS."""
    loads: tuple[int, ...] = ()
    """By source of LOAD_SOURCES."""
    load_seconds: tuple[float, ...] = ()
    steps_redone: int = -1
    """At the last load; -1 before the first, and where nobody knows."""
    digest_failures: int = 0
    num_refused: int = 0
    """Connections and messages of workers that the keeper refused."""
    copied_bytes: int = 0
    """Of checkpoints that other pods have verified and keep; those that they had already do not count."""
    fetched_bytes: int = 0
    """Of checkpoints that were fetched from other pods."""
    disk_step: int = -1
    """The newest that is whole on the disk, where this pod has known of it; -1: none."""
    disk_whole_at_s: float = -1.0
    """When it became whole, on the monotonic clock that keeper and agent share; -1: not known."""
    disk_failures: int = 0
    """Parts of checkpoints that workers of this pod were to write to the disk, and did not."""


@dataclass(frozen=True)
class Done:
    """The answer to Loaded."""


@dataclass(frozen=True)
class Holds:
    """What can be read here, and where this keeper is reached; the agent knows the host."""

    held: Held


@dataclass(frozen=True)
class Copying:
    """In this job checkpoints are copied to so many other pods: make a key, and listen. 0: they are not."""

    copies: int


@dataclass(frozen=True)
class Restarting:
    """This iteration is over, and all ranks restart: leave processors and network to them until they have restored."""

    iteration: int


@dataclass(frozen=True)
class Unranked:
    """The plan of this iteration gives this pod no rank: nothing is restored here, so there is nothing to wait for."""

    iteration: int


ToKeeper = Union[Reserve, Sealed, Find, FetchShard, Loaded, Measured, Written]
FromKeeper = Union[Reserved, NoRoom, Found, Fetched, NotFetched, Done]
OfAgent = Union[Copying, Certificate, Buddies, Restarting, Unranked]
ToAgent = Union[Counted, Holds, CertificateRequest]
