"""What is told of checkpoints in memory: what lies where, what a plan restores, and what came of it.

Parts of messages (`messages`, `pod.pod_messages`, `pod.memory_messages`). Frozen dataclasses of JSON types only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Word

MAX_CANDIDATES = 4
"""Steps that a plan names, in order."""
MAX_SOURCES = 128
"""Shards of which a plan says where they lie: they also go into an environment, which Linux bounds."""
MAX_LOADS = 16
"""Loads that a keeper remembers."""
MAX_COPIES = 3
"""Pods that keep copies of one pod's checkpoints."""
MAX_COPIES_TOLD = 64
"""Steps of other pods that a keeper tells of: those of three owners now, and of some before, two steps each."""
MAX_PINNED = 2
"""Steps that keepers are told not to overwrite: the newest protected one, and the one that is to be."""
MAX_FETCHES = 256
"""Runs of shards that a pod is told to fetch for one candidate. Peers of a Restore are as many: all of it goes into an
environment."""
MAX_RANGES = 512
"""Parts of a shard that one keeper asks another one for at once."""
MAX_FLOORS = 32
"""Loads that a coordinator remembers, and tells with a plan."""

Key = tuple[int, int, int, int]
"""(iteration, term, step, world size) of a checkpoint. Later ones are greater: a later iteration went on from what was
restored, whatever its step."""


class LoadSource(Word):
    """Where a state came from at the beginning of an iteration."""

    MEMORY = "memory"
    DISK = "disk"
    NOTHING = "nothing"
    """There was no checkpoint: the training began anew."""


@dataclass(frozen=True)
class Holding:
    """Shards of one step in the memory of one pod."""

    place: str
    """Uid of the pod whose memory it is. It may have ended: on a shared host its memory outlives it."""
    term: int
    iteration: int
    step: int
    world_size: int
    shards: tuple[tuple[int, str, str], ...]
    """(rank in that iteration, digest of the layout, digest of the data; "" until the keeper has verified it)."""


@dataclass(frozen=True)
class Load:
    """What all ranks of an iteration went back to. What earlier iterations have saved after that is void."""

    term: int
    iteration: int
    """The iteration that began with it."""
    source: LoadSource
    of_term: int = 0
    of_iteration: int = -1
    step: int = -1
    """Which checkpoint. What was written to the disk by others than keepers has no term, and no iteration (-1)."""
    refused: tuple[tuple[int, str], ...] = ()
    """(step, why) of what the plan named before, and a rank of this pod could not read."""
    reached: int = -1
    """The highest step that a worker of this pod remembers to have made before; -1: none remembers any."""

    @property
    def of_order(self) -> tuple[int, int, int]:
        """Iteration, term and step that it went back to; nothing in memory comes before the disk or a new beginning."""
        return (self.of_iteration, self.of_term, self.step) if self.source is LoadSource.MEMORY else (-1, 0, -1)

    def voids(self, iteration: int, term: int, step: int) -> bool:
        """Return whether a checkpoint belongs to a timeline that this load has ended."""
        return (iteration, term) < (self.iteration, self.term) and (iteration, term, step) > self.of_order


def is_void(floors: Sequence[Load], iteration: int, term: int, step: int) -> bool:
    """Return whether a checkpoint belongs to a timeline that is over. `floors`: oldest first."""
    # What the loads that are no longer remembered have ended is older than all that later ones went back to.
    if len(floors) == MAX_FLOORS and (iteration, term, step) < min(load.of_order for load in floors):
        return True
    return any(load.voids(iteration, term, step) for load in floors)


@dataclass(frozen=True)
class Copy:
    """Shards of one step of another pod, copied into the memory of the pod that tells of them.

    All are whole: the keeper has compared each block with the digests that the owner's keeper took.
    """

    owner: str
    """Uid of the pod whose shards they are; it may have ended."""
    term: int
    iteration: int
    step: int
    world_size: int
    shards: tuple[tuple[int, str, str], ...]
    """As in Holding; the digest of the data, never "", is made from the owner's checksums as its keeper makes it."""


@dataclass(frozen=True)
class OnDisk:
    """What is known of the checkpoints that an iteration writes to the disk, as the pod with its rank 0 tells it."""

    term: int
    iteration: int
    every: int
    """At most so many steps lie between two of them."""
    step: int = -1
    """The newest that is whole, whoever has written it; -1: none."""
    num_given_up: int = 0
    """Steps of this iteration that were to be written and never become whole."""
    problem: str = ""
    """Why the last of them does not; "" once a later one is whole. For people only."""


