"""Who hangs: from what every rank did when the iteration was ended, to the ranks that the others waited for. Pure.

A rank that waits in a collective looks to its agent like one that hangs in C code, and often is the first to be
reported. So nobody is named by a report. Named is who was outside of any collective

- without progress itself, as far as it pings,
- while most *other pods* waited for half of the soft timeout, or have returned from the training function: no pod can
  make another one the culprit. Ranks that stood after a step, as ranks were to move, could not wait in a collective
  for so long: half of the time since they went on is enough, but only to name who has pinged, and long ago.

Where ranks say how far they are in their groups, the graph of who waits for whom (collectives.py) comes first:

    most other pods wait, also through others, for who is stuck outside     these are named
    ranks began different collectives, or wait in a circle                  the script's mistake: nobody is named
    a collective ended for all but a few                                    these are named, and their links
    all have begun it, and it does not end                                  nobody is named: look at the links, or
                                                                            at the root that each rank names

Without it, where all wait in one group, named is who came fewer times, or waits in another collective than all others.
In all other cases the rank is not known: a wrong name costs a healthy process, and taints a healthy node.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from unbroken_core.protocol.messages import Activity
from unbroken_core.recovery.collectives import Collective, Gap, Waits, find_waits
from unbroken_core.vocabulary.reasons import Doing

MISTAKE = "the script's mistake, no machine's"
"""Begins the sentence about ranks that would wait for each other on every machine."""
LINKS = "look at the links"
"""In a sentence that leaves no rank, but what is between them."""
MAX_GROUPS = 8
"""Groups of ranks with one activity that a sentence lists."""
MAX_COLLECTIVES = 4
"""Collectives in it."""
MAX_RANGES = 12
"""Numbers, or ranges of them, in one of these groups."""

_WAITS = (Doing.COLLECTIVE, Doing.WAITING)
_OUTSIDE = (Doing.OWN_CODE, Doing.DATA_LOADER, Doing.IO, Doing.FROZEN)
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Operations with a root, of which torch's flight recorder keeps nothing: ranks may name different ones."""


class Witness(NamedTuple):
    """One active rank."""

    rank: int
    pod_uid: str
    activity: Activity | None
    """None: it has not said what it did."""
    has_returned: bool = False
    """Whether it had returned from the training function: it waits for all others to return."""


class HangVerdict(NamedTuple):
    """Who hangs."""

    ranks: tuple[int, ...]
    """Ascending; empty where it is not known."""
    text: str
    """One sentence for people."""


def judge(witnesses: Sequence[Witness], soft_s: float, free_s: float = math.inf) -> HangVerdict:
    """Return who hangs; `witnesses` are all ranks of the world, in any order.

    `free_s`: seconds since ranks that may have stood after a step were told to go on.
    """
    ranks = sorted(witnesses, key=lambda witness: witness.rank)
    waits = find_waits({witness.rank: witness.activity for witness in ranks})
    verdict = _by_collectives(ranks, waits, soft_s, free_s) or _by_stacks(ranks, waits, soft_s, free_s)
    returned = [witness.rank for witness in ranks if witness.has_returned]
    unread = [rank for rank in waits.unread if rank not in set(returned)]
    return verdict._replace(text=f"{verdict.text}{_returned_text(returned)}{_unread_text(unread)}")


def _by_collectives(ranks: Sequence[Witness], waits: Waits, soft_s: float, free_s: float) -> HangVerdict | None:
    """Return what the graph of who waits for whom says; None where it says nothing, or links are all that is left."""
    enough_s = min(soft_s, free_s) / 2
    late = {witness.rank for witness in ranks if witness.activity is not None and witness.activity.idle_s >= soft_s / 2}
    roots = [each for each in ranks if each.rank in waits.roots and _is_stuck_outside(each, soft_s, free_s)]
    waiting = [each for each in ranks if each.rank in waits.waiting and _idle_s(each) >= enough_s]
    returned = [each for each in ranks if each.has_returned]
    outside = _waited_for(ranks, roots, [*waiting, *returned])
    if outside:
        named = tuple(witness.rank for witness in outside)
        return HangVerdict(named, f"{_outside_text(ranks, outside, enough_s)}{_gaps_text(waits.gaps, named)}")
    for collective in waits.mismatched:
        if not late.isdisjoint(collective.inside):
            return HangVerdict((), _mismatch_text(collective))
    if not late.isdisjoint(waits.circle):
        return HangVerdict((), _circle_text(waits))
    for collective in waits.complete:
        inside = late.intersection(collective.inside) if collective.ended else ()
        behind = [witness for witness in ranks if witness.rank in inside] if inside else []
        if _is_minority(ranks, behind):
            is_named = _is_left_behind(ranks, behind, collective)
            named = tuple(witness.rank for witness in behind) if is_named else ()
            return HangVerdict(named, _left_behind_text(collective, behind))
    return None


