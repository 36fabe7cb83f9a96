"""Which checkpoint all ranks go back to. Pure: the same on all ranks, since all see the same offers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from unbroken_core.pod.memory_slots import Moment
from unbroken_core.vocabulary.checkpoints import LoadSource, Restore

MAX_CANDIDATES = 32


@dataclass(frozen=True)
class ReadableShard:
    """One shard that some host can read."""

    moment: Moment
    rank: int
    world_size: int


@dataclass(frozen=True)
class ReadableCheckpoint:
    """A checkpoint of which every shard can be read somewhere."""

    moment: Moment
    world_size: int
    is_given_up: bool = False
    """The training has failed after it: only where there is nothing else."""


def with_later(restore: Restore, found: Iterable[ReadableCheckpoint]) -> list[ReadableCheckpoint]:
    """Return what a plan names, after what ranks have found that is later than all of it."""
    by_key = {(*one.moment.order, one.world_size): one for one in found}
    told = [
        ReadableCheckpoint(Moment(one.term, one.iteration, one.step), one.world_size, one.is_given_up)
        for one in restore.candidates
    ]
    return [*(by_key[key] for key in restore.later(by_key)), *told]


def why_void(restore: Restore, found: Iterable[ReadableCheckpoint]) -> str:
    """Return why the newest checkpoint that ranks have found, all of it, is of no use any more; "" if it is of use."""
    newest = max(found, key=lambda one: one.moment.order, default=None)
    ended = [load for load in restore.floors if newest is not None and load.voids(*newest.moment.order)]
    if newest is None or not ended:
        return ""
    load = max(ended, key=lambda one: (one.iteration, one.term))
    began = {
        LoadSource.MEMORY: f"with step {load.step} of iteration {load.of_iteration}",
        LoadSource.DISK: f"with step {load.step} of the disk",
        LoadSource.NOTHING: "anew, when not all of it was there",
    }[load.source]
    at = f"step {newest.moment.step} of iteration {newest.moment.iteration}"
    return f"{at} is whole, and void since iteration {load.iteration} began {began}"


def candidates(offers: Iterable[ReadableShard]) -> list[ReadableCheckpoint]:
    """Return the whole checkpoints, the newest first: those of later iterations before later steps of earlier ones.

    A checkpoint with a missing rank is none, even if others have the same tensors: that rank's own objects, such as the
    state of its random numbers, would be another's.
    """
    ranks: defaultdict[ReadableCheckpoint, set[int]] = defaultdict(set)
    for offer in offers:
        if 0 <= offer.rank < offer.world_size:
            ranks[ReadableCheckpoint(offer.moment, offer.world_size)].add(offer.rank)
    whole = [one for one, held in ranks.items() if len(held) == one.world_size]
    return sorted(whole, key=lambda one: (*one.moment.order, one.world_size), reverse=True)[:MAX_CANDIDATES]
