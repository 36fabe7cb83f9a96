"""The steps of a plan: vacate -> replace -> backfill -> shift -> world size."""

from collections.abc import Collection, Sequence
from heapq import nlargest

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.draft import HOLE, Draft
from unbroken_core.ranks.tree.plan import TreePlan
from unbroken_core.ranks.tree.ports import Ranked
from unbroken_core.ranks.tree.replacement import Replacement
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import UNLIMITED, backfill_depth
from unbroken_core.vocabulary.reasons import RankReason


def next_plan(tree: Ranked, use_spares: bool, may_grow: bool) -> TreePlan:
    """Cut the plan after the present one; see `RankTree.plan`."""
    if tree.root.is_gone:
        return _impossible(tree)
    draft = Draft(tree)
    try:
        if tree.keeps_whole:
            draft.complete_last()
        draft.vacate(_lost_or_barred(tree, draft))
        draft.vacate(_over_limit(tree), RankReason.STEPPED_ASIDE)
        if draft.vacant and use_spares:
            Replacement(draft).run()
        if draft.vacant:
            _backfill(draft)
        draft.close_holes()
        _resize(draft, may_grow)
    except BaseException:
        draft.roll_back()
        raise
    tree.suspects = {}
    tree.vacating = {}
    return draft.finish()


def first_plan(tree: Ranked) -> TreePlan:
    """Return the plan of a tree that was just activated."""
    if tree.root.is_gone:
        return _impossible(tree)
    draft = Draft(tree)
    try:
        _resize(draft, may_grow=True)
    except BaseException:
        draft.roll_back()
        raise
    tree.suspects = {}
    leaves = list(tree.by_rank)
    tree.num_plans += 1
    return TreePlan(
        number=tree.num_plans - 1,
        world_size=len(leaves),
        spare_ranks=len(tree) - len(leaves) - tree.num_lost,
        lost_ranks=tree.num_lost,
        leaves=leaves,
        hosts=[tree.host_of[leaf] for leaf in leaves],
        before=[-1] * len(leaves),
        after=list(range(len(leaves))),
        reasons=[RankReason.FIRST] * len(leaves),
    )


def recount(tree: Ranked) -> None:
    """Derive all counts from the flags of the leaves, bottom-up."""
    _recount_below(tree, tree.root)


def _recount_below(tree: Ranked, node: Domain) -> None:
    if node.size:
        first, end = node.first, node.first + node.size
        node.healthy = node.size - tree.is_lost.count(1, first, end)
        node.spare = tree.is_spare.count(1, first, end)
    else:
        healthy = active = spare = 0
        used: list[Domain] = []
        whole: list[Domain] = []
        for child in node.children:
            _recount_below(tree, child)
            active += child.active
            if not child.is_barred:
                healthy += child.healthy
            if child.capacity:
                spare += child.capacity
                (used if child.active else whole).append(child)
        node.healthy, node.active, node.spare = healthy, active, spare
        node.spare_used, node.spare_whole = used, whole
    node.refresh()
    if node.is_barred or node.active > node.maximum:
        tree.suspects[node] = None


def activate(tree: Ranked, only_usable: bool, preferred: Collection[str] = ()) -> None:
    """Hand out ranks: a worker gets one while each domain above it is below its maximum.

    Workers of preferred places are chosen first; ranks follow the order of the tree all the same.
    """
    limited = [depth for depth, layer in enumerate(tree.layers) if layer.maximum < UNLIMITED]
    room: dict[Domain, int] = {}
    rank_of, is_lost, by_rank = tree.rank_of, tree.is_lost, tree.by_rank
    chosen: dict[Domain, Sequence[int]] = {}
    hosts = list(tree.root.innermost())
    for host in sorted(hosts, key=lambda host: host.key not in preferred) if preferred else hosts:
        if only_usable and not host.is_usable():
            continue
        first, end = host.first, host.first + host.size
        leaves: Sequence[int] = range(first, end)
        if only_usable and is_lost.find(1, first, end) >= 0:
            leaves = [leaf for leaf in leaves if not is_lost[leaf]]
        above = [host.ancestor(depth) for depth in limited]
        count = min([len(leaves), *(room.setdefault(domain, domain.maximum) for domain in above)])
        chosen[host] = leaves[:count]
        for domain in above:
            room[domain] -= count
    for host in hosts:
        leaves = chosen.get(host, ())
        for rank, leaf in enumerate(leaves, len(by_rank)):
            rank_of[leaf] = rank
            tree.is_spare[leaf] = 0
        by_rank += leaves
        host.active = len(leaves)
    recount(tree)


def adopt(tree: Ranked, leaf_by_rank: Sequence[int]) -> None:
    """Give the ranks that workers have already."""
    for rank, leaf in enumerate(leaf_by_rank):
        tree.rank_of[leaf] = rank
        tree.mark_spare(leaf, False)
        tree.may_grow[leaf] = 1
        tree.host_of[leaf].active += 1
        if tree.is_lost[leaf]:
            tree.vacating[leaf] = None
        tree.by_rank.append(leaf)
    recount(tree)


