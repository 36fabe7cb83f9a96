"""The tree of ranks beside a model of its rules: slow, written from docs/topology.md, and with nothing clever in it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from unbroken_core.ranks.tree.world import RankedWorld
from unbroken_core.vocabulary.layers import Layer

Path = tuple[str, ...]
Rule = Callable[[int], int]
Serve = Callable[[Any, Path, dict[int, int]], bool]
Where = Callable[[Any], Path]


class Model:
    """Workers are numbered in the order of the tree. A domain is a prefix of a path; () is the root."""

    def __init__(self, layers: Sequence[Layer], paths: Sequence[Path], rule: Rule | None) -> None:
        self.layers, self.paths, self.rule = layers, paths, rule
        self.all = range(len(paths))
        self.lost: set[int] = set()
        self.rank: dict[int, int] = {}
        self.was_active: set[int] = set()
        self.broken: list[Path] = []
        for worker in self.all:
            if all(self.room(domain) > 0 for domain in self.domains_of(worker)):
                self.rank[worker] = len(self.rank)

    # What a domain is.

    def domains_of(self, worker: int) -> list[Path]:
        return [self.paths[worker][:depth] for depth in range(len(self.layers))]

    def members(self, domain: Path) -> list[int]:
        return [worker for worker in self.all if self.paths[worker][: len(domain)] == domain]

    def children(self, domain: Path) -> list[Path]:
        return list(dict.fromkeys(self.paths[worker][: len(domain) + 1] for worker in self.members(domain)))

    def is_innermost(self, domain: Path) -> bool:
        return len(domain) == len(self.layers) - 1

    def num_active(self, domain: Path) -> int:
        return sum(worker in self.rank for worker in self.members(domain))

    def room(self, domain: Path) -> int:
        limit = self.layers[len(domain)].max_ranks
        return 10**9 if limit is None else limit - self.num_active(domain)

    def usable(self) -> set[int]:
        """Workers that are healthy, in domains that all have their minimum."""
        standing = {worker for worker in self.all if worker not in self.lost}
        for depth in reversed(range(len(self.layers))):
            for domain in {self.paths[worker][:depth] for worker in self.all}:
                inside = standing.intersection(self.members(domain))
                if len(inside) < self.layers[depth].min_ranks:
                    standing -= inside
        return standing

    def spares(self, domain: Path) -> list[int]:
        usable = self.usable()
        return [worker for worker in self.members(domain) if worker in usable and worker not in self.rank]

    def capacity(self, domain: Path) -> int:
        """How many spares of the domain could be active at once, by its limits and those inside."""
        if self.is_innermost(domain):
            inside = len(self.spares(domain))
        else:
            inside = sum(self.capacity(child) for child in self.children(domain))
        return max(min(inside, self.room(domain)), 0)

    def may_take(self, around: Path, number: int) -> bool:
        """Whether so many spares of `around` may become active, by all limits from there up, too."""
        above = [around[:depth] for depth in range(len(around))]
        return self.capacity(around) >= number and all(self.room(domain) >= number for domain in above)

    def local_rank(self, worker: int) -> int:
        return worker - self.members(self.paths[worker])[0]

    # The steps of a plan.

    def step(self, terminated: set[int]) -> bool:
        """Return whether a plan was possible."""
        self.lost |= terminated
        self.broken = []
        usable = self.usable()
        if not usable:
            self.lost = set(self.all)
            self.rank = {}
            return False
        vacant = {worker: rank for worker, rank in sorted(self.rank.items()) if worker not in usable}
        for worker in vacant:
            del self.rank[worker]
            self.was_active.add(worker)
        whole = {path for path in set(self.paths) if self.num_active(path) == 0 and self.spares(path)}
        self.replace(vacant)
        whole = {path for path in whole if self.num_active(path)}
        gaps = self.backfill(vacant)
        for worker, rank in self.rank.items():
            self.rank[worker] = rank - sum(gap < rank for gap in gaps)
        self.resize()
        self.broken = sorted(path for path in whole if self.num_active(path) and self.spares(path))
        self.lost |= set(self.all) - self.usable()
        return True

    def replace(self, vacant: dict[int, int]) -> None:
        top = len(self.layers)
        while top > 0 and self.layers[top - 1].replace_from:
            top -= 1
        if top == len(self.layers):
            return
        for region in dict.fromkeys(self.paths[worker][:top] for worker in vacant):
            inside = {worker: rank for worker, rank in vacant.items() if self.paths[worker][:top] == region}
            self.replace_in(region, inside)
            for worker in [worker for worker in vacant if self.paths[worker][:top] == region and worker not in inside]:
                del vacant[worker]

    def replace_in(self, region: Path, vacant: dict[int, int]) -> None:
        usable = self.usable()

        def is_gone(domain: Path) -> bool:
            return not usable.intersection(self.members(domain))

        blocks: list[Path] = []
        singles: list[int] = []
        for worker in vacant:
            gone = [self.paths[worker][:depth] for depth in range(len(region) + 1, len(self.layers))]
            gone = [domain for domain in gone if is_gone(domain)]
            if not gone:
                singles.append(worker)
            elif gone[0] not in blocks:
                blocks.append(gone[0])
        for depth in range(len(region) + 1, len(self.layers)):
            now = sorted((block for block in blocks if len(block) == depth), key=lambda b: self.members(b)[0])
            left = self.match(region, now, vacant, self.replace_block, lambda block: block) if now else []
            for block in left:
                if depth == len(self.layers) - 1:
                    singles += [worker for worker in self.members(block) if worker in vacant]
                else:
                    blocks += [c for c in self.children(block) if any(worker in vacant for worker in self.members(c))]
        self.match(region, sorted(singles), vacant, self.replace_worker, lambda worker: self.paths[worker])

    def match(self, region: Path, requests: list[Any], vacant: dict[int, int], serve: Serve, place: Where) -> list[Any]:
        """Nearest first; when not all find a spare, as many of the first requests as could be served, again nearest."""
        before = (dict(self.rank), dict(vacant))
        unserved = self.one_pass(region, requests, vacant, serve, place)
        served = [request for request in requests if request not in unserved]
        if served and served != requests[: len(served)]:
            self.rank = dict(before[0])
            vacant.clear()
            vacant.update(before[1])
            first, rest = requests[: len(served)], requests[len(served) :]
            unserved = self.one_pass(region, first, vacant, serve, place)
            unserved += self.one_pass(region, rest, vacant, serve, place)
        return unserved

    def one_pass(
        self, region: Path, requests: list[Any], vacant: dict[int, int], serve: Serve, place: Where
    ) -> list[Any]:
        pending = list(requests)
        # The nearest neighbourhood is the domain around the request; of a single worker its own innermost domain.
        depth = max((len(place(request)) for request in pending), default=0)
        is_block = serve == self.replace_block
        for distance in range(depth - (1 if is_block else 0), len(region) - 1, -1):
            pending = [request for request in pending if not serve(request, place(request)[:distance], vacant)]
        return pending

    def replace_block(self, block: Path, around: Path, vacant: dict[int, int]) -> bool:
        need = sum(worker in vacant for worker in self.members(block))
        if need < 2 or not self.may_take(around, need):
            return False
        best: tuple[tuple[int, int], dict[int, int]] | None = None
        for candidate in self.whole_domains(around, len(block), need):
            found = self.fit(block, candidate, vacant)
            if found is None:
                continue
            moved = sum(self.local_rank(old) != self.local_rank(new) for old, new in found.items())
            cost = (moved, self.capacity(candidate) - need)
            if best is None or cost < best[0]:
                best = (cost, found)
        if best is None:
            return False
        for old, new in best[1].items():
            self.rank[new] = vacant.pop(old)
        return True

    def whole_domains(self, around: Path, depth: int, need: int) -> Iterator[Path]:
        """Wholly spare domains of a layer; at each level those in use come before those that are wholly spare."""
        children = [child for child in self.children(around) if self.capacity(child) >= need]
        for child in sorted(children, key=lambda child: self.num_active(child) == 0):
            if len(child) == depth:
                if self.num_active(child) == 0:
                    yield child
            else:
                yield from self.whole_domains(child, depth, need)

    def fit(self, lost: Path, spare: Path, vacant: dict[int, int]) -> dict[int, int] | None:
        if self.is_innermost(lost):
            olds = [worker for worker in self.members(lost) if worker in vacant]
            by_local = {self.local_rank(worker): worker for worker in self.spares(spare)}
            found = {old: by_local.pop(self.local_rank(old)) for old in olds if self.local_rank(old) in by_local}
            rest = sorted(by_local.values())
            return {old: found[old] if old in found else rest.pop(0) for old in olds}
        found = {}
        candidates = [child for child in self.children(spare) if self.capacity(child)]
        for child in self.children(lost):
            need = sum(worker in vacant for worker in self.members(child))
            while need:
                if not candidates:
                    return None
                candidate = candidates.pop(0)
                inner = self.fit(child, candidate, vacant) if self.capacity(candidate) >= need else None
                if inner is not None:
                    found.update(inner)
                    need = 0
        return found

    def replace_worker(self, worker: int, around: Path, vacant: dict[int, int]) -> bool:
        if not self.may_take(around, 1):
            return False

        def preference(spare: int) -> tuple[object, ...]:
            place = self.paths[spare]
            between = [place[:depth] for depth in range(len(around) + 1, len(place) + 1)]
            is_other_local = self.local_rank(spare) != self.local_rank(worker)
            if self.num_active(place) or place == around:
                return (0, is_other_local, spare)
            # A wholly spare place: at each level neighbours in use first; inside, the same local rank first.
            return (
                1,
                [(self.num_active(domain) == 0, self.members(domain)[0]) for domain in between],
                is_other_local,
                spare,
            )

        reachable = [
            spare
            for spare in self.spares(around)
            if all(self.room(self.paths[spare][:depth]) > 0 for depth in range(len(self.layers)))
        ]
        self.rank[min(reachable, key=preference)] = vacant.pop(worker)
        return True

    def backfill(self, vacant: dict[int, int]) -> list[int]:
        """Return the gaps that remain."""
        top = len(self.layers)
        while top > 0 and self.layers[top - 1].close_gaps:
            top -= 1
        gaps = []
        domains = {worker: self.paths[worker][:top] if top < len(self.layers) else None for worker in vacant}
        for domain in dict.fromkeys(domains.values()):
            here = sorted(worker for worker in vacant if domains[worker] == domain)
            donors: list[int] = []
            if domain is not None:
                active = [worker for worker in self.members(domain) if worker in self.rank]
                donors = sorted(active, key=lambda worker: self.rank[worker])[-len(here) :]
            gaps += [self.rank[donor] for donor in donors]
            gaps += [vacant[worker] for worker in here[len(donors) :]]
            for donor, worker in zip(donors, here, strict=False):
                self.rank[donor] = vacant[worker]
        return gaps

    def resize(self) -> None:
        usable = self.usable()
        returning = [worker for worker in sorted(self.was_active) if worker in usable and worker not in self.rank]
        places = list(dict.fromkeys(self.paths[worker] for worker in returning))
        for place in sorted(places, key=lambda place: self.num_active(place) == 0):
            for worker in returning:
                if self.paths[worker] == place and all(self.room(domain) > 0 for domain in self.domains_of(worker)):
                    self.rank[worker] = len(self.rank)
        size = len(self.rank) if self.rule is None else self.rule(len(self.rank))
        for worker in [worker for worker, rank in self.rank.items() if rank >= size]:
            del self.rank[worker]
            self.was_active.add(worker)


@dataclass(frozen=True)
class Case:
    """A tree, and what happens to it."""

    layers: tuple[Layer, ...]
    paths: tuple[Path, ...]
    rule: Rule | None
    losses: tuple[tuple[int, ...], ...]
    """Ranks among the living, modulo their number, of each step after the first."""


RULES: tuple[Rule | None, ...] = (
    None,
    lambda n: n // 2 * 2,
    lambda n: n // 3 * 3,
    lambda n: n // 4 * 4,
    lambda n: min(n, 5),
)


@st.composite
def layers_of(draw: st.DrawFn, depth: int, sizes: Sequence[int]) -> tuple[Layer, ...]:
    found = []
    for level in range(depth):
        minimum = draw(st.sampled_from([0, 1, 1, 1, 2, min(3, sizes[level]), sizes[level]]))
        maximum = draw(st.sampled_from([None, None, None, max(1, sizes[level] - 1), max(1, sizes[level] // 2)]))
        if maximum is not None:
            maximum = max(maximum, minimum, 1)
        found.append(
            Layer(
                f"layer-{level}",
                min_ranks=minimum,
                max_ranks=maximum,
                replace_from=draw(st.booleans()),
                close_gaps=draw(st.booleans()),
            )
        )
    if draw(st.booleans()):
        found = [
            Layer(
                item.name,
                min_ranks=item.min_ranks,
                max_ranks=item.max_ranks,
                replace_from=True,
                close_gaps=item.close_gaps,
            )
            for item in found
        ]
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn, max_losses: int = 5) -> Case:
    depth = draw(st.integers(1, 5))
    fan_out = [draw(st.integers(1, 4)) for _ in range(depth)]
    paths: list[Path] = []

    def grow(prefix: Path) -> None:
        if len(prefix) == depth - 1:
            size = fan_out[-1] if draw(st.integers(0, 3)) else draw(st.integers(1, 4))
            paths.extend([prefix] * size)
            return
        number = fan_out[len(prefix)] if draw(st.integers(0, 3)) else draw(st.integers(1, 4))
        for child in range(number):
            grow((*prefix, f"d{child}"))

    grow(())
    paths = paths[:40]
    sizes = [max(1, len(paths))]
    for level in range(1, depth):
        sizes.append(max(1, sizes[-1] // max(1, fan_out[level - 1])))
    losses = draw(st.lists(st.lists(st.integers(0, 39), max_size=12), min_size=1, max_size=max_losses))
    return Case(
        draw(layers_of(depth, sizes)), tuple(paths), draw(st.sampled_from(RULES)), tuple(tuple(loss) for loss in losses)
    )


def terminated_now(world: RankedWorld, loss: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return (ranks among the living, workers in tree order)."""
    living = [leaf for leaf in range(len(world.tree.is_lost)) if not world.tree.is_lost[leaf]]
    ranks = {number % len(living) for number in loss}
    return ranks, {living[rank] for rank in ranks}


