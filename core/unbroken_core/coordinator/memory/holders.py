"""One checkpoint: who holds which of its shards, and which shards are the same bit by bit."""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from unbroken_core.vocabulary.checkpoints import MAX_COPIES, MAX_FETCHES, Peer

_MOST_ASKED = MAX_COPIES + 1
"""Pods that are named for one shard."""

Run = tuple[int, int, int, str]
"""As in Candidate.fetches."""


class HeldShard(NamedTuple):
    """What a holder says of a shard."""

    layout: str
    data: str
    """"" until it is verified."""
    owner: str = ""
    """Uid of the pod whose shard it is, of a copy; "" of one that lies where it was saved."""

    @property
    def content(self) -> tuple[str, str]:
        """The same of shards that are the same bit by bit."""
        return self.layout, self.data


@dataclass
class Step:
    """One checkpoint: each rank's holders."""

    holders: dict[int, dict[str, HeldShard]] = field(default_factory=dict)
    """By rank, then by place. No rank without a holder."""
    num_verified: int = 0
    """Ranks with a verified holder."""
    lost: dict[int, str] = field(default_factory=dict)
    """Names of the pods with which the last holder of a rank went."""
    was_sealed: bool = False
    """Whether each rank had a holder once."""
    contents: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank, the digests of what was verified once; they stay known when its holders go."""

    def add(self, rank: int, place: str, digests: HeldShard) -> None:
        """Note a holder."""
        places = self.holders.setdefault(rank, {})
        before = _is_verified(places)
        places[place] = digests
        self.num_verified += _is_verified(places) - before
        self.lost.pop(rank, None)
        if digests.data:
            self.contents[rank] = digests.content

    def take_out(self, rank: int, place: str) -> None:
        """Note that a holder has it no more."""
        places = self.holders[rank]
        before = _is_verified(places)
        del places[place]
        self.num_verified += _is_verified(places) - before
        if not places:
            del self.holders[rank]

    def contradicts(self, rank: int, place: str, digests: HeldShard) -> bool:
        """Return whether another holder says something else of this shard, whom to believe rather.

        One shard has one content. Its owner is believed before those who have copies, and of these who said so first:
        nobody reads what its digests do not fit.
        """
        if not digests.data:
            return False
        others = [other for holder, other in self.holders.get(rank, {}).items() if holder != place and other.data]
        if digests.owner and not others:
            return self.contents.get(rank, digests.content) != digests.content
        return any(other.data != digests.data for other in others if digests.owner or not other.owner)

    def refuted(self, rank: int, digests: HeldShard) -> list[str]:
        """Return the places of copies that are other than what the owner says."""
        if digests.owner or not digests.data:
            return []
        places = self.holders.get(rank, {}).items()
        return [place for place, other in places if other.owner and other.data != digests.data]

    def by_content(self) -> dict[tuple[str, str], list[int]]:
        """Return the ranks whose shards are the same bit by bit, as those of data parallel ranks are."""
        found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, content in self.contents.items():
            found[content].append(rank)
        return found


def kept(step: Step, rank: int, same: dict[tuple[str, str], list[int]]) -> Iterator[tuple[int, str]]:
    """Yield where a shard lies, and as which rank's: with its owner first, then copies, then equal ones of others."""
    places = step.holders.get(rank, {})
    yield from ((rank, place) for place, digests in places.items() if not digests.owner)
    yield from ((rank, place) for place, digests in places.items() if digests.owner)
    content = step.contents.get(rank)
    for other in () if content is None else same[content]:
        if other != rank:
            for place, digests in step.holders.get(other, {}).items():
                if digests.content == content:
                    yield other, place


def runs_of(
    step: Step, ranks: Iterable[int], reached: Container[str], uid: str, leaving: Collection[str] = ()
) -> tuple[list[Run], list[Run]]:
    """Return what a pod fetches of these shards: from those who are asked first, and from those asked after them.

    Pods that leave come last: their keepers may have ended by then.
    """
    same = step.by_content()
    asked: list[list[tuple[int, int, str]]] = [[] for _ in range(_MOST_ASKED)]
    for rank in ranks:
        found: Iterator[tuple[int, str]]
        found = ((other, place) for other, place in kept(step, rank, same) if place in reached and place != uid)
        if leaving:
            # Not all of them: of data parallel ranks there may be thousands that are equal.
            found = _at_last(list(islice(found, _MOST_ASKED * (1 + len(leaving)))), leaving)
        for turn, (other, place) in enumerate(islice(found, _MOST_ASKED)):
            asked[turn].append((rank, other, place))
    first, *others = map(_compressed, asked)
    return first, [run for runs in others for run in runs]


def _at_last(found: list[tuple[int, str]], leaving: Collection[str]) -> Iterator[tuple[int, str]]:
    yield from (one for one in found if one[1] not in leaving)
    yield from (one for one in found if one[1] in leaving)


def named_fetches(
    runs: Sequence[tuple[list[Run], list[Run]]], known: Mapping[str, Peer]
) -> tuple[list[tuple[Run, ...]], tuple[Peer, ...]]:
    """Return the fetches of each candidate, those who are asked first before others, and all peers in them.

    Both are bounded: where there are too many, those are left out who would be asked last.
    """
    fetches: list[list[Run]] = [[] for _ in runs]
    peers: dict[str, Peer] = {}
    for turn in (0, 1):
        for found, both in zip(fetches, runs, strict=True):
            for run in both[turn]:
                peer = run[3]
                if len(found) < MAX_FETCHES and peer in known and (peer in peers or len(peers) < MAX_FETCHES):
                    found.append(run)
                    peers[peer] = known[peer]
    return [tuple(found) for found in fetches], tuple(peers.values())


def _compressed(shards: Iterable[tuple[int, int, str]]) -> list[Run]:
    runs: list[Run] = []
    for rank, other, place in shards:
        if runs:
            first, number, third, peer = runs[-1]
            if (first + number, third + number, peer) == (rank, other, place):
                runs[-1] = (first, number + 1, third, peer)
                continue
        runs.append((rank, 1, other, place))
    return runs


def _is_verified(places: dict[str, HeldShard]) -> bool:
    return any(digests.data for digests in places.values())