def _impossible(tree: Ranked) -> TreePlan:
    root = tree.root
    tree.num_plans += 1
    return TreePlan(
        number=tree.num_plans - 1,
        world_size=0,
        spare_ranks=len(tree) - tree.num_lost,
        lost_ranks=tree.num_lost,
        shortfall=f"want at least {max(root.minimum, 1)} healthy workers in domains above their minimum, "
        f"got {root.healthy} of {len(tree)}",
    )


def _lost_or_barred(tree: Ranked, draft: Draft) -> list[int]:
    """Return the leaves, in tree order, whose rank must go: lost, or in a domain below its minimum."""
    rank_of = tree.rank_of
    found = {leaf: None for leaf in tree.vacating if tree.is_lost[leaf] and rank_of[leaf] >= 0}
    for domain in tree.suspects:
        if not domain.is_barred:
            continue
        draft.barred[domain] = None
        if not domain.active:
            continue
        for host in domain.innermost():
            span = range(host.first, host.first + host.size)
            found.update((leaf, None) for leaf in span if rank_of[leaf] >= 0)
    return tree.in_order(found)


def _over_limit(tree: Ranked) -> list[int]:
    """Return the leaves, in tree order, that must step aside where a domain has more active workers than allowed.

    Happens when places move. The highest ranks of the domain go; what goes in an inner domain counts for outer ones.
    """
    found: dict[int, None] = {}
    crowded = [domain for domain in tree.suspects if domain.active > domain.maximum]
    for domain in sorted(crowded, key=lambda domain: -domain.depth):
        ranks = _ranks_below(tree, domain)
        staying = [rank for rank in ranks if tree.by_rank[rank] not in found]
        excess = nlargest(len(staying) - domain.maximum, staying)
        found.update((tree.by_rank[rank], None) for rank in excess)
    return tree.in_order(found)


def _ranks_below(tree: Ranked, domain: Domain) -> list[int]:
    ranks: list[int] = []
    for host in domain.innermost():
        ranks += tree.rank_of[host.first : host.first + host.size]
    return [rank for rank in ranks if rank >= 0]


def _backfill(draft: Draft) -> None:
    """Let the highest ranks of each backfill domain take the vacant ones, lowest to first in tree order."""
    tree = draft.tree
    if tree.fills_gaps:
        _fill_gaps(draft)
        return
    depth = backfill_depth(tree.layers)
    if depth == len(tree.layers):
        return
    vacant_by_domain: dict[Domain, list[int]] = {}
    for leaf in tree.in_order(draft.vacant):
        vacant_by_domain.setdefault(tree.host_of[leaf].ancestor(depth), []).append(leaf)
    for domain, vacant in vacant_by_domain.items():
        if domain.parent is None:
            ranks = _highest(tree, len(vacant))
        else:
            ranks = sorted(nlargest(len(vacant), _ranks_below(tree, domain)))
        # Fewer donors than vacant ranks: the rest is closed by shifting.
        for rank, leaf in zip(ranks, vacant, strict=False):
            draft.take_over(tree.by_rank[rank], leaf)


def _fill_gaps(draft: Draft) -> None:
    """Let the ranks above the new size take the vacant ones below it, in order; others stay."""
    tree = draft.tree
    size = len(tree.by_rank) - len(draft.vacant)
    gaps = sorted((rank, leaf) for leaf, rank in draft.vacant.items() if rank < size)
    movers = [leaf for leaf in tree.by_rank[size:] if leaf != HOLE]
    for (_rank, vacated), mover in zip(gaps, movers, strict=True):
        draft.take_over(mover, vacated)


def _highest(tree: Ranked, count: int) -> list[int]:
    """Return the highest ranks that are taken, ascending."""
    found: list[int] = []
    rank = len(tree.by_rank)
    while rank > 0 and len(found) < count:
        rank -= 1
        if tree.by_rank[rank] != HOLE:
            found.append(rank)
    return found[::-1]


def _resize(draft: Draft, may_grow: bool) -> None:
    """Append all that may grow, then let the world rule cut the end: so each plan starts from all that is healthy."""
    tree = draft.tree
    if tree.growable and tree.root.capacity:
        _grow(draft, may_grow)
    size = len(tree.by_rank)
    wanted = size if tree.world_rule is None else _ask(tree.world_rule, size)
    if wanted < size:
        draft.truncate(wanted)


def _grow(draft: Draft, may_grow: bool) -> None:
    """Append growable workers: those of places that are partly active first, then in the order of the tree.

    Without `may_grow`, only the former.
    """
    tree = draft.tree
    by_host: dict[Domain, list[int]] = {}
    for leaf in tree.in_order(tree.growable):
        by_host.setdefault(tree.host_of[leaf], []).append(leaf)
    for host, leaves in sorted(by_host.items(), key=lambda item: item[0].active == 0):
        count = min(host.capacity, len(leaves)) if host.active or may_grow else 0
        while count and not (host.is_usable() and host.has_room(count)):
            count -= 1
        if count:
            draft.append(leaves[:count])


def _ask(rule: object, size: int) -> int:
    if not callable(rule):
        raise InputError(f"world rule: want a callable, got {rule!r}")
    try:
        wanted = rule(size)
    except Exception as error:
        raise InputError(
            f"world rule: want a number of active ranks from 0 to {size}, got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 0 <= wanted <= size:
        raise InputError(f"world rule: want a number of active ranks from 0 to {size}, got {wanted!r}")
    return wanted
