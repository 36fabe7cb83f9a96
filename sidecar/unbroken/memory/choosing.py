"""Which checkpoint all ranks go back to. Pure: the same on all ranks, since all see the same offers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken_core.pod.memory_slots import Moment

MAX_CANDIDATES = 32


@dataclass(frozen=True)
class Offer:
    """One shard that some host can read."""

    moment: Moment
    rank: int
    world_size: int


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of which every shard can be read somewhere."""

    moment: Moment
    world_size: int
    is_given_up: bool = False
    """The training has failed after it: only where there is nothing else."""


def with_later(told: Sequence[Candidate], found: Iterable[Candidate]) -> list[Candidate]:
    """Return what a plan names, after what was saved later in the newest iteration that it names.

    The coordinator hears of a checkpoint once its keeper has digested it; the fault may come before that. Nothing of
    another iteration is added: it may belong to a timeline that is over.
    """
    if not told:
        return []
    newest = max((one.moment for one in told), key=lambda moment: moment.order)
    later = [
        one
        for one in found
        if (one.moment.iteration, one.moment.term) == (newest.iteration, newest.term) and one.moment.step > newest.step
    ]
    return [*later, *told]


def candidates(offers: Iterable[Offer]) -> list[Candidate]:
    """Return the whole checkpoints, the newest first: those of later iterations before later steps of earlier ones.

    A checkpoint with a missing rank is none, even if others have the same tensors: that rank's own objects, such as the
    state of its random numbers, would be another's.
    """
    ranks: defaultdict[Candidate, set[int]] = defaultdict(set)
    for offer in offers:
        if 0 <= offer.rank < offer.world_size:
            ranks[Candidate(offer.moment, offer.world_size)].add(offer.rank)
    whole = [one for one, held in ranks.items() if len(held) == one.world_size]
    return sorted(whole, key=lambda one: (*one.moment.order, one.world_size), reverse=True)[:MAX_CANDIDATES]
