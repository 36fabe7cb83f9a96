"""The tree, the health of its workers and their ranks.

A worker is an index ("leaf"): workers of a place are consecutive. What happens between two plans (losses, returns, new
and moved places) only changes counts, O(changed + depth); ranks change in `plan` alone. So a worker that is lost and
comes back before the plan is cut keeps its rank.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken_core.ranks.tree import planning
from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.places import Order, Place, in_tree_order, natural_order
from unbroken_core.ranks.tree.plan import TreePlan
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer, layer_violations

WorldRule = Callable[[int], int]
"""Takes how many workers could be active, returns how many shall be: 0 to that number."""


class RankTree:
    """Who is which active rank, and who is spare."""

    def __init__(
        self,
        layers: Sequence[Layer],
        places: Iterable[Place],
        world_rule: WorldRule | None = None,
        order: Order | None = natural_order,
        keeps_whole: bool = False,
        *,
        fills_gaps: bool = False,
        unit: int = 1,
    ) -> None:
        """Build the tree; nobody has a rank before `start`.

        `order` None keeps the order in which the names first appear. With `keeps_whole`, all places have one size, the
        innermost layer's minimum and the unit of all layers: local order is kept, `rank % size` is the local rank. The
        world's size may cut the last place in two; the next plan puts it together before all else. With `fills_gaps`,
        the highest ranks take what no spare has taken, in order. Workers are active by `unit`: the maximum of a layer
        counts as the next lower multiple. Raises InputError for layers that contradict
        themselves, no worker at all, and places that do not fit the layers or appear twice.
        """
        for message in layer_violations(layers):
            raise InputError(message)
        self.layers = tuple(layers)
        self._limits = tuple(replace(layer, max_ranks=_multiple(layer.max_ranks, unit)) for layer in layers)
        """The layers with the maxima that hold."""
        self.world_rule = world_rule
        self.keeps_whole = keeps_whole
        self.fills_gaps = fills_gaps
        self._order = order
        self.root = Domain(self.layers[0].name, (), None, self._limits[0])
        self.places: dict[str, Domain] = {}
        self.host_of: list[Domain] = []
        """Innermost domain of each leaf."""
        self.rank_of: list[int] = []
        """Active rank of each leaf, -1 without one."""
        self.by_rank: list[int] = []
        """Leaf of each active rank."""
        self.is_lost = bytearray()
        self.is_spare = bytearray()
        """Healthy and without rank; of no use while a domain above is barred."""
        self.may_grow = bytearray()
        """Whether the worker, when spare, may be appended to the world: it was active before, or came later."""
        self.growable: dict[int, None] = {}
        """Spare leaves that may be appended to the world."""
        self.suspects: dict[Domain, None] = {}
        """Domains that may have to give up ranks in the next plan."""
        self.vacating: dict[int, None] = {}
        """Leaves that were lost with a rank since the last plan."""
        self.num_lost = 0
        self.num_plans = 0
        self._removed: dict[Domain, None] = {}
        self._free: dict[int, list[int]] = {}
        self._is_built_order = True
        self._num_names = 0
        self._last_number: int | None = None
        """Number of the plan that can be undone; the plan itself is the caller's to keep: it may be large."""
        self._build(in_tree_order(places, order))

    def __len__(self) -> int:
        return len(self.host_of) - sum(size * len(firsts) for size, firsts in self._free.items())

    @property
    def world_size(self) -> int:
        """Active ranks."""
        return len(self.by_rank)

    # -------------------------------------------------------------------------------------------------------- plans

    def start(self, preferred: Collection[str] = ()) -> TreePlan:
        """Hand out the first ranks, in the order of the tree, to usable workers within all limits; then the rule.

        Places in `preferred` (a set of keys: pods that were made to be active) are chosen before others.
        """
        self.activate(only_usable=True, preferred=preferred)
        return planning.first_plan(self)

    def adopt(self, ranks: Mapping[str, Mapping[int, int]]) -> None:
        """Take over the ranks that workers have already: active rank by local rank by key of the place.

        Raises InputError, and changes nothing, unless the ranks are 0 to n-1, each once, in a tree without ranks.
        """
        self._check_unranked("adopt")
        by_rank: dict[int, int] = {}
        for key, rank_by_local in ranks.items():
            for leaf, rank in zip(self._leaves(key, rank_by_local), rank_by_local.values(), strict=True):
                if by_rank.setdefault(rank, leaf) != leaf:
                    raise InputError(f"adopt: want each rank once, got rank {rank} twice")
        if sorted(by_rank) != list(range(len(by_rank))):
            raise InputError(f"adopt: want ranks 0 to {len(by_rank) - 1}, got {sorted(by_rank)[:10]}")
        planning.adopt(self, [by_rank[rank] for rank in range(len(by_rank))])

    def activate(self, only_usable: bool, preferred: Collection[str] = ()) -> None:
        """Hand out ranks in the order of the tree within all maxima, without a plan.

        With `only_usable` False, domains below their minimum get ranks, too, and give them up in the next plan.
        """
        self._check_unranked("start")
        planning.activate(self, only_usable, preferred)

    def let_spares_grow(self) -> None:
        """Let spares that were never active be appended to the world, too, where it has room."""
        self._last_number = None
        self.may_grow = bytearray(b"\1" * len(self.may_grow))
        leaf = self.is_spare.find(1)
        while leaf >= 0:
            self.growable[leaf] = None
            leaf = self.is_spare.find(1, leaf + 1)

    def plan(self, use_spares: bool = True, may_grow: bool | None = None) -> TreePlan:
        """Cut the next plan. Without anything new since the last one it changes nothing.

        Without `use_spares` nobody takes a lost rank but survivors: gaps are closed, the world shrinks. Without
        `may_grow` (None: as `use_spares`) no place without ranks is appended.

        A plan that is not possible has a `shortfall`; ranks stay as they were, for a later plan. Raises InputError
        when the world rule raises or does not return an int from 0 to its argument; the tree is then as before.
        """
        self._forget_removed()
        plan = planning.next_plan(self, use_spares, use_spares if may_grow is None else may_grow)
        self._last_number = plan.number
        return plan

    def undo(self, plan: TreePlan) -> None:
        """Take the last plan back: ranks are as before it. Raises InputError for any other plan, or after a change."""
        if plan.number != self._last_number or plan.take_back is None:
            raise InputError(f"undo: want the last plan and no change of the tree after it, got plan {plan.number}")
        plan.take_back()
        self._last_number = None

    # ------------------------------------------------------------------------------------------------------- changes

    def lose(self, key: str, local_ranks: Iterable[int] | None = None) -> None:
        """Count these workers of a place as lost; all of them when None. Repeating it is harmless."""
        self.lose_leaves(self._leaves(key, local_ranks))

    def restore(self, key: str, local_ranks: Iterable[int] | None = None) -> None:
        """Count these workers as healthy again; repeating it is harmless."""
        self.restore_leaves(self._leaves(key, local_ranks))

    def add(self, place: Place) -> None:
        """Add a place; its workers are healthy spares that may be appended to the world."""
        self._last_number = None
        self._check(place)
        first = self._allocate(place.num_workers)
        self._is_built_order = False
        host = self._new_host(place, first)
        parent = self._parent_of(place)
        host.parent, host.depth = parent, parent.depth + 1
        for leaf in range(first, first + host.size):
            self.host_of[leaf] = host
            self.rank_of[leaf] = -1
            self.is_lost[leaf] = 0
            self.may_grow[leaf] = 1
            self.mark_spare(leaf, True)
        host.healthy = host.spare = host.size
        host.refresh()
        parent.attach(host, self.suspects)

    def remove(self, key: str) -> None:
        """Lose all workers of a place and forget it as soon as none of them holds a rank."""
        self.lose(key)
        self._removed[self.places[key]] = None

    def keep(self, key: str) -> None:
        """Take `remove` back: the place stays, its workers lost until they are restored."""
        self._last_number = None
        self._removed.pop(self._place(key), None)

    def move(self, key: str, path: tuple[str, ...]) -> None:
        """Put a place elsewhere in the tree; its workers keep their ranks unless a limit of the new domain forbids."""
        self._last_number = None
        host = self._place(key)
        place = Place(key, path, host.size)
        if host.path == path:
            return
        self._check(place, is_known=True)
        self._is_built_order = False
        self._unlink(host)
        parent = self._parent_of(place)
        host.name, host.order = path[-1], self._order_key(path[-1])
        host.parent, host.depth = parent, parent.depth + 1
        parent.attach(host, self.suspects)

    def lose_leaves(self, leaves: Iterable[int]) -> None:
        """Count these leaves as lost."""
        self._last_number = None
        counts: dict[Domain, list[int]] = {}
        for leaf in leaves:
            if self.is_lost[leaf]:
                continue
            count = counts.setdefault(self.host_of[leaf], [0, 0])
            count[0] -= 1
            count[1] -= self.is_spare[leaf]
            self.is_lost[leaf] = 1
            self.num_lost += 1
            if self.rank_of[leaf] >= 0:
                self.vacating[leaf] = None
            self.mark_spare(leaf, False)
        for host, (healthy, spare) in counts.items():
            host.adjust(healthy, 0, spare, self.suspects)

    def restore_leaves(self, leaves: Iterable[int]) -> None:
        """Count these leaves as healthy again."""
        self._last_number = None
        counts: dict[Domain, list[int]] = {}
        for leaf in leaves:
            if not self.is_lost[leaf]:
                continue
            is_spare = self.rank_of[leaf] < 0
            count = counts.setdefault(self.host_of[leaf], [0, 0])
            count[0] += 1
            count[1] += is_spare
            self.is_lost[leaf] = 0
            self.num_lost -= 1
            self.vacating.pop(leaf, None)
            self.mark_spare(leaf, is_spare)
        for host, (healthy, spare) in counts.items():
            host.adjust(healthy, 0, spare, self.suspects)

    def mark_spare(self, leaf: int, is_spare: bool) -> None:
        """Write the leaf's flag; the counts are the caller's."""
        self.is_spare[leaf] = is_spare
        if is_spare and self.may_grow[leaf]:
            self.growable[leaf] = None
        else:
            self.growable.pop(leaf, None)

    # ------------------------------------------------------------------------------------------------------- queries

    def ranks(self, key: str) -> tuple[int | None, ...]:
        """Return the active rank of each worker of a place, in local order; None for a spare or lost one."""
        host = self._place(key)
        return tuple(None if rank < 0 else rank for rank in self.rank_of[host.first : host.first + host.size])

    def worker(self, leaf: int) -> tuple[str, int]:
        """Return the place's key and the local rank."""
        host = self.host_of[leaf]
        return host.key, leaf - host.first

    def in_order(self, leaves: Iterable[int]) -> list[int]:
        """Return the leaves in the order of the tree."""
        if self._is_built_order:
            return sorted(leaves)
        return sorted(leaves, key=self._tree_key)

    def leaves_below(self, domain: Domain) -> Iterator[int]:
        """Yield all leaves of a domain, in tree order."""
        for host in domain.innermost():
            yield from range(host.first, host.first + host.size)

    # ---------------------------------------------------------------------------------------------------- internals

    def _build(self, places: list[Place]) -> None:
        for place in places:
            self._check(place)
            host = self._new_host(place, len(self.host_of))
            parent = self.root
            for name in place.path[:-1]:
                parent = parent.by_name.get(name) or self._append(parent, name)
            if place.path:
                host.parent, host.depth = parent, parent.depth + 1
                parent.children.append(host)
                parent.by_name[host.name] = host
            self.host_of += [host] * place.num_workers
        if not self.host_of:
            raise InputError("places: want at least one worker, got none")
        size = len(self.host_of)
        self.rank_of = [-1] * size
        self.is_lost = bytearray(size)
        self.is_spare = bytearray(b"\1" * size)
        self.may_grow = bytearray(size)
        planning.recount(self)

    def _append(self, parent: Domain, name: str) -> Domain:
        made = Domain(name, self._order_key(name), parent, self._limits[parent.depth + 1])
        parent.children.append(made)
        parent.by_name[name] = made
        return made

    def _new_host(self, place: Place, first: int) -> Domain:
        if place.path:
            host = Domain(place.path[-1], self._order_key(place.path[-1]), None, self._limits[-1], is_innermost=True)
        else:
            host = self.root
        host.key, host.first, host.size = place.key, first, place.num_workers
        self.places[place.key] = host
        return host

    def _order_key(self, name: str) -> Any:
        if self._order is not None:
            return self._order(name)
        self._num_names += 1
        return self._num_names

    def _check(self, place: Place, is_known: bool = False) -> None:
        if len(place.path) != len(self.layers) - 1:
            wanted = [layer.name for layer in self.layers[1:]]
            raise InputError(f"place {place.key}: want one name for each of the layers {wanted}, got {place.path}")
        if place.num_workers < 1:
            raise InputError(f"place {place.key}: want at least 1 worker, got {place.num_workers}")
        if place.key in self.places and not is_known:
            raise InputError(f"place {place.key}: want each place once, got it twice")
        node: Domain | None = self.root
        for name in place.path:
            node = None if node is None else node.by_name.get(name)
        if node is not None and (node is not self.root or node.key):
            raise InputError(f"place {place.key}: want a path of its own, got {place.path}, which place {node.key} has")

    def _parent_of(self, place: Place) -> Domain:
        if not place.path:
            raise InputError(f"place {place.key}: want a tree with a layer of places, got the root alone")
        parent = self.root
        for name in place.path[:-1]:
            child = parent.by_name.get(name)
            if child is None:
                child = Domain(name, self._order_key(name), parent, self._limits[parent.depth + 1])
                child.refresh()
                parent.attach(child, self.suspects)
            parent = child
        return parent

    def _allocate(self, size: int) -> int:
        """Return the first of so many consecutive leaves: those of a forgotten place of this size, or new ones."""
        if self._free.get(size):
            return self._free[size].pop()
        first = len(self.host_of)
        self.host_of += [self.root] * size
        self.rank_of += [-1] * size
        for flags in (self.is_lost, self.is_spare, self.may_grow):
            flags.extend(bytes(size))
        return first

    def _forget_removed(self) -> None:
        for host in [host for host in self._removed if host.active == 0]:
            del self._removed[host]
            if any(not self.is_lost[leaf] for leaf in range(host.first, host.first + host.size)):
                continue  # It was restored after all.
            self._unlink(host)
            self.suspects.pop(host, None)
            del self.places[host.key]
            self.num_lost -= host.size
            self._free.setdefault(host.size, []).append(host.first)

    def _unlink(self, host: Domain) -> None:
        node = host
        while node.parent is not None:
            parent = node.parent
            parent.detach(node, self.suspects)
            if node is not host:
                # The host itself may move on while it is below its minimum, and has ranks to give up.
                self.suspects.pop(node, None)
            if parent.children:
                return
            node = parent

    def _check_unranked(self, what: str) -> None:
        if self.by_rank:
            raise InputError(f"{what}: want a tree without ranks, got {len(self.by_rank)} active ranks")

    def _place(self, key: str) -> Domain:
        host = self.places.get(key)
        if host is None:
            raise InputError(f"place {key}: want a place of the tree, got an unknown one")
        return host

    def _leaves(self, key: str, local_ranks: Iterable[int] | None) -> Iterable[int]:
        host = self._place(key)
        if local_ranks is None:
            return range(host.first, host.first + host.size)
        chosen = list(local_ranks)
        for local_rank in chosen:
            if not 0 <= local_rank < host.size:
                raise InputError(f"place {key}: want local ranks from 0 to {host.size - 1}, got {local_rank}")
        return [host.first + local_rank for local_rank in chosen]

    def _tree_key(self, leaf: int) -> tuple[object, ...]:
        host = self.host_of[leaf]
        orders: list[object] = []
        node: Domain | None = host
        while node is not None:
            orders.append(node.order)
            node = node.parent
        return (*reversed(orders), leaf - host.first)


def _multiple(max_ranks: int | None, unit: int) -> int | None:
    return None if max_ranks is None else max_ranks - max_ranks % unit
