"""Who waits for whom in collectives: from what each rank says of its process groups, a graph and its ends. Pure.

    rank 0 ──in all_reduce 41 of "tp"──> rank 1, which has begun 40 ──in all_gather 7 of "dp"──> rank 5: in none

A rank that is in a collective waits for the members of the group that have not begun it. What the chains of this graph
end at is:

    a rank in no collective     the others wait for it
    a collective that all have begun, under different names     the script's mistake
    ... under one name, and no member has ended it              no rank: the links between them
    ... under one name, and most have ended it                  those that are still in it
    nothing, as they lead in a circle                           the script's mistake: ranks take them in another order
    a rank of which that is not known                           not known

All in time linear in what was said, since anybody may have said it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken_core.pod.group_ranks import rank_runs
from unbroken_core.protocol.messages import Activity, GroupState
from unbroken_core.vocabulary.reasons import Doing

_MAX_PENDING = 4
"""Different collectives of one group in which ranks are, the most frequent ones first."""
_MAX_NOTED = 64
"""Collectives of one kind that are returned, those of the largest groups first: a pod can make up thousands."""
_NEEDS_ALL = ("all_", "allreduce", "allgather", "alltoall", "_all", "barrier", "reduce_scatter", "_reduce_scatter")
_OUTSIDE = (Doing.OWN_CODE, Doing.DATA_LOADER, Doing.IO, Doing.FROZEN)


class Collective(NamedTuple):
    """One collective of a group, as those see it who are in it."""

    group: str
    number: int
    """Counts up in the group, from 1."""
    names: Mapping[str, tuple[int, ...]]
    """Who has begun which, by the name of the operation; the most frequent one first, ranks ascending."""
    inside: tuple[int, ...]
    """Who waits in it, ascending."""
    ended: tuple[int, ...] = ()
    """Members for which it has ended, as they say; ascending."""

    @property
    def name(self) -> str:
        """Of the operation, as most see it."""
        return next(iter(self.names), "a collective")


class Gap(NamedTuple):
    """Who waits in one collective, and for whom."""

    waiting: Sequence[int]
    behind: Sequence[int]
    collective: Collective


class Waits(NamedTuple):
    """What the chains of waiting end at."""

    roots: tuple[int, ...] = ()
    """Others wait for these ranks, which are in no collective; ascending."""
    waiting: frozenset[int] = frozenset()
    """Who waits for one of them, also through others."""
    mismatched: tuple[Collective, ...] = ()
    complete: tuple[Collective, ...] = ()
    """All members have begun it, under one name, and some are still in it."""
    circle: tuple[int, ...] = ()
    """Who waits in a circle, or for one; ascending."""
    unread: tuple[int, ...] = ()
    """Members of a group in which others wait that have not said how far they are; ascending."""
    gaps: tuple[Gap, ...] = ()
    """Who waits for whom."""


@dataclass
class _Group:
    """One group, as its members that have answered see it."""

    runs: tuple[range, ...]
    states: dict[int, GroupState] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Who is in which collective; only who waits there."""

    @property
    def is_believed(self) -> bool:
        """Whether its list of members is short beside those who say it: nobody can name more than were heard."""
        return sum(map(len, self.runs)) <= 2 * len(self.states) + 8

    def silent(self, world: Mapping[int, Activity | None]) -> Iterator[int]:
        """Yield the members that have not spoken of it."""
        for run in self.runs:
            yield from (rank for rank in run if rank in world and rank not in self.states)


@dataclass
class _Graph:
    gaps: list[Gap] = field(default_factory=list)
    gaps_by_behind: dict[int, list[Gap]] = field(default_factory=lambda: defaultdict(list))
    waiters: set[int] = field(default_factory=set)
    """Who waits for somebody."""
    blocked: set[int] = field(default_factory=set)
    """Ranks in a collective that waits for nobody, or it is not known for whom."""

    def add(self, gap: Gap) -> None:
        self.gaps.append(gap)
        self.waiters.update(gap.waiting)
        for rank in gap.behind:
            self.gaps_by_behind[rank].append(gap)

    def who_reaches(self, ends: Iterable[int]) -> set[int]:
        """Return who waits for one of these ranks, also through others."""
        found: set[int] = set()
        left = list(ends)
        seen: set[int] = set()
        while left:
            for gap in self.gaps_by_behind.get(left.pop(), ()):
                if id(gap) not in seen:
                    seen.add(id(gap))
                    fresh = [rank for rank in gap.waiting if rank not in found]
                    found.update(fresh)
                    left += fresh
        return found

    def in_circles(self, ranks: set[int]) -> set[int]:
        """Return who of these ranks waits in a circle of them, or for one that does, whoever else is waited for."""
        num_left = {id(gap): sum(rank in ranks for rank in gap.behind) for gap in self.gaps}
        num_gaps = Counter(rank for gap in self.gaps if num_left[id(gap)] for rank in gap.waiting if rank in ranks)
        found = set(ranks)
        left = [rank for rank in ranks if not num_gaps[rank]]
        while left:
            rank = left.pop()
            found.discard(rank)
            for gap in self.gaps_by_behind.get(rank, ()):
                num_left[id(gap)] -= 1
                if not num_left[id(gap)]:
                    num_gaps.subtract(each for each in gap.waiting if each in found)
                    left += [each for each in gap.waiting if each in found and not num_gaps[each]]
        return found