@dataclass(frozen=True)
class Held:
    """All that one pod's keeper has, as its agent tells it."""

    arena: str
    """Name of the memory that the keeper's folder lies in; pods with the same one read each other's shards, and lose
    them together."""
    holdings: tuple[Holding, ...] = ()
    loads: tuple[Load, ...] = ()
    """The last ones that it knows of, oldest first."""
    copies: tuple[Copy, ...] = ()
    """What it has of other pods: at most MAX_COPIES_TOLD, the newest steps of each owner first."""
    host: str = ""
    """Where other keepers reach this one: the pod's address. The agent adds it to what the keeper says."""
    port: int = 0
    """Port of its listener there. 0: it neither keeps copies nor fetches nor hands out anything, and its agent knows of
    no Buddies."""
    problems: tuple[tuple[str, str], ...] = ()
    """(uid of a pod that shall keep copies of this one's, why it has not the newest); for people only."""
    pinned: tuple[Key, ...] = ()
    """Which steps of those that Buddies name it does not overwrite from now on: what is told here of them stays."""
    disk: OnDisk | None = None
    """None: nobody has told, or no checkpoints are written to a disk in the background."""
    no_room: str = ""
    """Why the checkpoints of this pod's own workers have no room in it; for people only."""


@dataclass(frozen=True)
class Peer:
    """The keeper of another pod, and where it is reached."""

    uid: str
    """Of the pod; its certificate must name it."""
    host: str
    port: int


@dataclass(frozen=True)
class Candidate:
    """One checkpoint that a plan names."""

    term: int
    iteration: int
    step: int
    world_size: int
    sources: tuple[tuple[int, str], ...] = ()
    """(old rank, uid of the pod in whose memory it is) of shards that this pod needs and does not have, and that lie in
    memory which it reads itself (the same arena). The pod may have ended."""
    is_given_up: bool = False
    """It was restored before, and the training failed at the same place: only if there is nothing else, nor a disk."""
    fetches: tuple[tuple[int, int, int, str], ...] = ()
    """Runs of shards that this pod needs and reads nowhere itself, which the keeper of a peer hands out, its own or
    copies: (first old rank, number of ranks, first of the ranks under which the peer has them, uid of the peer).

    Of data parallel ranks a shard may be kept under the number of another one, whose shard is the same bit by bit: the
    peer is asked for old rank r of a run as `third + (r - first)`. A run may be there again with another peer, who is
    to be asked if the first one cannot hand it out. What is in neither list the pod's own memory has."""


@dataclass(frozen=True)
class Restore:
    """What all ranks go back to: the first of these that every rank can read whole, else the disk.

    The coordinator hears of a checkpoint after it was saved, and a fault may come before that. So ranks look for later
    ones first, wherever all of their shards are found.
    """

    candidates: tuple[Candidate, ...]
    reason: str = ""
    """Why it is not a newer one, or none; "" where nothing was lost."""
    floors: tuple[Load, ...] = ()
    """Loads that have ended timelines, oldest first: what they void, nobody takes, wherever it is found."""
    given_up: tuple[Key, ...] = ()
    """Steps after which the training failed again and again; at most one of them is also a candidate."""
    peers: tuple[Peer, ...] = ()
    """Where the keepers are that candidates' `fetches` name."""

    def later(self, found: Iterable[Key]) -> list[Key]:
        """Return what comes before all candidates, of the whole checkpoints that ranks have found, in their order."""
        named = [(one.iteration, one.term, one.step, one.world_size) for one in self.candidates if not one.is_given_up]
        newest = max(named, default=(-1, 0, -1, 0))
        return [
            key for key in found if key > newest and key not in self.given_up and not is_void(self.floors, *key[:3])
        ]


@dataclass(frozen=True)
class MemoryStatus:
    """What is safe in memory, and what was restored last."""

    complete_step: int
    """Newest step of which every rank's shard is there and verified; -1: none."""
    protected_step: int = -1
    """Newest step that also survives the loss of any one pod; -1: none."""
    restored_step: int = -1
    """What the iteration in force began with; -1: nothing was restored."""
    steps_redone: int = 0
    source: str = ""
    """LoadSource of that; "" before the first load."""
    reason: str = ""
    """What was lost, and why; "" where nothing was."""
    across: str = ""
    """What `protected_step` outlives, in words: "across rack", or why it is less; "" of a job without copies."""
    disk_step: int = -1
    """The newest step that is whole on the disk; -1: none."""
    disk_every: int = 0
    """At most so many steps lie between two that are written there; 0: none are, as far as is known."""
    disk_problem: str = ""
    """Why the last one that was to be written is not; "" where all is well."""
    is_redone_least: bool = False
    """No worker remembers how far the training was, and what was reported of it may be behind: it may be more."""

    @property
    def redone_text(self) -> str:
        """How many steps are made again, in words, and not more exactly than it is known."""
        if self.is_redone_least and not self.steps_redone:
            return "how many steps are redone is not known"
        return f"{'at least ' * self.is_redone_least}{counted(self.steps_redone, 'step')} redone"