def _by_stacks(ranks: Sequence[Witness], waits: Waits, soft_s: float, free_s: float) -> HangVerdict:
    """Return what is said by where the main threads stood."""
    enough_s = min(soft_s, free_s) / 2
    in_complete = {rank for collective in waits.complete for rank in collective.inside}
    waiting = [
        witness
        for witness in ranks
        if witness.has_returned or (_waits(witness, enough_s) and witness.rank not in in_complete)
    ]
    outside = _waited_for(ranks, [each for each in ranks if _is_stuck_outside(each, soft_s, free_s)], waiting)
    if outside:
        return HangVerdict(tuple(witness.rank for witness in outside), _outside_text(ranks, outside, enough_s))
    if any(witness.activity is not None and witness.activity.groups for witness in ranks):
        stuck = [each for each in waits.complete if _is_long(ranks, each.inside, soft_s)]
        return HangVerdict(
            (), _links_text(stuck) if stuck else f"rank not known: {_listed(ranks, soft_s / 2)}{_gaps_text(waits.gaps)}"
        )
    late = _latecomers(ranks, soft_s)
    if late:
        return HangVerdict(tuple(witness.rank for witness in late), _late_text(ranks, late))
    return HangVerdict((), f"rank not known: {_listed(ranks, soft_s / 2)}")


def _is_left_behind(ranks: Sequence[Witness], behind: Sequence[Witness], collective: Collective) -> bool:
    """Return whether their own pods say that it ended, or several others: one pod could say so of a neighbour's."""
    pods, ended = {witness.pod_uid for witness in behind}, frozenset(collective.ended)
    tellers = {witness.pod_uid for witness in ranks if witness.rank in ended}
    return not tellers.isdisjoint(pods) or len(tellers) > 1


def _is_long(ranks: Sequence[Witness], inside: Sequence[int], soft_s: float) -> bool:
    """Return whether one of these ranks has waited for half of the soft timeout."""
    who = frozenset(inside)
    return any(witness.rank in who and _idle_s(witness) >= soft_s / 2 for witness in ranks)


def _waits(witness: Witness, enough_s: float) -> bool:
    activity = witness.activity
    return activity is not None and activity.doing in _WAITS and activity.idle_s >= enough_s


def _is_stuck_outside(witness: Witness, soft_s: float, free_s: float) -> bool:
    activity = witness.activity
    if activity is None or activity.doing not in _OUTSIDE:
        return False
    return activity.ping_s >= soft_s / 2 or (activity.ping_s < 0 and free_s >= soft_s)


def _waited_for(ranks: Sequence[Witness], outside: Sequence[Witness], waiting: Sequence[Witness]) -> list[Witness]:
    """Return those for whom most pods but their own wait; in a job of one pod, most ranks but them."""
    pods = {witness.pod_uid for witness in ranks}
    if len(pods) == 1:
        # A world of one rank has nobody who could wait.
        return list(outside) if len(ranks) == 1 or 2 * len(waiting) > len(ranks) - 1 else []
    waiting_pods = {witness.pod_uid for witness in waiting}
    return [each for each in outside if 2 * len(waiting_pods - {each.pod_uid}) > len(pods) - 1]


def _latecomers(ranks: Sequence[Witness], soft_s: float) -> list[Witness]:
    """Return who came fewer times, or waits in another collective, where all wait in the one group that there is."""
    activities = [witness.activity for witness in ranks if witness.activity is not None]
    are_in_one_group = all(each.doing is Doing.COLLECTIVE and each.num_groups == 1 for each in activities)
    if len(activities) < max(len(ranks), 3) or not are_in_one_group:
        return []
    if not all(_waits(witness, soft_s / 2) for witness in ranks) or any(each.sequence < 0 for each in activities):
        return []
    newest = max(activity.sequence for activity in activities)
    behind = [witness for witness in ranks if witness.activity is not None and witness.activity.sequence < newest]
    if not behind:
        usual, _count = Counter(activity.what for activity in activities).most_common(1)[0]
        behind = [witness for witness in ranks if witness.activity is not None and witness.activity.what != usual]
    return behind if _is_minority(ranks, behind) else []


