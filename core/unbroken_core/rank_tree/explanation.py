"""A plan in sentences."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unbroken_core.rank_tree.plan import RankChange, TreePlan
from unbroken_core.reasons import RankReason

MAX_SENTENCES = 50
"""Longer explanations end with the number of what is left out."""

_Group = tuple[RankReason, tuple[str, ...], tuple[str, ...]]


@dataclass
class _Ranks:
    """Ranks of one group, before and after."""

    before: list[int]
    after: list[int]


def explain(plan: TreePlan) -> list[str]:
    """Return one sentence for each thing that happened: which ranks, where, why; at most MAX_SENTENCES and one more."""
    if plan.shortfall:
        return [f"Plan {plan.number} is not possible: {plan.shortfall}."]
    sentences = [_headline(plan)]
    sentences += [
        f"{_name(domain.path)}: {domain.healthy} healthy of at least {domain.minimum} workers; it stands aside."
        for domain in plan.barred
        if domain.healthy
    ]
    sentences += [_sentence(group, ranks) for group, ranks in _grouped(plan)]
    sentences += [
        f"{_name(path)} was wholly spare and is now in part: no spare that is in use already was as near."
        for path in plan.broken_spares
    ]
    if len(sentences) > MAX_SENTENCES:
        left_out = len(sentences) - MAX_SENTENCES
        sentences = [*sentences[:MAX_SENTENCES], f"{left_out} more changes are not listed."]
    return sentences


def _headline(plan: TreePlan) -> str:
    changed = "nothing changes" if not len(plan) else f"{len(plan)} workers change their rank"
    size = f"{plan.world_size} active, {plan.spare_ranks} spare, {plan.lost_ranks} lost ranks"
    return f"Plan {plan.number}: {size}; {changed}."


def _grouped(plan: TreePlan) -> Iterator[tuple[_Group, _Ranks]]:
    groups: dict[_Group, _Ranks] = {}
    for change in plan:
        ranks = groups.setdefault(_group(change), _Ranks([], []))
        if change.before is not None:
            ranks.before.append(change.before)
        if change.after is not None:
            ranks.after.append(change.after)
    yield from groups.items()


def _group(change: RankChange) -> _Group:
    if change.reason in (RankReason.SHIFTED, RankReason.FIRST):
        return change.reason, (), ()
    origin = change.origin if change.reason in (RankReason.REPLACED, RankReason.FILLED_GAP) else ()
    return change.reason, change.domains, origin


def _sentence(group: _Group, ranks: _Ranks) -> str:
    reason, domains, origin = group
    before, after, here = _spans(ranks.before), _spans(ranks.after), _name(domains)
    texts = {
        RankReason.REPLACED: f"{here}: takes {after} of {_name(origin)}, {_nearness(domains, origin)}.",
        RankReason.FILLED_GAP: f"{here}: {before} becomes {after}, closing a gap of {_name(origin)}.",
        RankReason.LOST: f"{here}: lost {before}.",
        RankReason.STEPPED_ASIDE: f"{here}: {before} steps aside, healthy: a minimum, a maximum or the world's size.",
        RankReason.RETURNED: f"{here}: joins as {after}, because the world has room.",
        RankReason.SHIFTED: (
            f"{len(ranks.before)} workers move down, from {before} to {after}: ranks below them found no spare."
        ),
        RankReason.FIRST: f"First plan: {after}, in the order of the tree.",
    }
    return texts[reason]


def _nearness(domains: tuple[str, ...], origin: tuple[str, ...]) -> str:
    common = 0
    while common < min(len(domains), len(origin)) and domains[common] == origin[common]:
        common += 1
    return f"both in {_name(domains[:common])}" if common else "from another part of the tree"


def _name(path: tuple[str, ...]) -> str:
    return "/".join(name or "unknown" for name in path) if path else "the root"


def _spans(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`; at most 5 spans."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    if len(texts) > 5:
        texts = [*texts[:4], f"... {texts[-1]}"]
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(texts)}"