def find_waits(world: Mapping[int, Activity | None]) -> Waits:
    """Return what the chains of waiting end at; `world` has every active rank, with None for who has not answered."""
    graph, unread = _Graph(), set[int]()
    mismatched: list[Collective] = []
    complete: list[Collective] = []
    for (name, _ranks), group in _groups(world).items():
        for number in _pending(group):
            gap, unknown = _gap(name, number, group, world)
            is_known = bool(group.runs) and group.is_believed and not unknown
            # What has ended for one that needs something of all, has been begun by all.
            is_whole = is_known or (bool(gap.collective.ended) and gap.collective.name.startswith(_NEEDS_ALL))
            unread |= unknown
            if len(gap.collective.names) > 1:
                mismatched.append(gap.collective)
            if gap.behind:
                graph.add(gap)
            elif is_whole and len(gap.collective.names) == 1:
                complete.append(gap.collective)
            if not is_whole or not gap.behind:
                graph.blocked.update(gap.waiting)
    waited_for = set(graph.gaps_by_behind)
    roots = {rank for rank in waited_for - graph.waiters - graph.blocked if not _is_inside(world.get(rank))}
    circle = graph.in_circles({rank for rank in graph.waiters if _is_seen_waiting(world.get(rank))})
    return Waits(
        tuple(sorted(roots)),
        frozenset(graph.who_reaches(roots)),
        _largest(mismatched),
        _largest(complete),
        tuple(sorted(circle)),
        tuple(sorted(unread)),
        tuple(graph.gaps),
    )


def _largest(collectives: list[Collective]) -> tuple[Collective, ...]:
    return tuple(sorted(collectives, key=lambda each: -len(each.inside) - len(each.ended))[:_MAX_NOTED])


def is_read(activity: Activity | None) -> bool:
    """Return whether a rank has said how far it is in all of its groups."""
    return activity is not None and 0 < activity.num_groups == len(activity.groups)


def _is_seen_waiting(activity: Activity | None) -> bool:
    """Return whether its stack says that it waits: it may have begun a collective, and be stuck elsewhere."""
    return activity is not None and activity.doing in (Doing.COLLECTIVE, Doing.WAITING)


def _is_inside(activity: Activity | None) -> bool:
    """Return whether it is in a collective, though in none of which others wait for it."""
    return (
        activity is not None and activity.doing not in _OUTSIDE and any(each.pending >= 0 for each in activity.groups)
    )


def _groups(world: Mapping[int, Activity | None]) -> dict[tuple[str, str], _Group]:
    """Return the groups by name and members: a name may mean other ranks elsewhere."""
    found: dict[tuple[str, str], _Group] = {}
    for rank, activity in world.items():
        for state in () if activity is None else activity.groups:
            key = (state.name, state.members)
            group = found.get(key)
            if group is None:
                group = found[key] = _Group(rank_runs(state.members))
            if group.runs and not any(rank in run for run in group.runs):
                continue  # Its numbers are not the job's, as in a world of its own.
            if rank in group.states:
                continue  # It is said twice.
            group.states[rank] = state
            # Who runs its own code waits in no collective that it has begun.
            if activity is not None and state.pending >= 0 and activity.doing not in _OUTSIDE:
                group.pending[state.pending].append(rank)
    return found


def _pending(group: _Group) -> list[int]:
    most = Counter({number: len(ranks) for number, ranks in group.pending.items()}).most_common(_MAX_PENDING)
    return [number for number, _count in most]


def _gap(name: str, number: int, group: _Group, world: Mapping[int, Activity | None]) -> tuple[Gap, set[int]]:
    """Return who waits in a collective for whom, and the members of which that is not known."""
    behind = [rank for rank, state in group.states.items() if state.begun < number]
    unknown: set[int] = set()
    silent = group.silent(world) if group.is_believed else ()
    for rank in silent:
        activity = world[rank]
        # Who is stopped, or has not made the group, has not begun it.
        if is_read(activity) or (activity is not None and activity.doing is Doing.FROZEN):
            behind.append(rank)
        else:
            unknown.add(rank)
    return Gap(group.pending[number], behind, _collective(name, number, group)), unknown


def _collective(name: str, number: int, group: _Group) -> Collective:
    ranks_by_name: dict[str, list[int]] = {}
    for rank, state in group.states.items():
        what = name_of(state, number)
        if what:
            ranks_by_name.setdefault(what, []).append(rank)
    ordered = sorted(ranks_by_name.items(), key=lambda item: (-len(item[1]), item[0]))
    names = {what: tuple(sorted(ranks)) for what, ranks in ordered}
    ended = sorted(rank for rank, state in group.states.items() if _has_ended(state, number))
    return Collective(name, number, names, tuple(sorted(group.pending[number])), tuple(ended))


def _has_ended(state: GroupState, number: int) -> bool:
    return state.begun >= number and not 0 <= state.pending <= number


def name_of(state: GroupState, number: int) -> str:
    """Return what a rank began as this collective of the group; "" where that is not known."""
    if state.pending == number:
        return state.what
    back = state.begun - number
    return state.last[-1 - back] if 0 <= back < len(state.last) else ""
