"""The job's tree of ranks: it follows every pod that comes, moves, loses workers or goes, and cuts the next world.

    place, fit, remove, exclude   what is known of the pods; O(changed)
    first, following              what world that would make: numbers only. It is cut on the tree itself and taken back
                                  at the next change, so that asking again costs nothing
    take                          make the world that was asked for last the one that counts

The tree is built when the first ranks are handed out, or taken over.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.tree import RankTree, TreePlan, explain
from unbroken_core.ranks.tree.places import OrderKey, Place, natural_key
from unbroken_core.ranks.worlds import (
    UNKNOWN,
    Cut,
    Locals,
    Move,
    Outcome,
    Roll,
    Shortage,
    Worker,
    World,
    compare,
    cut_of,
    ranks_of,
    refuse_crowds,
    shown_name,
)
from unbroken_core.vocabulary.layers import replacement_depth
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import RankReason


@dataclass
class _Seat:
    path: tuple[str, ...]
    key: tuple[OrderKey, ...]
    size: int
    healthy: Locals = ()
    lost: set[int] = field(default_factory=set)
    """What the tree counts as lost: what is not healthy, or excluded."""


@dataclass
class _Pending:
    """A world that was cut on a tree and not taken yet."""

    key: Hashable
    tree: RankTree
    plan: TreePlan
    outcome: Outcome


def pod_order(name: str) -> OrderKey:
    """Sort domains in natural order, unknown ones last, and pods (`name#uid`) by name, then uid."""
    if not name:
        return (1,)
    text, _mark, uid = name.rpartition("#")
    return (0, natural_key(text or name), uid if text else "")


class Ranking:
    """Who is which active rank; see above."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._layers = rules.tree_layers()
        self._seats: dict[str, _Seat] = {}
        self._tree: RankTree | None = None
        self._pending: _Pending | None = None
        self._version = 0
        self.num_placed = 0
        """Rises whenever a pod comes, or moves to other domains."""
        self._excluded: dict[str, frozenset[int]] = {}
        self._returned: dict[str, None] = {}
        """Pods that were removed and are back: nobody who forgot them knows that they may have kept their ranks."""
        self._line_size = 0
        self._line_pods = 0
        self._last_plan: TreePlan | None = None

    # ---------------------------------------------------------------------------------------------- what is known

    def __contains__(self, uid: str) -> bool:
        return uid in self._seats

    @property
    def num_layers(self) -> int:
        """Layers of the settings."""
        return len(self.rules.layers)

    def place(self, uid: str, pod: str, domains: Iterable[str]) -> None:
        """Add a pod, with no healthy worker, or move it. More names than layers are ignored, missing ones unknown."""
        named = tuple(domains)[: self.num_layers]
        path = (*named, *("" for _ in range(self.num_layers - len(named))), f"{pod}#{uid}")
        seat = self._seats.get(uid)
        if seat is not None and seat.path == path:
            return
        self._change()
        self.num_placed += 1
        key = tuple(pod_order(name) for name in path)
        if seat is None:
            size = self.rules.ranks_per_pod
            seat = self._seats[uid] = _Seat(path, key, size, lost=set(range(size)))
        seat.path, seat.key = path, key
        if self._tree is None:
            return
        if uid in self._tree.places:
            self._tree.keep(uid)
            self._tree.move(uid, path)
            self._returned[uid] = None
        else:
            self._tree.add(Place(uid, path, seat.size))
            self._tree.lose(uid, seat.lost)

    def fit(self, uid: str, healthy: Locals) -> None:
        """Note which workers of a pod could have a rank."""
        seat = self._seats.get(uid)
        if seat is None or seat.healthy == healthy:
            return
        seat.healthy = healthy
        self._settle(uid, seat)

    def remove(self, uid: str) -> None:
        """Forget a pod; its ranks stay vacant until the next world. Nothing happens when it is not there."""
        if self._seats.pop(uid, None) is None:
            return
        self._change()
        self._excluded.pop(uid, None)
        if self._tree is not None:
            self._tree.remove(uid)

    def exclude(self, places: Mapping[str, Set[int]]) -> None:
        """Treat these local ranks, and no others, as lost, however healthy they are."""
        if not places and not self._excluded:
            return
        wanted = {uid: frozenset(locals_) for uid, locals_ in places.items() if uid in self._seats}
        changed = [uid for uid in {**self._excluded, **wanted} if self._excluded.get(uid) != wanted.get(uid)]
        self._excluded = wanted
        for uid in changed:
            self._settle(uid, self._seats[uid])

    def names(self, uid: str) -> tuple[str, ...]:
        """Return the names of the pod's domains for people, outermost first."""
        return tuple(name or UNKNOWN for name in self.domains(uid))

    def domains(self, uid: str) -> tuple[str, ...]:
        """Return the names of the pod's domains, "" where it is unknown; empty for an unknown pod."""
        seat = self._seats.get(uid)
        return () if seat is None else seat.path[:-1]

    def ordered(self, uids: Iterable[str]) -> list[str]:
        """Return the pods in the order of the tree."""
        seats = self._seats
        return sorted((uid for uid in uids if uid in seats), key=lambda uid: seats[uid].key)

    # ------------------------------------------------------------------------------------------------------ worlds

    def first(self, preferred: Set[str]) -> Outcome:
        """Return the first world of what is healthy: `preferred` pods before others, in the order of the tree."""
        key = ("first", self._version, frozenset(preferred))
        if self._pending is not None and self._pending.key == key:
            return self._pending.outcome
        self._take_back()
        if not self._seats:
            return Shortage(0, 0, "no pod has joined")
        tree = self._build()
        plan = tree.start(preferred)
        return self._hold(key, tree, plan)

    def following(self, *, may_promote: bool, may_grow: bool) -> Outcome:
        """Return the world after the one that counts.

        Lost ranks go to spares only with `may_promote`; a world that has shrunk takes in what is ready with either.
        """
        key = ("following", self._version, may_promote, may_grow)
        if self._pending is not None and self._pending.key == key:
            return self._pending.outcome
        self._take_back()
        tree = self._tree
        if tree is None:
            return Shortage(0, 0, "no ranks were handed out")
        plan = tree.plan(use_spares=may_promote, may_grow=may_promote or may_grow)
        return self._hold(key, tree, plan)

    def take(self) -> Cut:
        """Make the world that was asked for last the one that counts. Raises RuntimeError when there is none."""
        pending = self._pending
        if pending is None or isinstance(pending.outcome, Shortage):
            raise RuntimeError("take: want a world, asked for after the last change; got none")
        self._pending = None
        self._version += 1
        is_first = pending.tree is not self._tree
        tree = self._tree = pending.tree
        cut = cut_of(tree, pending.plan, pending.outcome, is_first)
        self._last_plan = replace(pending.plan, take_back=None)
        for uid in self._returned:
            if uid in tree.places:
                cut.ranks[uid] = ranks_of(tree, uid)
        self._returned = {}
        return cut

    @property
    def version(self) -> int:
        """Another one whenever anything has changed."""
        return self._version

    def roll(self) -> Roll:
        """Return who has which rank in the world that counts, and who could have one."""
        self._take_back()
        tree = self._build() if self._tree is None else self._tree
        usable = bytearray(len(tree.host_of))
        idle: list[Worker] = []
        for host in tree.root.innermost():
            for leaf in range(host.first, host.first + host.size) if host.is_usable() else ():
                usable[leaf] = not tree.is_lost[leaf]
                if usable[leaf] and tree.rank_of[leaf] < 0:
                    idle.append(tree.worker(leaf))
        lost = [rank for rank, leaf in enumerate(tree.by_rank) if not usable[leaf]]
        return Roll([tree.worker(leaf) for leaf in tree.by_rank], idle, lost)

    def assign(self, workers: Sequence[Worker]) -> Cut:
        """Give these workers rank 0, 1, ... Raises InputError, and changes nothing, when a domain has too many."""
        self._take_back()
        before: dict[Worker, int] = {}
        if self._tree is not None:
            before = {self._tree.worker(leaf): rank for rank, leaf in enumerate(self._tree.by_rank)}
        after = {worker: rank for rank, worker in enumerate(workers)}
        ranks: dict[str, dict[int, int]] = {}
        for (uid, local_rank), rank in after.items():
            ranks.setdefault(uid, {})[local_rank] = rank
        tree = self._build()
        tree.adopt(ranks)
        refuse_crowds(tree.root)
        is_first = self._tree is None
        moves: dict[str, dict[int, Move]] = {}
        for uid, local_rank in {**before, **after}:
            worker = (uid, local_rank)
            if uid in self._seats and before.get(worker) != after.get(worker):
                moves.setdefault(uid, {})[local_rank] = Move(self._word(worker, after, is_first))
        self._tree = tree
        self._last_plan = None
        self._returned = {}
        self._version += 1
        were_active = {uid for uid, _local_rank in before}
        promoted = tuple(uid for uid in ranks if uid not in were_active)
        return Cut(World(len(after), len(ranks), promoted=promoted), ranks, moves, is_first=True)

    def _word(self, worker: Worker, after: Mapping[Worker, int], is_first: bool) -> RankReason:
        if worker in after:
            return RankReason.FIRST if is_first else RankReason.ASSIGNED
        is_lost = worker[1] in self._seats[worker[0]].lost
        return RankReason.LOST if is_lost else RankReason.STEPPED_ASIDE

    def adopt(self, world_size: int, places: Mapping[int, tuple[str, int]]) -> dict[str, dict[int, int]]:
        """Take over the ranks that workers have: (uid, local rank) by rank. Ranks that are missing here are lost.

        Returns local rank to active rank by uid, lost pods included: their uids are made up.
        """
        self._take_back()
        ranks: dict[str, dict[int, int]] = {}
        size = self.rules.ranks_per_pod
        for rank in range(world_size):
            nobody = (f"lost-{rank // size}", rank % size)
            uid, local_rank = places.get(rank, nobody)
            if local_rank in ranks.get(uid, {}):
                uid, local_rank = nobody  # One worker, two ranks: the first counts.
            ranks.setdefault(uid, {})[local_rank] = rank
        unknown = [uid for uid in ranks if uid not in self._seats]
        nowhere = ("",) * self.num_layers
        tree = self._build([Place(uid, (*nowhere, uid), size) for uid in unknown])
        tree.adopt(ranks)
        self._let_spares_grow(tree)
        for uid in unknown:
            tree.remove(uid)
        self._tree = tree
        self._last_plan = None
        self._version += 1
        return ranks

    def has_rank(self, uid: str, local_rank: int) -> bool:
        """Return whether this worker is active in the world that was asked for last, or else in the one that counts."""
        tree = self._tree if self._pending is None else self._pending.tree
        return tree is not None and uid in tree.places and tree.ranks(uid)[local_rank] is not None

    @property
    def tree(self) -> RankTree | None:
        """The world that counts, to look at until the next change; None before the first. Names are those of places."""
        self._take_back()
        return self._tree

    def explanation(self) -> list[str]:
        """Return what the world that counts has changed, in sentences; empty where no plan of the tree made it."""
        return [] if self._last_plan is None else explain(self._last_plan, shown_name)

    @property
    def rank_0(self) -> tuple[str, int]:
        """Uid and local rank of active rank 0. Raises IndexError without ranks."""
        self._take_back()
        if self._tree is None:
            raise IndexError("rank_0: want a world, got none")
        return self._tree.worker(self._tree.by_rank[0])

    @property
    def num_spare_ranks(self) -> int:
        """Healthy workers without a rank, in domains that may be active."""
        self._take_back()
        return 0 if self._tree is None else self._tree.root.healthy - self._tree.world_size

    # -------------------------------------------------------------------------------------------------- internals

    def _num_healthy(self) -> int:
        """Return how many pods have enough healthy workers for a world."""
        least = self.rules.minimum_ranks_per_pod
        return sum(seat.size - len(seat.lost) >= least for seat in self._seats.values())

    def _change(self) -> None:
        self._take_back()
        self._version += 1

    def _take_back(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.tree is self._tree and pending.plan.take_back is not None:
            pending.tree.undo(pending.plan)

    def _settle(self, uid: str, seat: _Seat) -> None:
        """Tell the tree what has changed of a pod's health."""
        lost = set(range(seat.size)).difference(seat.healthy).union(self._excluded.get(uid, ()))
        if lost == seat.lost:
            return
        self._change()
        before, seat.lost = seat.lost, lost
        if self._tree is not None:
            self._tree.lose(uid, sorted(lost - before))
            self._tree.restore(uid, sorted(before - lost))

    def _build(self, others: Iterable[Place] = ()) -> RankTree:
        places = [Place(uid, seat.path, seat.size) for uid, seat in self._seats.items()]
        tree = RankTree(
            self._layers,
            [*places, *others],
            order=pod_order,
            keeps_whole=not (self.rules.may_split or self.rules.has_code),
            fills_gaps=self.rules.fills_gaps,
            unit=1 if self.rules.may_split else self.rules.ranks_per_pod,
        )
        tree.world_rule = self._world_rule(tree)
        for uid, seat in self._seats.items():
            if seat.lost:
                tree.lose(uid, sorted(seat.lost))
        return tree

    def _world_rule(self, tree: RankTree) -> Callable[[int], int]:
        rules = self.rules

        def world_size(num_ranks: int) -> int:
            self._line_size = num_ranks
            if num_ranks >= rules.full_ranks or not rules.may_split:
                self._line_pods = -(-num_ranks // rules.ranks_per_pod)
            else:
                self._line_pods = sum(host.active > 0 for host in tree.places.values())
            return rules.world_size(num_ranks)

        return world_size

    def _hold(self, key: Hashable, tree: RankTree, plan: TreePlan) -> Outcome:
        if tree is not self._tree and not plan.shortfall:
            self._let_spares_grow(tree)
        outcome = self._outcome_of(tree, plan)
        self._pending = _Pending(key, tree, plan, outcome)
        return outcome

    def _let_spares_grow(self, tree: RankTree) -> None:
        # Where some layer keeps spares from lost ranks of its neighbours, they must not come in by the back door.
        if replacement_depth(self._layers) == 0:
            tree.let_spares_grow()

    def _outcome_of(self, tree: RankTree, plan: TreePlan) -> Outcome:
        rules, num_ranks = self.rules, self._line_size
        if plan.shortfall:
            healthy = tree.root.healthy
            num_pods = healthy // rules.minimum_ranks_per_pod
            return Shortage(
                num_pods, healthy, f"{counted(num_pods, 'healthy pod')} of at least {rules.minimum_replicas}"
            )
        # The script has yet to say who gets ranks: it may choose among all that are healthy.
        num_pods = self._num_healthy() if rules.has_code else self._line_pods
        if num_pods < rules.minimum_replicas:
            detail = f"{counted(num_pods, 'healthy pod')} of at least {rules.minimum_replicas}"
            return Shortage(num_pods, num_ranks, detail)
        if plan.world_size < 1:
            detail = f"{num_ranks} healthy ranks, a multiple of {rules.divisible_by} is wanted"
            return Shortage(self._line_pods, num_ranks, detail)
        if tree is not self._tree:
            return World(plan.world_size, self._line_pods)
        return compare(plan, self._line_pods)
