"""Who holds which shards of which step, as agents tell it.

      told by agents            derived
    place ──holdings──> step ──> sealed (every rank has a holder) ──> complete (verified, too)
    pod   ──loads────> votes ──> floors: what is void, on whatever holder comes back with it

Changed in place, as the table of pods is: with thousands of pods each report touches only what that pod holds. All of
it can be told again: a new coordinator knows as much once the agents have said Hello.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken_core.checkpoints import MAX_FLOORS, MAX_LOADS, Held, Holding, Load, is_void

MAX_STEPS_OF_PLACE = 8
"""Steps of one place that are believed, the newest: its slots hold two for each worker."""
MAX_WORLDS = 8
"""Worlds of which the table remembers who had which rank."""
_MAX_NAMES = 3


class StepKey(NamedTuple):
    """One checkpoint. Later ones are greater: a later iteration went on from what was restored, whatever its step."""

    iteration: int
    term: int
    step: int
    world_size: int


class Digests(NamedTuple):
    """What a holder says of a shard."""

    layout: str
    data: str
    """"" until it is verified."""


@dataclass
class Step:
    """One checkpoint: each rank's holders."""

    holders: dict[int, dict[str, Digests]] = field(default_factory=dict)
    """By rank, then by place. No rank without a holder."""
    num_verified: int = 0
    """Ranks with a verified holder."""
    lost: dict[int, str] = field(default_factory=dict)
    """Names of the pods with which the last holder of a rank went."""
    was_sealed: bool = False
    """Whether each rank had a holder once."""

    def add(self, rank: int, place: str, digests: Digests) -> None:
        """Note a holder."""
        places = self.holders.setdefault(rank, {})
        before = _is_verified(places)
        places[place] = digests
        self.num_verified += _is_verified(places) - before
        self.lost.pop(rank, None)

    def take_out(self, rank: int, place: str) -> None:
        """Note that a holder has it no more."""
        places = self.holders[rank]
        before = _is_verified(places)
        del places[place]
        self.num_verified += _is_verified(places) - before
        if not places:
            del self.holders[rank]


class _World(NamedTuple):
    """Who had which rank in an iteration, as far as that is known."""

    seats: Mapping[int, str]
    """Uid by rank."""
    pods: frozenset[str]


@dataclass
class _Place:
    """The memory of one pod."""

    name: str
    arena: str
    domain: str
    shards: dict[StepKey, dict[int, Digests]] = field(default_factory=dict)


@dataclass(frozen=True)
class Teller:
    """The pod whose agent tells, and what is believed of it."""

    uid: str
    name: str
    domain: str
    last_iteration: int
    """The highest one that was given out."""
    most_ranks: int
    is_living: Callable[[str], bool]
    """Whether another pod speaks for itself."""


