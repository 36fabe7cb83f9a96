"""Who holds which shards of which step, as agents report it.

      reported by agents        derived
    place ──holdings──> step ──> sealed (every rank has a holder) ──> complete (verified, too)

`loads` knows what is void, on whatever holder comes back with it.

Changed in place, as the table of pods is: with thousands of pods each report touches only what that pod holds. All of
it can be reported again: a new coordinator knows as much once the agents have sent Hello.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from unbroken_core.coordinator.memory.claims import CopyClaims
from unbroken_core.coordinator.memory.disk import DiskWord
from unbroken_core.coordinator.memory.holders import HeldShard, Run, Step, kept, runs_of
from unbroken_core.coordinator.memory.loads import Loads
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.vocabulary.checkpoints import (
    MAX_COPIES,
    MAX_COPIES_TOLD,
    MAX_FETCHES,
    MAX_PINNED,
    Copy,
    Held,
    Holding,
    Key,
    Load,
    Peer,
)

MAX_STEPS_OF_PLACE = 8
"""Steps of one place that are believed, the newest: its slots hold two for each worker."""
MAX_WORLDS = 8
"""Worlds of which the table remembers who had which rank."""
_MAX_NAMES = 3
_MAX_AWAY = 4096
"""Pods of which it is remembered what they had, once their keepers are not reached."""

Keeping = Mapping[str, Collection[str]]
"""Whose copies each pod shall keep: owners by pod."""


class StepKey(NamedTuple):
    """One checkpoint. Later ones are greater: a later iteration went on from what was restored, whatever its step."""

    iteration: int
    term: int
    step: int
    world_size: int


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
    peer: Peer | None = None
    """Where its keeper is reached; None: it hands out nothing."""
    void: frozenset[str] = frozenset()
    """Owners whose copies in it are all void."""
    problems: tuple[tuple[str, str], ...] = ()
    """As in Held."""
    pinned: tuple[Key, ...] = ()
    """As in Held."""
    no_room: str = ""
    """As in Held."""
    shards: dict[StepKey, dict[int, HeldShard]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportingPod:
    """The pod whose agent reports, and what is believed of it."""

    uid: str
    name: str
    last_iteration: int
    """The highest one that was given out."""
    most_ranks: int
    is_living: Callable[[str], bool]
    """Whether another pod speaks for itself."""


class Checkpoints:
    """All that is reported of checkpoints in memory."""

    def __init__(self) -> None:
        self.steps: dict[StepKey, Step] = {}
        self.loads = Loads()
        self.disk = DiskWord()
        self.num_refused = 0
        """Shards that were reported and cannot be: another pod's, of a world that never was, another's digest."""
        self._places: dict[str, _Place] = {}
        self._readers: dict[str, set[str]] = {}
        """Living pods by arena."""
        self._arenas: dict[str, str] = {}
        """Arena by living pod; those that tell nothing are not in it."""
        self._worlds: dict[int, _World] = {}
        """By iteration."""
        self.newest: StepKey | None = None
        """The newest step that was ever complete and is not void."""
        self.claims: CopyClaims[tuple[ReportingPod, Held]] = CopyClaims()
        self.num_reached = 0
        """Rises whenever another pod's keeper is reached, or somewhere else, or no more."""
        self.domains: dict[str, tuple[str, ...]] = {}
        """From the outermost layer to that of which copies are in different ones. A pod not in it may be in any."""
        self.version = 0
        """Rises whenever something is told that changes who holds what."""
        self._away: dict[str, _Place] = {}
        """What pods had whose keeper was reached and is not now, by uid: an agent that starts again has a new one."""
        self.mute: set[str] = set()
        """Pods that tell what they have, and whose keepers are not reached: they may have more than that."""
        self.unheard: set[str] = set()
        """Pods that were there before this coordinator, and whose keepers it has never reached: they may have anything.
        Empty once a step has been protected without them."""
        self._awaited: tuple[object, tuple[str, ...]] = (None, ())
        """What `awaited` said last, and of what."""

    # ------------------------------------------------------------------------------------------------------- verbs

    def begin(self, iteration: int, seats: Mapping[int, str]) -> None:
        """Note who has which rank in an iteration: uid by rank."""
        self._worlds[iteration] = _World(seats, frozenset(seats.values()))
        for old in sorted(self._worlds)[:-MAX_WORLDS]:
            del self._worlds[old]

    def receive(self, reporter: ReportingPod, held: Held) -> None:
        """Take all that a pod's agent reports of its memory; what cannot be is counted and passed over."""
        uid = reporter.uid
        if self._arenas.get(uid) != held.arena:
            self.lose(uid)
            self._arenas[uid] = held.arena
            self._readers.setdefault(held.arena, set()).add(uid)
        by_place: dict[str, list[Holding]] = {uid: []}
        for holding in held.holdings:
            by_place.setdefault(holding.place, []).append(holding)
        for place, holdings in by_place.items():
            if place == uid:
                self._take(reporter, held, holdings)
            elif self._is_left(reporter, place):
                known = self._places.get(place)
                name = "" if known is None else known.name
                self._replace(reporter, _Place(name or place, held.arena), place, holdings, ())
            else:
                self.num_refused += sum(len(holding.shards) for holding in holdings)
        told, num_refused = self.loads.receive(uid, reporter.name, held.loads, reporter.last_iteration)
        self.num_refused += num_refused
        self.agree(told)
        if held.disk is not None:
            world = self._worlds.get(held.disk.iteration)
            seats = {} if world is None else world.seats
            self.num_refused += not self.disk.receive(uid, held.disk, reporter.last_iteration, seats)
        self._receive_again(uid)

    def lose(self, uid: str) -> None:
        """Take out a pod. Its memory stays, as long as another living pod reads it; copies in it only it hands out."""
        arena = self._arenas.pop(uid, None)
        self.mute.discard(uid)
        self.loads.lose(uid)
        if arena is None:
            # It has told nothing; what others have of it counts now, as that of any pod that is gone.
            self._receive_again(uid)
            return
        readers = self._readers[arena]
        readers.discard(uid)
        left = self._places.get(uid)
        if left is not None and readers:
            self._note_away(uid, left)
            self.num_reached += left.peer is not None
            self._replace(None, replace(left, peer=None, shards=_own(left)), uid, (), ())
        if not readers:
            del self._readers[arena]
            for place in [place for place, known in self._places.items() if known.arena == arena]:
                self._note_away(place, self._places[place])
                self.num_reached += self._places[place].peer is not None
                self._drop(place, self._places.pop(place), is_lost=True)
        self._forget_empty()
        self.claims.lose(uid)
        self._receive_again(uid)

    def assign(self, owners: Keeping, domains: Mapping[str, tuple[str, ...]]) -> None:
        """Note whose copies each pod shall keep, and which pods are in different domains."""
        self.domains = dict(domains)
        self.version += 1
        for reporter, held in self.claims.assign(owners, self._arenas):
            self._receive_own(reporter, held)

    def agree(self, loads: Iterable[Load] | None = None) -> None:
        """Note which timelines have ended, as more than half of the pods say; to be asked again once pods were lost."""
        for _floor in self.loads.agree(loads, self._pods_of):
            self._drop_void()

    def await_first(self, uids: Iterable[str]) -> None:
        """Note which pods are there while the coordinator begins."""
        self.unheard = {uid for uid in uids if not self.is_reached(uid)}

    def forget_pods(self) -> None:
        """Take out all pods, which will report anew; what is void stays so."""
        for uid in list(self._arenas):
            self.lose(uid)
        self.steps.clear()
        self._places.clear()
        self._away.clear()
        self.claims = CopyClaims()
        self._worlds.clear()
        self.newest = None

    # ----------------------------------------------------------------------------------------------------- queries

    def tells(self, uid: str) -> bool:
        """Return whether this pod's agent reports what its keeper has."""
        return uid in self._arenas

    @property
    def is_used(self) -> bool:
        """Whether any pod has memory for checkpoints."""
        return bool(self._arenas) or bool(self._places)

    def is_void(self, key: StepKey) -> bool:
        """Return whether a checkpoint belongs to a timeline that is over."""
        return self.loads.is_void(*key[:3])

    def is_complete(self, key: StepKey) -> bool:
        """Return whether every rank's shard is there and verified."""
        step = self.steps.get(key)
        return step is not None and step.num_verified == key.world_size

    def is_protected(self, key: StepKey, num_copies: int, keeping: Keeping | None = None) -> bool:
        """Return whether every shard also has this many verified copies elsewhere, which no single failure takes.

        `keeping`: by pod, the owners whose copies count there; None: all of them.
        """
        step = self.steps.get(key)
        if step is None or step.num_verified != key.world_size:
            return False
        return all(self._num_homes(step, ranks, keeping) > num_copies for ranks in step.by_content().values())

    def may_be_protected(self, key: StepKey, num_copies: int, copied: Collection[str]) -> bool:
        """Return whether every shard is protected, or lies with a pod that copies what it has saved.

        `copied`: pods whose keeper copies to others. A holder copies no copies: once the pod that saved a shard is
        lost, no more of them come.
        """
        step = self.steps.get(key)
        if step is None or step.num_verified != key.world_size:
            return False
        return all(
            any(
                place in copied and not digests.owner
                for rank in ranks
                for place, digests in step.holders.get(rank, {}).items()
            )
            or self._num_homes(step, ranks, None) > num_copies
            for ranks in step.by_content().values()
        )

    def newest_complete(self) -> StepKey | None:
        """Return the newest complete step."""
        return max((key for key in self.steps if self.is_complete(key) and not self.is_void(key)), default=None)

    def is_reached(self, uid: str) -> bool:
        """Return whether other pods' keepers reach this one's."""
        place = self._places.get(uid)
        return place is not None and place.peer is not None

    def peers(self) -> dict[str, Peer]:
        """Return where keepers are reached, by uid of their pods."""
        return {uid: place.peer for uid, place in self._places.items() if place.peer is not None}

    def is_pinned(self, key: StepKey) -> bool:
        """Return whether all pods whose keeper is reached say that they do not overwrite this step."""
        return all(tuple(key) in place.pinned for place in self._places.values() if place.peer is not None)

    def copy_problem(self) -> str:
        """Return why a pod's newest checkpoints are not copied, of the first that says so; "" where none does."""
        for place in self._places.values():
            for uid, why in place.problems:
                holder = self._places.get(uid)
                return f"{place.name} is not copied to {uid if holder is None else holder.name}: {why}"[:1000]
        return ""

    def lack_of_room(self, iteration: int) -> str:
        """Return why a pod with ranks in this iteration cannot save, of the first that says so; "" where none does."""
        world = self._worlds.get(iteration)
        found = (place for uid, place in self._places.items() if place.no_room and world and uid in world.pods)
        return next((f"{place.name}: {place.no_room}" for place in found), "")

    def copied(self, uid: str) -> dict[str, StepKey | None]:
        """Return whose copies a pod has, and the newest step of each owner; None: all are void."""
        place = self._places.get(uid)
        if place is None:
            return {}
        found: dict[str, StepKey | None] = dict.fromkeys(place.void)
        for key, shards in place.shards.items():
            for digests in shards.values():
                if digests.owner:
                    found[digests.owner] = max(key, found.get(digests.owner) or key)
        return found

    def has_committed(self, iteration: int) -> bool:
        """Return whether all ranks of this iteration have saved a step in it."""
        return any(key.iteration == iteration and step.was_sealed for key, step in self.steps.items())

    def lacking(self, key: StepKey, seats: Mapping[int, str]) -> tuple[int, ...]:
        """Return the old ranks whose shards would not be read by those who need them.

        In a world of the same size each rank needs its own, in another one all need all. `seats`: uid by new rank.
        """
        step = self.steps[key]
        same = step.by_content()
        if len(seats) == key.world_size:
            return tuple(
                rank
                for rank, uid in seats.items()
                if not self._reads(uid, step.holders.get(rank, {})) and not self._fetches(step, rank, uid, same)
            )
        uids = set(seats.values())
        arenas = {self._arenas.get(uid, "") for uid in uids}
        may_fetch = all(self.is_reached(uid) for uid in uids)
        away = [rank for rank in range(key.world_size) if not arenas <= self._near(step.holders.get(rank, {}))]
        if not may_fetch:
            return tuple(away)
        runs, _others = runs_of(step, away, self.peers(), "")
        named = {rank for first, number, _kept, _peer in runs[:MAX_FETCHES] for rank in range(first, first + number)}
        return tuple(rank for rank in away if rank not in named)

    def fetches(
        self, key: StepKey, uid: str, ranks: Iterable[int], leaving: Collection[str] = ()
    ) -> tuple[list[Run], list[Run]]:
        """Return what a pod has other pods hand out of these shards: whom it asks first, and whom after them.

        Without a pod: of all ranks, for any pod of a world of another size, which reads what it has itself.
        """
        step = self.steps.get(key)
        if step is None or (uid and not self.is_reached(uid)):
            return [], []
        away = [rank for rank in ranks if not uid or not self._reads(uid, step.holders.get(rank, {}))]
        return runs_of(step, away, self.peers(), uid, leaving)

    @property
    def away(self) -> Set[str]:
        """Pods whose keeper was reached once, and is not now."""
        return self._away.keys()

    def awaited(
        self,
        there: Iterable[str],
        seated: Iterable[str],
        mute: Iterable[str] = (),
        takers: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Return those without whose keepers a step cannot be read that is newer than all that can.

        `there`: those of `away` that may come back; `seated`: those that will read what they have saved themselves;
        `mute`: those of `mute` and `unheard` that may be reached soon; `takers`: those that will read what others have.
        """
        back, quiet = frozenset(there), frozenset(mute)
        basis = (self.version, back, frozenset(seated), quiet, frozenset(takers))
        if self._awaited[0] != basis:
            self._awaited = (basis, self._find_awaited(*basis[1:]) if back or quiet else ())
        return self._awaited[1]

    def sources(self, key: StepKey, uid: str, ranks: Iterable[int]) -> list[tuple[int, str]]:
        """Return where those of these shards lie that the pod does not have itself; the pod reads all of them."""
        found, arena = [], self._arenas.get(uid, "")
        step = self.steps.get(key)
        holders = {} if step is None else step.holders
        for rank in ranks:
            places = holders.get(rank, {})
            if uid not in places:
                near = (place for place in sorted(places) if not places[place].owner)
                found += [(rank, place) for place in near if self._places[place].arena == arena][:1]
        return found

    def losses(self, key: StepKey, ranks: Iterable[int]) -> str:
        """Return with whom shards were lost."""
        step, wanted = self.steps[key], list(ranks)
        lost = step.lost
        names = sorted({lost[rank] for rank in wanted if rank in lost})
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        shards = "1 shard was" if len(wanted) == 1 else f"{len(wanted)} shards were"
        if not names and all(step.holders.get(rank) for rank in wanted) and len(self.peers()) > MAX_FETCHES:
            return f"{len(wanted)} of its shards lie with more pods than a plan names ({MAX_FETCHES})"
        if not names:
            return f"{shards} lost, or cannot be read from the pods that need {'it' if len(wanted) == 1 else 'them'}"
        return f"{shards} lost with {', '.join(names[:_MAX_NAMES])}{more}"

    # ------------------------------------------------------------------------------------------------------- inner

    def _find_awaited(
        self, there: frozenset[str], seated: frozenset[str], mute: frozenset[str], takers: frozenset[str]
    ) -> tuple[str, ...]:
        # A coordinator that has just begun has yet to hear of the ranks that only a mute pod has copies of: of so many
        # at most, so that a step which somebody invents is not looked at rank by rank in each report. One of which all
        # had gone is known by what those had that may come back.
        brought = Counter[StepKey]()
        for uid in there:
            brought.update({key: len(shards) for key, shards in self._away[uid].shards.items()})
        most = len(mute) * (MAX_COPIES_TOLD + MAX_RANKS_PER_POD)
        known = (
            key
            for key in self.steps.keys() | brought.keys()
            if self._may_be_whole(key, most + brought[key]) and not self.is_void(key)
        )
        for key in sorted(known, reverse=True):
            found = self._awaited_for(key, there, seated, mute)
            if found is not None:
                return tuple(sorted(found | (takers & mute)))
        return ()

    def _may_be_whole(self, key: StepKey, most: int) -> bool:
        """Return whether a step was whole, or is with so many shards more."""
        step = self.steps.get(key, Step())
        return step.was_sealed or key.world_size - len(step.holders) <= most

    def _awaited_for(
        self, key: StepKey, there: frozenset[str], seated: frozenset[str], mute: frozenset[str]
    ) -> frozenset[str] | None:
        """Return who has to be reached for all of a step to be read; None: it would not be."""
        step, found, is_anywhere = self.steps.get(key, Step()), set[str](), False
        if mute and not there and len(step.holders.keys() | step.contents.keys()) < key.world_size:
            return mute  # Nobody has told of a rank. Thousands of them are not looked at one by one in each report.
        same = step.by_content()
        brought = {rank: uid for uid in there for rank in self._away[uid].shards.get(key, ())}
        for rank in range(key.world_size):
            own = (uid for uid, digests in step.holders.get(rank, {}).items() if not digests.owner)
            if any(uid in seated for uid in own):
                continue
            places = [place for _rank, place in kept(step, rank, same)]
            if any(place not in self._away and place not in mute for place in places):
                continue
            equal = same.get(step.contents[rank], [rank]) if rank in step.contents else [rank]
            back = next((brought[other] for other in (rank, *equal) if other in brought), None)
            back = back or next((place for place in places if place in mute), None)
            if back is not None:
                found.add(back)
            elif not mute:
                return None
            else:
                is_anywhere = True  # Any of the mute ones may keep it.
        return frozenset(found | mute) if is_anywhere else frozenset(found)

    def _note_away(self, uid: str, place: _Place) -> None:
        if place.peer is not None:
            self._away[uid] = place
            for old in list(self._away)[:-_MAX_AWAY]:
                del self._away[old]

    def _is_left(self, reporter: ReportingPod, place: str) -> bool:
        """Return whether nobody else speaks for the memory of this pod."""
        return self._is_gone(reporter, place)

    def _take(self, reporter: ReportingPod, held: Held, holdings: Sequence[Holding]) -> None:
        peer = Peer(reporter.uid, held.host, held.port) if held.port and held.host else None
        before = self._places.get(reporter.uid)
        self.num_reached += peer != (None if before is None else before.peer)
        if peer is not None:
            self._away.pop(reporter.uid, None)
            self.mute.discard(reporter.uid)
        else:
            self.mute.add(reporter.uid)
        if peer is None and before is not None:
            self._note_away(reporter.uid, before)
        problems = () if peer is None else held.problems[:MAX_COPIES]
        place = _Place(reporter.name, held.arena, peer, problems=problems, pinned=held.pinned[:MAX_PINNED])
        place.no_room = held.no_room
        self._replace(reporter, place, reporter.uid, holdings, held.copies if peer is not None else ())
        if peer is not None:
            self.unheard.discard(reporter.uid)
        if self.claims.is_put_off(reporter.uid):
            self.claims.remember(reporter.uid, (reporter, held))

    def _receive_own(self, reporter: ReportingPod, held: Held) -> None:
        if self._arenas.get(reporter.uid) == held.arena:
            own = [holding for holding in held.holdings if holding.place == reporter.uid]
            self._take(reporter, held, own)

    def _receive_again(self, owner: str) -> None:
        """Receive again the reports of copies of a pod's shards that nothing confirmed; now something may."""
        for reporter, held in self.claims.put_off_for(owner):
            self._receive_own(reporter, held)

    def _replace(
        self,
        reporter: ReportingPod | None,
        place: _Place,
        uid: str,
        holdings: Sequence[Holding],
        copies: Sequence[Copy],
    ) -> None:
        if reporter is not None:
            self._believe(reporter, place, uid, holdings)
            self._believe_copies(reporter, place, copies)
        before = self._places.get(uid)
        if before == place:
            return
        self.version += 1
        if before is not None:
            self._drop(uid, before, is_lost=False)
        self._places[uid] = place
        newest = self.newest
        for key, shards in place.shards.items():
            step = self.steps.setdefault(key, Step())
            for rank, digests in shards.items():
                step.add(rank, uid, digests)
                for other in step.refuted(rank, digests):
                    self.num_refused += 1
                    del self._places[other].shards[key][rank]
                    step.take_out(rank, other)
            step.was_sealed = step.was_sealed or len(step.holders) == key.world_size
            if self.is_complete(key) and (self.newest is None or key > self.newest):
                self.newest = key
        if self.newest is not None and self.newest != newest:
            self._drop_left(self.newest)
        self._forget_empty()

    def _believe(self, reporter: ReportingPod, place: _Place, uid: str, holdings: Sequence[Holding]) -> None:
        """Put what can be into a place, and count the rest."""
        for holding in holdings:
            key = StepKey(holding.iteration, holding.term, holding.step, holding.world_size)
            may_be = self._may_be(reporter, key)
            for rank, layout, data in holding.shards:
                digests = HeldShard(layout, data)
                if may_be and self._may_hold(uid, key, rank, digests):
                    place.shards.setdefault(key, {})[rank] = digests
                else:
                    self.num_refused += 1
        for key in sorted(place.shards)[:-MAX_STEPS_OF_PLACE]:
            self.num_refused += len(place.shards.pop(key))

    def _believe_copies(self, reporter: ReportingPod, place: _Place, copies: Sequence[Copy]) -> None:
        """Put the copies that can be into a pod's place, and count the rest."""
        uid = reporter.uid
        self.claims.begin(uid, [copy.owner for copy in copies[:MAX_COPIES_TOLD]], is_back=uid in self.unheard)
        self.num_refused += sum(len(copy.shards) for copy in copies[MAX_COPIES_TOLD:])
        told = [(one.owner, self.loads.is_void(one.iteration, one.term, one.step)) for one in copies[:MAX_COPIES_TOLD]]
        place.void = frozenset(owner for owner, _is_void in told) - {owner for owner, is_over in told if not is_over}
        for copy in copies[:MAX_COPIES_TOLD]:
            key = StepKey(copy.iteration, copy.term, copy.step, copy.world_size)
            may_report = self.claims.may_report(uid, copy.owner)
            if copy.owner == uid or not (may_report or self._is_gone(reporter, copy.owner)):
                self.num_refused += len(copy.shards)
                continue
            # Of a pod that was away when a new coordinator told whose copies are kept: only what others have said, too.
            contents = None if may_report else self._contents_of(key)
            may_be = self._may_be(reporter, key)
            for rank, layout, data in copy.shards:
                digests = HeldShard(layout, data, copy.owner)
                is_told = rank in place.shards.get(key, ())
                is_asked = contents is None or contents.get(rank) == digests.content
                if is_told or not data or not may_be or not is_asked or not self._may_hold(uid, key, rank, digests):
                    self.num_refused += 1
                elif contents is not None or self._is_vouched(reporter, key, rank, digests):
                    place.shards.setdefault(key, {})[rank] = digests
                else:
                    self.claims.put_off(uid, copy.owner)

    def _is_gone(self, reporter: ReportingPod, owner: str) -> bool:
        return owner not in self._arenas and not reporter.is_living(owner)

    def _contents_of(self, key: StepKey) -> Mapping[int, tuple[str, str]]:
        step = self.steps.get(key)
        return {} if step is None else step.contents

    def _is_vouched(self, reporter: ReportingPod, key: StepKey, rank: int, digests: HeldShard) -> bool:
        """Return whether more than this pod's word speaks for a copy.

        That this coordinator has told the pod to keep it; that its owner is gone, so that nobody can say more; or that
        somebody else says the same.
        """
        if self.claims.is_assigned(reporter.uid, digests.owner):
            return True
        if self._is_gone(reporter, digests.owner):
            return True
        step = self.steps.get(key)
        others = {} if step is None else step.holders.get(rank, {})
        return any(other.content == digests.content for holder, other in others.items() if holder != reporter.uid)

    def _may_be(self, reporter: ReportingPod, key: StepKey) -> bool:
        """Return whether a pod can have any shard of this step."""
        is_possible = key.world_size <= reporter.most_ranks and 0 <= key.iteration <= reporter.last_iteration
        return is_possible and not self.is_void(key)

    def _may_hold(self, place: str, key: StepKey, rank: int, digests: HeldShard) -> bool:
        if not 0 <= rank < key.world_size:
            return False
        world, owner = self._worlds.get(key.iteration), digests.owner or place
        if world is not None and world.seats.get(rank, owner) != owner:
            return False
        step = self.steps.get(key)
        return step is None or not step.contradicts(rank, place, digests)

    def _drop(self, uid: str, place: _Place, is_lost: bool) -> None:
        self.version += 1
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

    def _reads(self, uid: str, places: Mapping[str, HeldShard]) -> bool:
        if uid in places:
            return True
        arena = self._arenas.get(uid)
        return any(self._places[place].arena == arena for place, digests in places.items() if not digests.owner)

    def _near(self, places: Mapping[str, HeldShard]) -> set[str]:
        """Return the arenas of which each pod reads a shard itself; a copy only the pod that keeps it."""
        found = set()
        for uid, digests in places.items():
            arena = self._places[uid].arena
            if not digests.owner or self._readers.get(arena) == {uid}:
                found.add(arena)
        return found

    def _fetches(self, step: Step, rank: int, uid: str, same: dict[tuple[str, str], list[int]]) -> bool:
        """Return whether another pod hands this shard out to a pod."""
        if not self.is_reached(uid):
            return False
        return any(place != uid and self.is_reached(place) for _rank, place in kept(step, rank, same))

    def _num_homes(self, step: Step, ranks: Iterable[int], keeping: Keeping | None) -> int:
        """Return in how many places shards that are the same lie verified, and that no one failure takes together."""
        homes = {
            uid
            for rank in ranks
            for uid, digests in step.holders.get(rank, {}).items()
            if digests.data and (keeping is None or not digests.owner or digests.owner in keeping.get(uid, ()))
        }
        # One failure takes an arena, or a domain; what shares either with another goes with it.
        groups: list[set[object]] = []
        for uid in homes:
            domain = self.domains.get(uid)
            if domain is None:
                continue  # It may be any of the others.
            marks: set[object] = {("arena", self._places[uid].arena), ("domain", domain)}
            joined = [group for group in groups if group & marks]
            groups = [group for group in groups if not group & marks] + [marks.union(*joined)]
        return max(len(groups), min(len(homes), 1))

    def _pods_of(self, iteration: int) -> frozenset[str] | None:
        world = self._worlds.get(iteration)
        return None if world is None else world.pods

    def _drop_void(self) -> None:
        """Forget the shards of a timeline that has just ended."""
        for uid, place in self._places.items():
            for key in [key for key in place.shards if self.is_void(key)]:
                for rank in place.shards.pop(key):
                    self.steps[key].take_out(rank, uid)
        self.version += 1
        if self.newest is not None and self.is_void(self.newest):
            self.newest = self.newest_complete()
        self._forget_empty()


def _own(place: _Place) -> dict[StepKey, dict[int, HeldShard]]:
    """Return the shards of a place that are no copies."""
    found = {
        key: {rank: digests for rank, digests in shards.items() if not digests.owner}
        for key, shards in place.shards.items()
    }
    return {key: shards for key, shards in found.items() if shards}
