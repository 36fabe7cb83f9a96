"""The scratch of one plan: writes ranks and counts of the tree, and can take all of it back."""

from collections.abc import Iterable

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.plan import TreePlan
from unbroken_core.ranks.tree.ports import Ranked
from unbroken_core.vocabulary.reasons import RankReason

HOLE = -1


class Draft:
    """Ranks on their way from one plan to the next.

    `old_rank` has the rank before this plan of every worker that gained or lost one, or took another's; workers that
    were merely shifted are found by `first_shifted`.
    """

    def __init__(self, tree: Ranked) -> None:
        self.tree = tree
        self.old_rank: dict[int, int] = {}
        self.reason: dict[int, RankReason] = {}
        self.origin: dict[int, Domain] = {}
        self.vacant: dict[int, int] = {}
        """Rank that each vacated leaf gave up and nobody has taken yet, in tree order."""
        self.barred: dict[Domain, None] = {}
        self.opened: dict[Domain, None] = {}
        """Innermost domains that were wholly spare before they were used."""
        self.holes: list[int] = []
        self.newly_growable: list[int] = []
        """Leaves that may be appended to the world from now on, and might not before."""
        self.old_by_rank = tree.by_rank
        self.old_size = len(tree.by_rank)
        self.old_suspects = dict(tree.suspects)
        self.old_vacating = dict(tree.vacating)
        self.first_shifted = self.old_size
        self.shifted: list[int] = []
        self.shifted_before: list[int] = []

    def complete_last(self) -> None:
        """Give all of its ranks back to the place that the world's size had cut in two, healthy or not."""
        tree = self.tree
        host = tree.host_of[tree.by_rank[-1]] if tree.by_rank else tree.root
        if not host.size or host.active == host.size:
            return
        rest = [leaf for leaf in range(host.first, host.first + host.size) if tree.rank_of[leaf] < 0]
        num_spare = sum(tree.is_spare[leaf] for leaf in rest)
        for leaf in rest:
            self._occupy(leaf, len(tree.by_rank), RankReason.RETURNED)
            tree.by_rank.append(leaf)
        host.adjust(0, len(rest), -num_spare, tree.suspects)

    def vacate(self, leaves: Iterable[int], reason: RankReason | None = None) -> None:
        """Take the ranks of these leaves; the healthy ones become spare. `leaves` is in tree order."""
        tree = self.tree
        rank_of, by_rank, is_lost = tree.rank_of, tree.by_rank, tree.is_lost
        by_host: dict[Domain, list[int]] = {}
        for leaf in leaves:
            by_host.setdefault(tree.host_of[leaf], []).append(leaf)
        for host, group in by_host.items():
            num_healthy = 0
            for leaf in group:
                rank = rank_of[leaf]
                self.vacant[leaf] = rank
                self.old_rank.setdefault(leaf, rank)
                rank_of[leaf] = by_rank[rank] = HOLE
                self._let_grow(leaf)
                if is_lost[leaf]:
                    self.reason[leaf] = reason or RankReason.LOST
                else:
                    self.reason[leaf] = reason or RankReason.STEPPED_ASIDE
                    num_healthy += 1
                    tree.is_spare[leaf] = 1
                    tree.growable[leaf] = None
            host.adjust(0, -len(group), num_healthy, tree.suspects)

    def fill(self, pairs: list[tuple[int, int]]) -> None:
        """Give the ranks of vacated leaves to spare ones: (vacated, spare), all spares of one innermost domain."""
        tree = self.tree
        host = tree.host_of[pairs[0][1]]
        if host.active == 0:
            self.opened[host] = None
        for vacated, spare in pairs:
            rank = self.vacant.pop(vacated)
            self._occupy(spare, rank, RankReason.REPLACED)
            self.origin[spare] = tree.host_of[vacated]
            tree.by_rank[rank] = spare
        host.adjust(0, len(pairs), -len(pairs), tree.suspects)

    def unfill(self, pairs: list[tuple[int, int]]) -> None:
        """Take `fill` back."""
        tree = self.tree
        host = tree.host_of[pairs[0][1]]
        for vacated, spare in pairs:
            rank = tree.rank_of[spare]
            self.vacant[vacated] = rank
            tree.by_rank[rank] = HOLE
            tree.rank_of[spare] = -1
            tree.mark_spare(spare, True)
            if self.old_rank[spare] < 0:
                del self.old_rank[spare], self.reason[spare]
            del self.origin[spare]
        host.adjust(0, -len(pairs), len(pairs), tree.suspects)
        if host.active == 0:
            self.opened.pop(host, None)

    def take_over(self, donor: int, vacated: int) -> None:
        """Let an active leaf take a vacated rank; its own becomes a hole."""
        tree = self.tree
        rank, left = self.vacant.pop(vacated), tree.rank_of[donor]
        self.old_rank.setdefault(donor, left)
        self.reason[donor] = RankReason.FILLED_GAP
        self.origin[donor] = tree.host_of[vacated]
        tree.rank_of[donor] = rank
        tree.by_rank[rank] = donor
        tree.by_rank[left] = HOLE
        self.holes.append(left)

    def close_holes(self) -> None:
        """Shift all ranks above a hole down. What is still vacant is a hole."""
        tree = self.tree
        self.holes += self.vacant.values()
        if not self.holes:
            return
        first = min(self.holes)
        self.first_shifted = first
        self.shifted = [leaf for leaf in tree.by_rank[first:] if leaf != HOLE]
        rank_of = tree.rank_of
        self.shifted_before = [rank_of[leaf] for leaf in self.shifted]
        tree.by_rank = tree.by_rank[:first] + self.shifted
        for rank, leaf in enumerate(self.shifted, first):
            rank_of[leaf] = rank

    def append(self, leaves: list[int]) -> None:
        """Give spare leaves of one innermost domain the next ranks at the end of the world."""
        tree = self.tree
        for leaf in leaves:
            self._occupy(leaf, len(tree.by_rank), RankReason.RETURNED)
            tree.by_rank.append(leaf)
        tree.host_of[leaves[0]].adjust(0, len(leaves), -len(leaves), tree.suspects)

    def truncate(self, world_size: int) -> None:
        """Let the highest ranks step aside."""
        tree = self.tree
        dropped = tree.by_rank[world_size:]
        counts: dict[Domain, int] = {}
        for rank, leaf in enumerate(dropped, world_size):
            if leaf not in self.old_rank:
                is_shifted = rank >= self.first_shifted
                self.old_rank[leaf] = self.shifted_before[rank - self.first_shifted] if is_shifted else rank
            self.reason[leaf] = RankReason.STEPPED_ASIDE
            self.origin.pop(leaf, None)
            tree.rank_of[leaf] = -1
            self._let_grow(leaf)
            tree.mark_spare(leaf, True)
            host = tree.host_of[leaf]
            counts[host] = counts.get(host, 0) + 1
        del tree.by_rank[world_size:]
        for host, count in counts.items():
            host.adjust(0, -count, count, tree.suspects)

    def finish(self) -> TreePlan:
        """Return the plan of what is now different."""
        tree = self.tree
        rank_of = tree.rank_of
        changed = [leaf for leaf, old in self.old_rank.items() if rank_of[leaf] != old]
        before = [self.old_rank[leaf] for leaf in changed]
        reasons = [self._reason(leaf) for leaf in changed]
        # Two passes over the columns instead of one over pairs: 100,000 tuples would cost a garbage collection.
        is_explicit = self.old_rank.__contains__
        before += [old for leaf, old in zip(self.shifted, self.shifted_before, strict=True) if not is_explicit(leaf)]
        changed += [leaf for leaf in self.shifted if not is_explicit(leaf)]
        reasons += [RankReason.SHIFTED] * (len(changed) - len(reasons))
        host_of = tree.host_of
        broken = (host for host in self.opened if host.active and tree.is_spare.find(1, *_span(host)) >= 0)
        tree.num_plans += 1
        world_size = len(tree.by_rank)
        return TreePlan(
            number=tree.num_plans - 1,
            world_size=world_size,
            spare_ranks=len(tree) - world_size - tree.num_lost,
            lost_ranks=tree.num_lost,
            leaves=changed,
            hosts=[host_of[leaf] for leaf in changed],
            before=before,
            after=[rank_of[leaf] for leaf in changed],
            reasons=reasons,
            origins=self.origin,
            barred=tuple(self.barred),
            barred_healthy=tuple(domain.healthy for domain in self.barred),
            broken_spares=tuple(host.path for host in broken),
            take_back=self.roll_back,
        )

    def roll_back(self) -> None:
        """Put the tree back as it was when this draft was begun."""
        tree = self.tree
        for leaf in self.newly_growable:
            tree.may_grow[leaf] = 0
            tree.growable.pop(leaf, None)
        # First the counts: they compare each leaf's rank now with its rank before.
        for leaf, old in self.old_rank.items():
            is_active, was_active = tree.rank_of[leaf] >= 0, old >= 0
            if is_active == was_active:
                continue
            was_spare = bool(tree.is_spare[leaf])
            is_spare = not was_active and not tree.is_lost[leaf]
            tree.mark_spare(leaf, is_spare)
            tree.host_of[leaf].adjust(0, was_active - is_active, is_spare - was_spare, tree.suspects)
        by_rank = self.old_by_rank
        by_rank[:] = (by_rank + [HOLE] * (self.old_size - len(by_rank)))[: self.old_size]
        for leaf, old in self.old_rank.items():
            tree.rank_of[leaf] = old
            if old >= 0:
                by_rank[old] = leaf
        for rank in range(self.first_shifted, self.old_size):
            tree.rank_of[by_rank[rank]] = rank
        tree.by_rank = by_rank
        tree.suspects = self.old_suspects
        tree.vacating = self.old_vacating

    def _reason(self, leaf: int) -> RankReason:
        reason = self.reason[leaf]
        # A worker that filled a gap and was then shifted as well, or a spare cut off again, keeps its stronger reason.
        if reason is RankReason.RETURNED and self.old_rank[leaf] >= 0:
            return RankReason.SHIFTED
        # A spare that had just replaced another, and was the best donor for a gap, replaces the one of the gap.
        return RankReason.REPLACED if reason is RankReason.FILLED_GAP and self.old_rank[leaf] < 0 else reason

    def _let_grow(self, leaf: int) -> None:
        if not self.tree.may_grow[leaf]:
            self.tree.may_grow[leaf] = 1
            self.newly_growable.append(leaf)

    def _occupy(self, leaf: int, rank: int, reason: RankReason) -> None:
        tree = self.tree
        self.old_rank.setdefault(leaf, -1)
        self.reason[leaf] = reason
        tree.rank_of[leaf] = rank
        tree.mark_spare(leaf, False)


def _span(host: Domain) -> tuple[int, int]:
    return host.first, host.first + host.size
