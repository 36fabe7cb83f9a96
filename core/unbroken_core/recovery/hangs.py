"""Who hangs: from what every rank did when the iteration was ended, to the ranks that the others waited for. Pure.

A rank that waits in a collective looks to its agent like one that hangs in C code, and often is the first to be
reported. So nobody is named by a report. Named is who was outside of any collective

- without progress itself, as far as it pings,
- while most *other pods* waited for half of the soft timeout: no pod can make another one the culprit.

Where all wait in one group, named is who came fewer times, or waits in another collective than all others. In all other
cases the rank is not known: a wrong name costs a healthy process, and taints a healthy node.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from unbroken_core.messages import Activity
from unbroken_core.reasons import Doing

MAX_GROUPS = 8
"""Groups of ranks with one activity that a sentence lists."""
MAX_RANGES = 12
"""Numbers, or ranges of them, in one of these groups."""

_WAITS = (Doing.COLLECTIVE, Doing.WAITING)
_OUTSIDE = (Doing.OWN_CODE, Doing.DATA_LOADER, Doing.IO, Doing.FROZEN)


class Witness(NamedTuple):
    """One active rank."""

    rank: int
    pod_uid: str
    activity: Activity | None
    """None: it has not said what it did."""


class HangVerdict(NamedTuple):
    """Who hangs."""

    ranks: tuple[int, ...]
    """Ascending; empty where it is not known."""
    text: str
    """One sentence for people."""


def judge(witnesses: Sequence[Witness], soft_s: float) -> HangVerdict:
    """Return who hangs; `witnesses` are all ranks of the world, in any order."""
    ranks = sorted(witnesses, key=lambda witness: witness.rank)
    outside = _waited_for(ranks, [witness for witness in ranks if _is_stuck_outside(witness, soft_s)], soft_s)
    if outside:
        return HangVerdict(tuple(witness.rank for witness in outside), _outside_text(ranks, outside, soft_s))
    late = _latecomers(ranks, soft_s)
    if late:
        return HangVerdict(tuple(witness.rank for witness in late), _late_text(ranks, late))
    return HangVerdict((), f"rank not known: {_listed(ranks, soft_s)}")


def _waits(witness: Witness, soft_s: float) -> bool:
    activity = witness.activity
    return activity is not None and activity.doing in _WAITS and activity.idle_s >= soft_s / 2


def _is_stuck_outside(witness: Witness, soft_s: float) -> bool:
    activity = witness.activity
    if activity is None or activity.doing not in _OUTSIDE:
        return False
    return activity.ping_s < 0 or activity.ping_s >= soft_s / 2


def _waited_for(ranks: Sequence[Witness], outside: Sequence[Witness], soft_s: float) -> list[Witness]:
    """Return those for whom most pods but their own wait; in a job of one pod, most ranks but them."""
    pods = {witness.pod_uid for witness in ranks}
    waiting = [witness for witness in ranks if _waits(witness, soft_s)]
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
    if not all(_waits(witness, soft_s) for witness in ranks) or any(each.sequence < 0 for each in activities):
        return []
    newest = max(activity.sequence for activity in activities)
    behind = [witness for witness in ranks if witness.activity is not None and witness.activity.sequence < newest]
    if not behind:
        usual, _count = Counter(activity.what for activity in activities).most_common(1)[0]
        behind = [witness for witness in ranks if witness.activity is not None and witness.activity.what != usual]
    pods = {witness.pod_uid for witness in ranks}
    accused = {witness.pod_uid for witness in behind}
    is_minority = 2 * len(behind) < len(ranks) and (2 * len(accused) < len(pods) or len(pods) == 1)
    return behind if is_minority else []


# ----------------------------------------------------------------------------------------------------------- sentences


def _outside_text(ranks: Sequence[Witness], outside: Sequence[Witness], soft_s: float) -> str:
    named = {witness.rank for witness in outside}
    waiting = [witness for witness in ranks if _waits(witness, soft_s)]
    rest = [witness for witness in ranks if witness.rank not in named and not _waits(witness, soft_s)]
    has_pings = any(witness.activity is not None and witness.activity.ping_s >= 0 for witness in ranks)
    waited = f" while {_grouped(waiting, lambda activity: f'waited in {activity.what}')}" if waiting else ""
    more = f"; {_listed(rest, soft_s)}" if rest else ""
    age_s = max((_idle_s(witness) for witness in (outside if has_pings else ranks)), default=0.0)
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


def _listed(ranks: Sequence[Witness], soft_s: float) -> str:
    """Return what each rank did."""

    def said(activity: Activity) -> str:
        is_short = activity.doing in _WAITS and activity.idle_s < soft_s / 2
        return f"{_where(activity)}{' for a short time' if is_short else ''}"

    silent = [witness for witness in ranks if witness.activity is None]
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
