"""Which pods keep copies of whose checkpoints. Pure: the same answer for the same pods, whatever their order.

Pods form rings. A member's copies lie with the next `copies` members of its ring, so each member keeps as many copies
as it has. A ring of copies + 1 members keeps the copies of all within itself: with two members, they are buddies. All
members of a ring are in different domains of the layer that was asked for, if there are enough; else in different
domains of the next layer within.

Rings are small, since a loss of `copies` + 1 pods is fatal only if all of them are neighbours in one ring: with pairs,
two losses among 16 pods are survived in 14 of 15 cases, with one ring of 16 in 13 of 15 (Gemini, SOSP 2023).
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from unbroken_core.ranks.tree.places import natural_key
from unbroken_core.vocabulary.checkpoints import MAX_COPIES

Domain = tuple[str, ...]
"""Names from the outermost layer to the domain's own: racks of two zones may have one name."""
Domains = defaultdict[Domain, list[str]]
"""Uids of the pods in each, the one to be taken next last."""


@dataclass(frozen=True)
class CopyHolder:
    """A pod that can keep copies."""

    uid: str
    domains: tuple[str, ...]
    """One a layer, outermost first, the host last; "" is unknown, and may be any. All pods have as many."""
    is_active: bool = True
    """Whether it has shards of its own. Spares keep copies only where active pods do not suffice."""


@dataclass(frozen=True)
class Ring:
    """Pods that keep each other's copies."""

    members: tuple[str, ...]
    """Uids."""
    depth: int
    """All members are in different domains of this layer; the number of layers: different pods of one host."""

    def holders(self, uid: str, copies: int) -> tuple[str, ...]:
        """Return the pods that keep the copies of a member."""
        start = self.members.index(uid) + 1
        return tuple(self.members[(start + step) % len(self.members)] for step in range(copies))


def known_domains(keepers: Collection[CopyHolder], depth: int) -> dict[str, Domain]:
    """Return each pod's domain in this layer, where it is known; those of two pods, if they differ, are two.

    Each pod is a domain of the layer below the last. A pod whose name in this layer is not known may be in the domain
    of any other; one with a name, but not in a layer further out, only in those of the same name.
    """
    found: dict[str, Domain] = {}
    by_name: defaultdict[str, set[Domain]] = defaultdict(set)
    for one in keepers:
        domain = one.domains[: depth + 1]
        if depth >= len(one.domains):
            found[one.uid] = (*domain, one.uid)
        elif domain[-1]:
            found[one.uid] = domain
            by_name[domain[-1]].add(domain)
    if depth < min((len(one.domains) for one in keepers), default=0):
        found = {uid: one for uid, one in found.items() if "" not in one or len(by_name[one[-1]]) == 1}
    return found


@dataclass
class _Draft:
    """Rings in the making."""

    keepers: dict[str, CopyHolder]
    copies: int
    rings: list[list[str]] = field(default_factory=list)
    known: dict[int, dict[str, Domain]] = field(default_factory=dict)
    """By layer."""

    def domain(self, uid: str, depth: int) -> Domain | None:
        """Return the pod's domain of this layer; None where it is not known."""
        if depth not in self.known:
            self.known[depth] = known_domains(self.keepers.values(), depth)
        return self.known[depth].get(uid)

    def are_apart(self, uids: Collection[str], depth: int) -> bool:
        """Return whether all are in different domains of this layer, for sure."""
        found = {self.domain(uid, depth) for uid in uids}
        return None not in found and len(found) == len(uids)

    def depth(self, uids: Sequence[str], least: int) -> int:
        """Return the outermost layer, from `least` on, of which all are in different domains."""
        deepest = len(self.keepers[uids[0]].domains)
        return next(depth for depth in range(least, deepest + 1) if depth == deepest or self.are_apart(uids, depth))


