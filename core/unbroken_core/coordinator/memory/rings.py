"""Who keeps whose copies: rings of pods, and what each of them is told. Pure, but for what is remembered between."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from unbroken_core.coordinator.memory.holders import Run
from unbroken_core.coordinator.memory.table import Checkpoints, Keeping, StepKey
from unbroken_core.protocol.messages import Buddies
from unbroken_core.ranks.buddies import CopyHolder, Ring, assign_buddies, known_domains
from unbroken_core.vocabulary.checkpoints import MAX_COPIES_TOLD, MAX_FETCHES, Peer
from unbroken_core.vocabulary.plurals import counted


@dataclass(frozen=True)
class Wish:
    """What the job asks for."""

    copies: int
    depth: int
    """Index of the layer of which the holders of one checkpoint shall be in different domains."""
    layers: tuple[str, ...]
    """Names, outermost first; the last is the host."""


@dataclass(frozen=True)
class Arrangement:
    """Who keeps whose copies."""

    rings: tuple[Ring, ...] = ()
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By owner."""
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By holder."""
    domains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the layer that all rings keep to, of each pod of which it is known."""
    across: str = ""
    """In words, what a protected step outlives."""
    is_whole: bool = False
    """Whether each pod with shards has as many holders as there shall be copies."""


def arrange(keepers: Iterable[CopyHolder], wish: Wish, previous: Iterable[Ring]) -> Arrangement:
    """Return the rings; those of before stay where they still do."""
    keepers = list(keepers)
    rings = assign_buddies(keepers, wish.copies, wish.depth, previous)
    active = {one.uid for one in keepers if one.is_active}
    holders: dict[str, tuple[str, ...]] = {}
    owners: dict[str, list[str]] = {}
    for ring in rings:
        for uid in ring.members:
            if uid in active:
                holders[uid] = ring.holders(uid, wish.copies)
                for holder in holders[uid]:
                    owners.setdefault(holder, []).append(uid)
    depth = max((ring.depth for ring in rings if active.intersection(ring.members)), default=wish.depth)
    across = _in_words(wish, depth, len(active) - len(holders), [one for one in keepers if one.is_active])
    return Arrangement(
        tuple(rings),
        holders,
        {uid: tuple(found) for uid, found in owners.items()},
        known_domains(keepers, depth),
        across,
        active <= holders.keys(),
    )


def _in_words(wish: Wish, depth: int, num_alone: int, active: Collection[CopyHolder]) -> str:
    asked = wish.layers[wish.depth]
    if num_alone:
        verb = "has" if num_alone == 1 else "have"
        return f"{counted(num_alone, 'pod')} {verb} too few others to keep copies, want {wish.copies}"
    if depth == wish.depth:
        return f"across {asked}"
    num_unknown = len(active) - len(known_domains(active, wish.depth))
    why = f"{asked} of {counted(num_unknown, 'pod')} is not known" if num_unknown else f"no other {asked}"
    return f"{why}: across {wish.layers[depth] if depth < len(wish.layers) else 'pod'}"