def _is_minority(ranks: Sequence[Witness], accused: Sequence[Witness]) -> bool:
    pods, of_accused = {witness.pod_uid for witness in ranks}, {witness.pod_uid for witness in accused}
    return 0 < 2 * len(accused) < len(ranks) and (2 * len(of_accused) < len(pods) or len(pods) == 1)


# ----------------------------------------------------------------------------------------------------------- sentences


def _outside_text(ranks: Sequence[Witness], outside: Sequence[Witness], enough_s: float) -> str:
    named = {witness.rank for witness in outside}
    waiting = [witness for witness in ranks if _waits(witness, enough_s)]
    rest = [
        witness
        for witness in ranks
        if witness.rank not in named and not _waits(witness, enough_s) and not witness.has_returned
    ]
    has_pings = any(witness.activity is not None and witness.activity.ping_s >= 0 for witness in ranks)
    waited = f" while {_grouped(waiting, lambda activity: f'waited in {activity.what}')}" if waiting else ""
    more = f"; {_listed(rest, enough_s)}" if rest else ""
    # One that has not pinged yet may run Python code all the time: only those who wait tell for how long.
    does_tell = any(witness.activity is not None and witness.activity.ping_s >= 0 for witness in outside)
    age_s = max((_idle_s(witness) for witness in (outside if does_tell else ranks)), default=0.0)
    if has_pings:
        return f"{_grouped(outside, lambda activity: f'hung for {age_s:.0f} s {_where(activity)}')}{waited}{more}"
    verb = "is" if len(outside) == 1 else "are"
    places = {_where(witness.activity) for witness in outside if witness.activity is not None}
    where = (
        f" but {_of_several(places.pop()) if len(outside) > 1 else places.pop()}"
        if len(places) == 1
        else f": {_grouped(outside, _where)}"
    )
    who = f"{_numbers(sorted(named))} {verb} not in a collective"
    return f"no rank pings; {who}{where} for {age_s:.0f} s{waited}{more}"


def _late_text(ranks: Sequence[Witness], late: Sequence[Witness]) -> str:
    named = {witness.rank for witness in late}
    others = [witness for witness in ranks if witness.rank not in named]

    def waited(activity: Activity) -> str:
        return f"waited in {activity.what}, collective {activity.sequence} of the group"

    age_s = max(map(_idle_s, ranks))
    return f"{_grouped(late, waited)}, while {_grouped(others, waited)}, for {age_s:.0f} s"


def _gaps_text(gaps: Sequence[Gap], named: Sequence[int] = ()) -> str:
    """Return who waits for whom, first for those that are named."""
    who = frozenset(named)
    ordered = sorted(gaps, key=lambda gap: (who.isdisjoint(gap.behind), len(gap.behind)))
    parts = [_gap_text(gap) for gap in ordered[:MAX_COLLECTIVES]]
    more = f", {len(gaps) - len(parts)} more" if len(gaps) > len(parts) else ""
    return f"; {', '.join(parts)}{more}" if parts else ""


def _gap_text(gap: Gap) -> str:
    inside = gap.collective.inside
    verb = "waits" if len(inside) == 1 else "wait"
    return f"{_numbers(inside)} in {_collective(gap.collective)} {verb} for {_numbers(sorted(gap.behind))}"


def _mismatch_text(collective: Collective) -> str:
    shown = list(collective.names.items())[:MAX_GROUPS]
    began = ", ".join(f"{_numbers(ranks)} {name}" for name, ranks in shown)
    which = f"collective {collective.number} of group {collective.group!r}"
    return f"{MISTAKE}: as {which} began {began}"


def _circle_text(waits: Waits) -> str:
    circle = frozenset(waits.circle)
    gaps = [gap for gap in waits.gaps if not circle.isdisjoint(gap.waiting)]
    return f"{MISTAKE}: ranks wait for each other in a circle{_gaps_text(gaps)}"


