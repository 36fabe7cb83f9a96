"""Choosing a spare for each vacated rank.

1. Whole for whole: the ranks of a domain that is gone altogether pass to a wholly spare domain of the same layer, inner
   domain by inner domain and local rank by local rank; the largest first. What finds none is split into its parts.
2. Worker for worker: within the nearest domain that has a spare, one of a place that is in use already, of the same
   local rank if possible; a wholly spare place is broken last.

Both seek the nearest first (lowest common domain), no higher than the layers allow, and never exceed a maximum. When
there are too few spares, the lowest places of the tree are served.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.draft import Draft
from unbroken_core.vocabulary.layers import replacement_depth

MAX_CANDIDATES = 64
"""How many wholly spare domains of one neighbourhood are compared before the best of them is taken."""

Pairs = list[tuple[int, int]]
"""(vacated leaf, spare leaf)"""
Request = TypeVar("Request")


class Replacement:
    """The search of one plan."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._tree = draft.tree
        self._top = replacement_depth(self._tree.layers)
        self._innermost = len(self._tree.layers) - 1
        self._need: dict[Domain, int] = {}
        self._vacated: dict[Domain, list[int]] = {}
        # What was sought in vain stays absent while spares only get fewer; see _forget.
        self._without_whole: dict[tuple[Domain, int], int] = {}
        self._without_fragment: set[tuple[Domain, int | None]] = set()

    def run(self) -> None:
        """Give the vacated ranks to spares, as far as there are any."""
        if self._top > self._innermost or not self._tree.root.capacity:
            return
        groups: dict[Domain, list[int]] = {}
        for leaf in self._tree.in_order(self._draft.vacant):
            groups.setdefault(self._tree.host_of[leaf].ancestor(self._top), []).append(leaf)
        for top, leaves in groups.items():
            if top.capacity and top.is_usable():
                self._serve(leaves)

    def _serve(self, leaves: list[int]) -> None:
        blocks, singles = self._blocks(leaves)
        for depth in range(self._top + 1, self._innermost + 1):
            requests = blocks.pop(depth, [])
            left = self._match(requests, depth, self._replace_block) if requests else []
            for block in left:
                if depth < self._innermost:
                    inner = [child for child in block.children if self._need.get(child)]
                    blocks[depth + 1] = self._in_order([*blocks.get(depth + 1, ()), *inner])
                else:
                    singles += self._vacated[block]
        if singles:
            singles = self._tree.in_order(singles)
            self._match(singles, self._innermost + 1, self._replace_worker)

    def _blocks(self, leaves: list[int]) -> tuple[dict[int, list[Domain]], list[int]]:
        """Split the vacated leaves into domains that are gone altogether, by depth, and single ones."""
        blocks: dict[Domain, None] = {}
        singles: list[int] = []
        self._need, self._vacated = {}, {}
        for leaf in leaves:
            self._vacated.setdefault(self._tree.host_of[leaf], []).append(leaf)
        for host, vacated in self._vacated.items():
            gone = self._outermost_gone(host)
            if gone is None:
                singles += vacated
                continue
            blocks[gone] = None
            node: Domain | None = host
            while node is not None and node.depth >= gone.depth:
                self._need[node] = self._need.get(node, 0) + len(vacated)
                node = node.parent
        by_depth: dict[int, list[Domain]] = {}
        for block in blocks:
            by_depth.setdefault(block.depth, []).append(block)
        return by_depth, singles

    def _outermost_gone(self, host: Domain) -> Domain | None:
        found: Domain | None = None
        node: Domain | None = host
        while node is not None and node.depth > self._top:
            if node.is_gone:
                found = node
            node = node.parent
        return found

    def _in_order(self, domains: list[Domain]) -> list[Domain]:
        by_leaf = {next(domain.innermost()).first: domain for domain in domains}
        return [by_leaf[leaf] for leaf in self._tree.in_order(by_leaf)]

    def _match(
        self, requests: list[Request], depth: int, replace: Callable[[Request, int], Sequence[Pairs]]
    ) -> list[Request]:
        """Serve the requests, nearest first; return those that found nothing, in order."""
        done = self._pass(requests, depth, replace)
        if 0 < len(done) < len(requests) and any(index not in done for index in range(len(done))):
            # Too few spares: the first of the requests get them, and again the nearest first among these.
            for filled in reversed(list(done.values())):
                for pairs in reversed(filled):
                    self._draft.unfill(pairs)
            self._forget()
            kept = len(done)
            done = self._pass(requests[:kept], depth, replace)
            late = self._pass(requests[kept:], depth, replace)
            done.update((kept + index, filled) for index, filled in late.items())
        return [request for index, request in enumerate(requests) if index not in done]

    def _pass(
        self, requests: list[Request], depth: int, replace: Callable[[Request, int], Sequence[Pairs]]
    ) -> dict[int, Sequence[Pairs]]:
        done: dict[int, Sequence[Pairs]] = {}
        pending = list(enumerate(requests))
        for distance in range(depth - 1, self._top - 1, -1):
            waiting = []
            for index, request in pending:
                filled = replace(request, distance)
                if filled:
                    done[index] = filled
                else:
                    waiting.append((index, request))
            pending = waiting
        return done

    # ------------------------------------------------------------------------------------------------ whole for whole

    def _replace_block(self, block: Domain, depth: int) -> Sequence[Pairs]:
        """Give the block's ranks to a wholly spare domain below its ancestor at `depth`; empty when there is none."""
        need = self._need[block]
        around = block.ancestor(depth)
        if need < 2 or not self._may_take(around, need):
            return []
        key = (around, block.depth)
        if self._without_whole.get(key, need + 1) <= need:
            return []
        best: list[Pairs] = []
        best_excess = -1
        is_empty = True
        for candidate in islice(self._whole_domains(around, block.depth, need), MAX_CANDIDATES):
            is_empty = False
            pairs = self._fit(block, candidate)
            if not pairs:
                continue
            excess = self._excess(pairs, candidate.capacity - need)
            if not best or excess < best_excess:
                best, best_excess = pairs, excess
            if excess == 0:
                break
        if is_empty:
            self._without_whole[key] = min(need, self._without_whole.get(key, need))
        self._fill(best)
        return best

    def _excess(self, pairs: list[Pairs], left_over: int) -> int:
        """Return 0 for a domain that is used up and keeps every local rank; more for one that fits worse."""
        host_of = self._tree.host_of
        moved = sum(
            vacated - host_of[vacated].first != spare - host_of[spare].first
            for of_host in pairs
            for vacated, spare in of_host
        )
        return moved * (1 << 30) + left_over

    def _whole_domains(self, node: Domain, depth: int, need: int) -> Iterator[Domain]:
        """Yield wholly spare domains of this depth: first those in neighbourhoods that are in use already."""
        if node.depth == depth - 1:
            yield from (child for child in node.spare_whole if child.capacity >= need)
            return
        for children in (node.spare_used, node.spare_whole):
            for child in children:
                if child.capacity >= need:
                    yield from self._whole_domains(child, depth, need)

    def _fit(self, lost: Domain, spare: Domain) -> list[Pairs]:
        """Map the vacated leaves of one domain to spare leaves of another, by innermost domain; empty if impossible."""
        if lost.depth == self._innermost:
            return [self._fit_workers(self._vacated[lost], lost, spare)]
        found: list[Pairs] = []
        candidates = iter(spare.spare_whole)
        for child in lost.children:
            need = self._need.get(child, 0)
            if not need:
                continue
            for candidate in candidates:
                pairs = self._fit(child, candidate) if candidate.capacity >= need else []
                if pairs:
                    found += pairs
                    break
            else:
                return []
        return found

    def _fit_workers(self, vacated: list[int], lost: Domain, spare: Domain) -> Pairs:
        """Keep each local rank that is spare there; the others take what is left, in order."""
        is_spare, offset = self._tree.is_spare, spare.first - lost.first
        kept = [leaf for leaf in vacated if leaf - lost.first < spare.size and is_spare[leaf + offset]]
        if len(kept) == len(vacated):
            return [(leaf, leaf + offset) for leaf in vacated]
        taken = {leaf + offset for leaf in kept}
        free = iter(
            leaf for leaf in range(spare.first, spare.first + spare.size) if is_spare[leaf] and leaf not in taken
        )
        same = set(kept)
        return [(leaf, leaf + offset if leaf in same else next(free)) for leaf in vacated]

    # ---------------------------------------------------------------------------------------------- worker for worker

    def _replace_worker(self, leaf: int, depth: int) -> Sequence[Pairs]:
        host = self._tree.host_of[leaf]
        around = host.ancestor(depth)
        if not self._may_take(around, 1):
            return []
        local_rank = leaf - host.first
        spare = self._fragment(around, local_rank)
        if spare is None:
            spare = self._fragment(around, None)
        if spare is None:
            spare = self._of_whole(around, local_rank)
        if spare is None:
            return []
        filled = [[(leaf, spare)]]
        self._fill(filled)
        return filled

    def _fragment(self, node: Domain, local_rank: int | None) -> int | None:
        """Return a spare of a place that is in use, with this local rank (None: any)."""
        key = (node, local_rank)
        if key in self._without_fragment:
            return None
        found: int | None = None
        if node.size:
            found = self._spare_of(node, local_rank)
        for child in node.spare_used:
            found = self._fragment(child, local_rank)
            if found is not None:
                break
        if found is None:
            self._without_fragment.add(key)
        return found

    def _of_whole(self, node: Domain, local_rank: int) -> int | None:
        """Return a spare of a place that is wholly spare."""
        if node.size:
            if node.active:
                return None
            found = self._spare_of(node, local_rank)
            return self._spare_of(node, None) if found is None else found
        for children in (node.spare_used, node.spare_whole):
            for child in children:
                found = self._of_whole(child, local_rank)
                if found is not None:
                    return found
        return None

    def _spare_of(self, host: Domain, local_rank: int | None) -> int | None:
        if local_rank is None:
            leaf = self._tree.is_spare.find(1, host.first, host.first + host.size)
            return None if leaf < 0 else leaf
        is_there = local_rank < host.size and self._tree.is_spare[host.first + local_rank]
        return host.first + local_rank if is_there else None

    # ------------------------------------------------------------------------------------------------------------ both

    def _may_take(self, around: Domain, num_ranks: int) -> bool:
        if around.capacity < num_ranks:
            return False
        return around.parent is None or (around.parent.has_room(num_ranks) and around.is_usable())

    def _fill(self, filled: Sequence[Pairs]) -> None:
        for pairs in filled:
            host = self._tree.host_of[pairs[0][1]]
            breaks = host.active == 0 and host.spare > len(pairs)
            self._draft.fill(pairs)
            if breaks:
                self._without_fragment.clear()

    def _forget(self) -> None:
        self._without_whole.clear()
        self._without_fragment.clear()