@dataclass
class CopyRings:
    """What is in force, and what pods were told of it. Changed in place."""

    arrangement: Arrangement = field(default_factory=Arrangement)
    told: dict[str, Buddies] = field(default_factory=dict)
    """By pod."""
    basis: tuple[object, ...] = ()
    """What it was made from."""
    due_s: float | None = None
    """When the next one is made; None: it is not known that anything has changed."""
    whole: tuple[int, dict[StepKey, tuple[list[Run], list[Run]]]] = field(default_factory=lambda: (-1, {}))
    """Of an iteration, what its pods fetch of each checkpoint of a world of another size."""
    safe: StepKey | None = None
    """As Buddies.protected; it stays while it is complete, though a pod with a part of it is lost."""
    next: StepKey | None = None
    """As Buddies.next_protected."""
    answer: tuple[object, StepKey | None] = (None, None)
    """What `protected` said last, and of what."""
    pins_due_s: float | None = None
    """When these are looked at next; None: nothing has changed."""
    pins_version: int = -1
    """Of the table that they were made from."""
    named: tuple[int, set[str]] = field(default_factory=lambda: (-1, set()))
    """Of an iteration, the pods that others are told to fetch from."""
    lost: tuple[str, ...] = ()
    """As Buddies.lost."""
    lost_basis: tuple[object, ...] = ()
    """What that was made from."""
    has_left: bool = False
    """Whether pods have copies that they need not keep once others are safe."""

    def news(self, table: Checkpoints, copies: int, term: int) -> dict[str, Buddies]:
        """Return what pods are to be told that they were not told yet."""
        arrangement, peers = self.arrangement, table.peers()
        left = {uid: [one for one in table.copied(uid) if one not in arrangement.owners.get(uid, ())] for uid in peers}
        self.has_left = any(left.values())
        safe = self.protected(table, copies, arrangement.owners) if self.has_left else None
        news = {}
        for uid in peers:
            keys = table.copied(uid) if left[uid] else {}
            drop = [one for one in left[uid] if (key := keys[one]) is None or (safe is not None and key <= safe)]
            keepers = tuple(peers[one] for one in arrangement.holders.get(uid, ()) if one in peers)
            owners, dropped = arrangement.owners.get(uid, ()), tuple(sorted(drop)[:MAX_COPIES_TOLD])
            buddies = Buddies(term, keepers, owners, dropped, self.safe, self.next, self.lost)
            if self.told.get(uid) != buddies:
                news[uid] = buddies
        self.told = {uid: said for uid, said in self.told.items() if uid in peers} | news
        return news

    def name(self, iteration: int, peers: Iterable[Peer]) -> None:
        """Note from whom a pod is told to fetch in an iteration."""
        if self.named[0] != iteration:
            self.named = iteration, set()
        self.named[1].update(one.uid for one in peers)

    def note_lost(self, iteration: int, present: Collection[str], num_reached: int) -> bool:
        """Note who of those from whom others fetch is not `present` any more; return whether these are others."""
        of, named = self.named
        basis = (iteration, len(named), len(present), num_reached)
        if basis == self.lost_basis:
            return False
        self.lost_basis, before = basis, self.lost
        self.lost = tuple(sorted(named.difference(present))[:MAX_FETCHES]) if of == iteration else ()
        return self.lost != before

    def pin(self, table: Checkpoints, copies: int) -> bool:
        """Choose anew which steps nobody overwrites; return whether they are others.

        The newest protected one stays, also once a pod with a part of it is lost, until another one is. A complete one
        stays while it is copied, so that all pods copy the same, and is called protected once all have said that it
        does. One that lacks the pod which saved a part of it will not be: to keep it would only cost saves.
        """
        before = self.safe, self.next
        if self.next is not None and table.is_pinned(self.next) and table.is_protected(self.next, copies):
            self.safe, self.next = self.next, None
            # Copies of it, and of what comes, lie with others: nothing newer is lost without those never heard.
            table.unheard.clear()
        self.safe, self.next = (
            None if one is None or not table.is_complete(one) or table.is_void(one) else one
            for one in (self.safe, self.next)
        )
        complete, copied = table.newest_complete(), self.arrangement.holders
        if self.next is not None and not table.may_be_protected(self.next, copies, copied):
            self.next = None
        if not self.arrangement.rings:
            # Nothing will be protected after it: it would only stand in the way of all saves to come.
            self.safe = None
        if not self.arrangement.is_whole or table.copy_problem():
            self.next = None
        elif (
            self.next is None
            and complete is not None
            and (self.safe is None or complete > self.safe)
            and table.may_be_protected(complete, copies, copied)
        ):
            self.next = complete
        return before != (self.safe, self.next)

    def protected(self, table: Checkpoints, copies: int, keeping: Keeping | None = None) -> StepKey | None:
        """Return the newest step that is protected, and stays until another one is. `keeping`: as in is_protected."""
        basis = (table.version, self.safe)
        if keeping is None and self.answer[0] == basis:
            return self.answer[1]
        found = self.safe if self.safe is not None and table.is_protected(self.safe, copies, keeping) else None
        if keeping is None:
            self.answer = (basis, found)
        return found