def run_case(case: Case) -> tuple[RankedWorld, Model]:
    """Walk both through all steps, comparing after each; return them."""
    world = RankedWorld(case.layers, dict(enumerate(case.paths)), case.rule)
    model = Model(case.layers, case.paths, case.rule)
    for loss in ((), *case.losses):
        if not world.world_size:
            break
        ranks, workers = terminated_now(world, loss) if world.tree.by_rank else (set(), set())
        plan = world.step(sorted(ranks))
        is_possible = model.step(workers)
        tree = world.tree
        seen = {leaf: rank for leaf, rank in enumerate(tree.rank_of) if rank >= 0 and not plan.shortfall}
        assert (seen, is_possible) == (model.rank, not plan.shortfall)
        assert {leaf for leaf in model.all if tree.is_lost[leaf]} == model.lost
        assert sorted(plan.broken_spares) == model.broken
    return world, model


TWO_REGIONS = Case(
    (
        Layer("layer-0", replace_from=False),
        Layer("layer-1", max_ranks=3, replace_from=False),
        Layer("layer-2", replace_from=True),
    ),
    (("r0", "a"),) * 2 + (("r0", "b"),) * 4 + (("r1", "c"),) * 2 + (("r1", "d"),) * 4,
    None,
    ((0, 2, 8),),
)
"""Spares are sought in several regions of one plan, each of them alone."""


@settings(max_examples=400)
@example(TWO_REGIONS)
@given(cases())
def test_ranks_are_those_of_the_model_of_the_rules(case: Case) -> None:
    """0.29 to 0.45"""
    run_case(case)