class Checkpoints:
    """All that is told of checkpoints in memory."""

    def __init__(self) -> None:
        self.steps: dict[StepKey, Step] = {}
        self.floors: tuple[Load, ...] = ()
        """Loads that end timelines, oldest first; they stay known when the pods go."""
        self.num_refused = 0
        """Shards that were told and cannot be: another pod's, of a world that never was, another's digest."""
        self.num_loads = 0
        """Rises when a load, or a step that could not be loaded, is told of for the first time."""
        self._places: dict[str, _Place] = {}
        self._readers: dict[str, set[str]] = {}
        """Living pods by arena."""
        self._arenas: dict[str, str] = {}
        """Arena by living pod; those that tell nothing are not in it."""
        self._votes: dict[Load, set[str]] = {}
        self._voters: dict[str, tuple[Load, ...]] = {}
        self._worlds: dict[int, _World] = {}
        """By iteration."""
        self._refusals: dict[int, tuple[int, str, str]] = {}
        """By iteration: the first step that a rank could not read, why, and the name of its pod."""
        self.newest: StepKey | None = None
        """The newest step that was ever complete and is not void."""

    # ------------------------------------------------------------------------------------------------------- verbs

    def begin(self, iteration: int, seats: Mapping[int, str]) -> None:
        """Note who has which rank in an iteration: uid by rank."""
        self._worlds[iteration] = _World(seats, frozenset(seats.values()))
        for old in sorted(self._worlds)[:-MAX_WORLDS]:
            del self._worlds[old]

    def receive(self, teller: Teller, held: Held) -> None:
        """Take all that a pod's agent tells of its memory; what cannot be is counted and passed over."""
        uid = teller.uid
        if self._arenas.get(uid) != held.arena:
            self.lose(uid)
            self._arenas[uid] = held.arena
            self._readers.setdefault(held.arena, set()).add(uid)
        by_place: dict[str, list[Holding]] = {uid: []}
        for holding in held.holdings:
            by_place.setdefault(holding.place, []).append(holding)
        for place, holdings in by_place.items():
            if place == uid or self._is_left(teller, place):
                known = self._places.get(place)
                name = teller.name if place == uid else "" if known is None else known.name
                self._replace(teller, _Place(name or place, held.arena, teller.domain), place, holdings)
            else:
                self.num_refused += sum(len(holding.shards) for holding in holdings)
        self._vote(teller, held.loads)

    def lose(self, uid: str) -> None:
        """Take out a pod. Its memory stays, as long as another living pod reads it."""
        arena = self._arenas.pop(uid, None)
        for load in self._voters.pop(uid, ()):
            self._votes[load].discard(uid)
            if not self._votes[load]:
                del self._votes[load]
        if arena is None:
            return
        readers = self._readers[arena]
        readers.discard(uid)
        if not readers:
            del self._readers[arena]
            for place in [place for place, known in self._places.items() if known.arena == arena]:
                self._drop(place, self._places.pop(place), is_lost=True)
        self._forget_empty()

    def agree(self, loads: Iterable[Load] | None = None) -> None:
        """Note which timelines have ended, as more than half of the pods say; to be asked again once pods were lost."""
        for load in sorted(self._votes, key=_epoch) if loads is None else loads:
            if load not in self.floors and self._is_agreed(load):
                self._raise_floor(load)

    def forget_pods(self) -> None:
        """Take out all pods, which will tell anew; what is void stays so."""
        for uid in list(self._arenas):
            self.lose(uid)
        self.steps.clear()
        self._places.clear()
        self._worlds.clear()
        self.newest = None

    # ----------------------------------------------------------------------------------------------------- queries

    def tells(self, uid: str) -> bool:
        """Return whether this pod's agent tells what its keeper has."""
        return uid in self._arenas

    @property
    def is_used(self) -> bool:
        """Whether any pod has memory for checkpoints."""
        return bool(self._arenas) or bool(self._places)

    def is_void(self, key: StepKey) -> bool:
        """Return whether a checkpoint belongs to a timeline that is over."""
        return is_void(self.floors, *key[:3])

    def is_complete(self, key: StepKey) -> bool:
        """Return whether every rank's shard is there and verified."""
        step = self.steps.get(key)
        return step is not None and step.num_verified == key.world_size

    def is_protected(self, key: StepKey, num_copies: int) -> bool:
        """Return whether every shard also has so many verified copies elsewhere, which no one failure takes."""
        step = self.steps.get(key)
        if step is None or step.num_verified != key.world_size:
            return False
        return all(self._num_homes(places) > num_copies for places in step.holders.values())

    def newest_complete(self) -> StepKey | None:
        """Return the newest complete step."""
        return max((key for key in self.steps if self.is_complete(key) and not self.is_void(key)), default=None)

    def newest_protected(self, num_copies: int) -> StepKey | None:
        """Return the newest protected step."""
        keys = (key for key in self.steps if self.is_protected(key, num_copies) and not self.is_void(key))
        return max(keys, default=None)

    def has_committed(self, iteration: int) -> bool:
        """Return whether all ranks of this iteration have saved a step in it."""
        return any(key.iteration == iteration and step.was_sealed for key, step in self.steps.items())

    def load_of(self, iteration: int) -> Load | None:
        """Return what an iteration began with, as far as anybody has said so."""
        return max((load for load in self._votes if load.iteration == iteration), key=self._num_votes, default=None)

    def refusal_of(self, iteration: int) -> tuple[int, str, str] | None:
        """Return which step a rank could not read at the beginning of an iteration, why, and the name of its pod."""
        return self._refusals.get(iteration)

    def lacking(self, key: StepKey, seats: Mapping[int, str]) -> tuple[int, ...]:
        """Return the old ranks whose shards would not be read by those who need them.

        In a world of the same size each rank needs its own, in another one all need all. `seats`: uid by new rank.
        """
        holders = self.steps[key].holders
        if len(seats) == key.world_size:
            return tuple(rank for rank, uid in seats.items() if not self._reads(uid, holders.get(rank, {})))
        arenas = {self._arenas.get(uid, "") for uid in seats.values()}
        return tuple(
            rank
            for rank in range(key.world_size)
            if not arenas <= {self._places[place].arena for place in holders.get(rank, {})}
        )

    def sources(self, key: StepKey, uid: str, ranks: Iterable[int]) -> list[tuple[int, str]]:
        """Return where those of these shards lie that the pod does not have itself; the pod reads all of them."""
        found, arena = [], self._arenas.get(uid, "")
        step = self.steps.get(key)
        holders = {} if step is None else step.holders
        for rank in ranks:
            places = holders.get(rank, {})
            if uid not in places:
                found += [(rank, place) for place in sorted(places) if self._places[place].arena == arena][:1]
        return found

    def losses(self, key: StepKey, ranks: Iterable[int]) -> str:
        """Return with whom shards were lost."""
        lost, wanted = self.steps[key].lost, list(ranks)
        names = sorted({lost[rank] for rank in wanted if rank in lost})
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        shards = "1 shard was" if len(wanted) == 1 else f"{len(wanted)} shards were"
        if not names:
            return f"{shards} lost, or cannot be read from the pods that need {'it' if len(wanted) == 1 else 'them'}"
        return f"{shards} lost with {', '.join(names[:_MAX_NAMES])}{more}"

    # ------------------------------------------------------------------------------------------------------- inner

    def _is_left(self, teller: Teller, place: str) -> bool:
        """Return whether nobody else speaks for the memory of this pod."""
        return place not in self._arenas and not teller.is_living(place)

    def _replace(self, teller: Teller, place: _Place, uid: str, holdings: list[Holding]) -> None:
        self._believe(teller, place, uid, holdings)
        before = self._places.get(uid)
        if before == place:
            return
        if before is not None:
            self._drop(uid, before, is_lost=False)
        self._places[uid] = place
        newest = self.newest
        for key, shards in place.shards.items():
            step = self.steps.setdefault(key, Step())
            for rank, digests in shards.items():
                step.add(rank, uid, digests)
            step.was_sealed = step.was_sealed or len(step.holders) == key.world_size
            if self.is_complete(key) and (self.newest is None or key > self.newest):
                self.newest = key
        if self.newest is not None and self.newest != newest:
            self._drop_left(self.newest)
        self._forget_empty()

    def _believe(self, teller: Teller, place: _Place, uid: str, holdings: list[Holding]) -> None:
        """Put what can be into a place, and count the rest."""
        for holding in holdings:
            key = StepKey(holding.iteration, holding.term, holding.step, holding.world_size)
            for rank, layout, data in holding.shards:
                if self._may_hold(teller, uid, key, rank, Digests(layout, data)):
                    place.shards.setdefault(key, {})[rank] = Digests(layout, data)
                else:
                    self.num_refused += 1
        for key in sorted(place.shards)[:-MAX_STEPS_OF_PLACE]:
            self.num_refused += len(place.shards.pop(key))

    def _may_hold(self, teller: Teller, place: str, key: StepKey, rank: int, digests: Digests) -> bool:
        if not 0 <= rank < key.world_size <= teller.most_ranks or not 0 <= key.iteration <= teller.last_iteration:
            return False
        if self.is_void(key):
            return False
        world = self._worlds.get(key.iteration)
        if world is not None and world.seats.get(rank, place) != place:
            return False
        step = self.steps.get(key)
        others = {} if step is None else step.holders.get(rank, {})
        # One shard has one content. Who has said so first is believed: nobody reads what its digests do not fit.
        return not any(
            digests.data and other.data and other.data != digests.data
            for holder, other in others.items()
            if holder != place
        )

    def _drop(self, uid: str, place: _Place, is_lost: bool) -> None:
        for key, shards in place.shards.items():
            step = self.steps[key]
            for rank in shards:
                step.take_out(rank, uid)
                if is_lost and rank not in step.holders:
                    step.lost[rank] = place.name

    def _drop_left(self, newest: StepKey) -> None:
        """Forget what ended pods have left, once a newer step is complete."""
        left = [
            uid
            for uid, place in self._places.items()
            if uid not in self._arenas and all(key < newest for key in place.shards)
        ]
        for uid in left:
            self._drop(uid, self._places.pop(uid), is_lost=False)

    def _forget_empty(self) -> None:
        # The newest that was whole is kept, to say with whom it went.
        newest = self.newest
        for key in [key for key, step in self.steps.items() if not step.holders and key != newest]:
            del self.steps[key]

    def _reads(self, uid: str, places: Mapping[str, Digests]) -> bool:
        if uid in places:
            return True
        arena = self._arenas.get(uid)
        return any(self._places[place].arena == arena for place in places)

    def _num_homes(self, places: Mapping[str, Digests]) -> int:
        """Return in how many places a shard lies verified that no one failure takes together."""
        homes = [self._places[place] for place, digests in places.items() if digests.data]
        num_domains = len({home.domain or f"pod {home.name}" for home in homes})
        return min(len({home.arena for home in homes}), num_domains)

    # ------------------------------------------------------------------------------------------------------- loads

    def _vote(self, teller: Teller, loads: tuple[Load, ...]) -> None:
        sound = [
            Load(load.term, load.iteration, load.source, load.of_term, load.of_iteration, load.step)
            for load in loads[-MAX_LOADS:]
            if 0 <= load.iteration <= teller.last_iteration and load.of_order < (load.iteration, load.term, 0)
        ]
        self.num_refused += len(loads[-MAX_LOADS:]) - len(sound)
        # Each once: a pod has one vote for it to take back.
        told = tuple(dict.fromkeys(sound))
        for load in self._voters.pop(teller.uid, ()):
            self._votes[load].discard(teller.uid)
        self._voters[teller.uid] = told
        for load in told:
            self.num_loads += load not in self._votes
            self._votes.setdefault(load, set()).add(teller.uid)
        self._votes = {load: voters for load, voters in self._votes.items() if voters}
        for load in loads[-MAX_LOADS:]:
            if load.refused and load.iteration not in self._refusals:
                self.num_loads += 1
                self._refusals[load.iteration] = (*load.refused[0], teller.name)
        for old in sorted(self._refusals)[:-MAX_LOADS]:
            del self._refusals[old]
        self.agree(told)

    def _is_agreed(self, load: Load) -> bool:
        """Return whether more than half say so: of the present pods of that world; else of who says anything of it."""
        votes, world = self._votes[load], self._worlds.get(load.iteration)
        if world is not None:
            num_pods = len(world.pods & self._arenas.keys())
            return 2 * len(votes) > num_pods and 2 * len(votes & world.pods) > num_pods
        others = [voters for other, voters in self._votes.items() if other.iteration == load.iteration]
        return 2 * len(votes) > len(set().union(*others))

    def _raise_floor(self, load: Load) -> None:
        floors = [known for known in self.floors if (known.iteration, known.term) != (load.iteration, load.term)]
        self.floors = tuple(sorted([*floors, load], key=_epoch))[-MAX_FLOORS:]
        for uid, place in self._places.items():
            for key in [key for key in place.shards if self.is_void(key)]:
                for rank in place.shards.pop(key):
                    self.steps[key].take_out(rank, uid)
        if self.newest is not None and self.is_void(self.newest):
            self.newest = self.newest_complete()
        self._forget_empty()

    def _num_votes(self, load: Load) -> int:
        return len(self._votes[load])


def _is_verified(places: Mapping[str, Digests]) -> bool:
    return any(digests.data for digests in places.values())


def _epoch(load: Load) -> tuple[int, int]:
    return (load.iteration, load.term)