def _left_behind_text(collective: Collective, behind: Sequence[Witness]) -> str:
    who, num = _numbers([witness.rank for witness in behind]), len(collective.ended)
    others = "1 other" if num == 1 else f"{num} others"
    waited = f"{who} waited for {max(map(_idle_s, behind)):.0f} s in {_collective(collective)}"
    return f"{waited}, which has ended for {others}: {LINKS} there{_roots_text([collective])}"


def _links_text(stuck: Sequence[Collective]) -> str:
    shown = ", ".join(f"{_numbers(each.inside)} in {_collective(each)}" for each in stuck[:MAX_COLLECTIVES])
    more = f", {len(stuck) - MAX_COLLECTIVES} more" if len(stuck) > MAX_COLLECTIVES else ""
    return f"no rank: all members have begun what does not end: {shown}{more}: {LINKS} between them{_roots_text(stuck)}"


def _roots_text(stuck: Sequence[Collective]) -> str:
    has_root = any(each.name.split(" ", 1)[0] in _ROOTED for each in stuck)
    return ", and whether all ranks name the same root" if has_root else ""


def _returned_text(returned: Sequence[int]) -> str:
    verb = "has" if len(returned) == 1 else "have"
    return f"; {_numbers(returned)} {verb} returned from the training function" if returned else ""


def _unread_text(unread: Sequence[int]) -> str:
    return f"; not checked: the collectives of {_numbers(unread)}" if unread else ""


def _collective(collective: Collective) -> str:
    return f"{collective.name} (collective {collective.number} of group {collective.group!r})"


def _listed(ranks: Sequence[Witness], enough_s: float) -> str:
    """Return what each rank did, and of those who wait whether it is for less than that."""

    def said(activity: Activity) -> str:
        is_short = activity.doing in _WAITS and activity.idle_s < enough_s
        return f"{_where(activity)}{' for a short time' if is_short else ''}"

    silent = [witness for witness in ranks if witness.activity is None and not witness.has_returned]
    parts = [_grouped([witness for witness in ranks if witness.activity is not None], said)]
    parts += [f"{_numbers([witness.rank for witness in silent])} did not answer"] if silent else []
    return ", ".join(filter(None, parts))


def _where(activity: Activity) -> str:
    place = f" ({activity.what})" if activity.what else ""
    match activity.doing:
        case Doing.COLLECTIVE | Doing.WAITING:
            return f"in {activity.what}"
        case Doing.OWN_CODE:
            return f"in its own code{place}"
        case Doing.DATA_LOADER:
            return f"in a data loader{place}"
        case Doing.IO:
            return f"in I/O{place}"
        case Doing.FROZEN:
            return f"without running any thread: stopped, or a thread holds the GIL{place}"
        case Doing.UNKNOWN:
            return f"in a call that may wait for others{place}" if activity.what else "at an unknown place"


def _idle_s(witness: Witness) -> float:
    return 0.0 if witness.activity is None else witness.activity.idle_s


def _grouped(ranks: Iterable[Witness], words: Callable[[Activity], str]) -> str:
    """Return who did what, the same deed once."""
    ranks_by_words: dict[str, list[int]] = {}
    for witness in ranks:
        if witness.activity is not None:
            ranks_by_words.setdefault(words(witness.activity), []).append(witness.rank)
    shown = [
        f"{_numbers(who)} {_of_several(deed) if len(who) > 1 else deed}"
        for deed, who in list(ranks_by_words.items())[:MAX_GROUPS]
    ]
    num_more = sum(map(len, list(ranks_by_words.values())[MAX_GROUPS:]))
    return ", ".join([*shown, *([f"{num_more} more elsewhere"] if num_more else [])])


def _of_several(deed: str) -> str:
    return deed.replace("in its own code", "in their own code")


def _numbers(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0, 1, 3" or "ranks 0-6, 8", at most MAX_RANGES of them."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    parts = [_range(first, last) for first, last in ranges[:MAX_RANGES]]
    num_more = sum(last - first + 1 for first, last in ranges[MAX_RANGES:])
    more = f" and {num_more} more" if num_more else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}{more}"


def _range(first: int, last: int) -> str:
    return f"{first}-{last}" if last - first >= 2 else ", ".join(map(str, range(first, last + 1)))