def assign_buddies(keepers: Iterable[CopyHolder], copies: int, depth: int, previous: Iterable[Ring] = ()) -> list[Ring]:
    """Return the rings; an active pod in none of them has nobody who could keep its copies.

    `depth` is the index of the layer of which the members shall be in different domains. Rings of `previous` stay as
    they are if that still holds, so that few copies move. Raises ValueError for other than 1 to MAX_COPIES copies.
    """
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f"copies: want 1 to {MAX_COPIES}, got {copies}")
    in_order = sorted(keepers, key=lambda one: ([natural_key(name) for name in one.domains], one.uid))
    draft = _Draft({one.uid: one for one in in_order}, copies)
    if not in_order:
        return []
    worse = _keep(draft, previous, depth)
    taken = {uid for ring in (*draft.rings, *worse) for uid in ring}
    free = [one.uid for one in in_order if one.uid not in taken]
    if any(draft.keepers[uid].is_active for uid in free):
        # Somebody has no buddies yet: perhaps those who are too near to theirs find better ones as well.
        among = {uid for ring in worse for uid in ring}
        free = [one.uid for one in in_order if one.uid in among or one.uid not in taken]
    else:
        draft.rings += worse
        free = []
    for layer in range(depth, len(in_order[0].domains) + 1):
        free = _form(draft, free, layer)
    # Of a ring that grew and was divided, one half may have spares alone, which save nothing.
    kept = (ring for ring in draft.rings if any(draft.keepers[uid].is_active for uid in ring))
    return [Ring(tuple(ring), draft.depth(ring, depth)) for ring in kept]


def _keep(draft: _Draft, previous: Iterable[Ring], depth: int) -> list[list[str]]:
    """Take over what holds of the rings before; return those whose members are nearer to each other than asked."""
    worse = []
    taken: set[str] = set()
    for ring in previous:
        left = [uid for uid in ring.members if uid in draft.keepers and uid not in taken]
        if len(left) <= draft.copies or not any(draft.keepers[uid].is_active for uid in left):
            continue
        taken.update(left)
        if draft.are_apart(left, depth):
            draft.rings.append(left)
        else:
            worse.append(left)
    return worse


def _form(draft: _Draft, free: Sequence[str], depth: int) -> list[str]:
    """Form rings across domains of one layer; return who is in none."""
    active: Domains = defaultdict(list)
    spares: Domains = defaultdict(list)
    left = set()
    for uid in reversed(free):
        domain = draft.domain(uid, depth)
        if domain is None:
            left.add(uid)
        else:
            (active if draft.keepers[uid].is_active else spares)[domain].append(uid)
    _form_evenly(draft, active)
    _form_with_spares(draft, active, spares)
    for domain, uids in active.items():
        _join(draft, uids, domain, depth)
    left |= {uid for domains in (active, spares) for uids in domains.values() for uid in uids}
    return [uid for uid in free if uid in left]


def _form_evenly(draft: _Draft, active: Domains) -> None:
    """Form rings of copies + 1 pods, each time of the domains with most pods left, which at last are too few."""
    heap = [(-len(uids), domain) for domain, uids in active.items()]
    heapq.heapify(heap)
    while len(heap) > draft.copies:
        taken = [heapq.heappop(heap)[1] for _ in range(draft.copies + 1)]
        draft.rings.append([active[domain].pop() for domain in taken])
        for domain in taken:
            if active[domain]:
                heapq.heappush(heap, (-len(active[domain]), domain))


def _form_with_spares(draft: _Draft, active: Domains, spares: Domains) -> None:
    """Form rings of an active pod of each domain that has one left, and spares of other domains."""
    heap = [(-len(uids), domain) for domain, uids in spares.items()]
    heapq.heapify(heap)
    while True:
        ring = [domain for domain, uids in active.items() if uids]
        taken: list[tuple[int, Domain]] = []
        passed: list[tuple[int, Domain]] = []
        while ring and heap and len(ring) + len(taken) <= draft.copies:
            best = heapq.heappop(heap)
            (passed if active.get(best[1]) else taken).append(best)
        if not ring or len(ring) + len(taken) <= draft.copies:
            return
        draft.rings.append([active[domain].pop() for domain in ring] + [spares[domain].pop() for _, domain in taken])
        for _, domain in (*taken, *passed):
            if spares[domain]:
                heapq.heappush(heap, (-len(spares[domain]), domain))


def _join(draft: _Draft, uids: list[str], domain: Domain, depth: int) -> None:
    """Let pods of one domain join rings that have nobody of that domain, and take them off `uids`.

    One pod a ring: a second one would be of the same domain as the first.
    """
    if not uids:
        return
    fitting = [
        ring
        for ring in draft.rings
        if draft.are_apart(ring, depth) and all(draft.domain(uid, depth) != domain for uid in ring)
    ]
    half = draft.copies + 1
    for ring in sorted(fitting, key=len)[: len(uids)]:
        ring.append(uids.pop())
        if len(ring) == 2 * half:
            draft.rings.append(ring[half:])
            del ring[half:]
