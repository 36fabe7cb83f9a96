"""What is told of checkpoints in memory: what lies where, what a plan restores, and what came of it.

Parts of messages (`messages`, `pod.pod_messages`, `pod.memory_messages`). Frozen dataclasses of JSON types only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken_core.reasons import Word

MAX_CANDIDATES = 4
"""Steps that a plan names, in order."""
MAX_SOURCES = 128
"""Shards of which a plan says where they lie: they also go into an environment, which Linux bounds."""
MAX_LOADS = 16
"""Loads that a keeper remembers."""
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
    """Which checkpoint; of the disk only the step is known."""
    refused: tuple[tuple[int, str], ...] = ()
    """(step, why) of what the plan named before, and a rank of this pod could not read."""

    @property
    def of_order(self) -> tuple[int, int, int]:
        """Iteration, term and step that it went back to; nothing in memory comes before the disk or a new beginning."""
        return (self.of_iteration, self.of_term, self.step) if self.source is LoadSource.MEMORY else (-1, 0, -1)

    def voids(self, iteration: int, term: int, step: int) -> bool:
        """Return whether a checkpoint belongs to a timeline that this load has ended."""
        return (iteration, term) < (self.iteration, self.term) and (iteration, term, step) > self.of_order


def is_void(floors: Sequence[Load], iteration: int, term: int, step: int) -> bool:
    """Return whether a checkpoint belongs to a timeline that is over. `floors`: oldest first."""
    if len(floors) == MAX_FLOORS and (iteration, term, step) < floors[0].of_order:
        return True  # Older than all that is remembered.
    return any(load.voids(iteration, term, step) for load in floors)


@dataclass(frozen=True)
class Held:
    """All that one pod's keeper has, as its agent tells it."""

    arena: str
    """Name of the memory that the keeper's folder lies in; pods with the same one read each other's shards, and lose
    them together."""
    holdings: tuple[Holding, ...] = ()
    loads: tuple[Load, ...] = ()
    """The last ones that it knows of, oldest first."""


@dataclass(frozen=True)
class Candidate:
    """One checkpoint that a plan names."""

    term: int
    iteration: int
    step: int
    world_size: int
    sources: tuple[tuple[int, str], ...] = ()
    """(old rank, uid of the pod in whose memory it is) of shards that this pod needs and does not have."""
    is_given_up: bool = False
    """It was restored before, and the training failed at the same place: only if there is nothing else, nor a disk."""


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
