"""A plan in sentences. Costs some 30 ms for a plan that changes 100,000 ranks."""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.picture import Label, name_or_unknown
from unbroken_core.ranks.tree.plan import TreePlan
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import RankReason

MAX_SENTENCES = 50
"""Longer explanations end with the number of what is left out."""

_FAR_AND_WIDE = (RankReason.SHIFTED, RankReason.FIRST)
"""One sentence for all workers, wherever they are."""
_TAKEN = (RankReason.REPLACED, RankReason.FILLED_GAP)


@dataclass
class _Group:
    """Workers of which one sentence speaks."""

    reason: RankReason
    host: Domain
    """Where they are; of no meaning for what is far and wide."""
    origin: Domain
    """Where their ranks were."""
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


def explain(plan: TreePlan, label: Label = name_or_unknown) -> list[str]:
    """Return one sentence for each thing that happened: which ranks, where, why; at most MAX_SENTENCES and one more."""
    if plan.shortfall:
        return [f"Plan {plan.number} is not possible: {plan.shortfall}."]
    sentences = [_headline(plan)]
    sentences += [
        f"{_name(domain.path, label)}: {healthy} healthy of at least {domain.minimum} workers; it stands aside."
        for domain, healthy in zip(plan.barred, plan.barred_healthy, strict=True)
        if healthy
    ]
    barred = set(plan.barred)
    groups = _grouped(plan)
    wide = [_sentence(group, barred, label) for group in groups if group.reason in _FAR_AND_WIDE]
    near = [group for group in groups if group.reason not in _FAR_AND_WIDE]
    sentences += [_sentence(group, barred, label) for group in near[: MAX_SENTENCES + 1]]
    sentences += [
        f"{_name(path, label)} was wholly spare and is now in part: no spare that is in use already was as near."
        for path in plan.broken_spares
    ]
    room = MAX_SENTENCES - len(wide)
    num_left_out = len(sentences) + len(near[MAX_SENTENCES + 1 :]) - room
    if num_left_out > 0:
        sentences = [
            *sentences[:room],
            f"{counted(num_left_out, 'more change is', 'more changes are')} not listed.",
        ]
    return sentences + wide


def _headline(plan: TreePlan) -> str:
    changed = (
        "nothing changes"
        if not len(plan)
        else f"{counted(len(plan), 'worker changes its', 'workers change their')} rank"
    )
    size = f"{plan.world_size} active, {plan.spare_ranks} spare, {plan.lost_ranks} lost ranks"
    return f"Plan {plan.number}: {size}; {changed}."


def _grouped(plan: TreePlan) -> list[_Group]:
    groups: dict[object, _Group] = {}
    origins = plan.origins
    for leaf, host, before, after, reason in zip(
        plan.leaves, plan.hosts, plan.before, plan.after, plan.reasons, strict=True
    ):
        origin = origins.get(leaf, host) if reason in _TAKEN else host
        key = reason if reason in _FAR_AND_WIDE else (reason, host, origin)
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(reason, host, origin)
        if before >= 0:
            group.before.append(before)
        if after >= 0:
            group.after.append(after)
    return list(groups.values())


def _sentence(group: _Group, barred: Set[Domain], label: Label) -> str:
    before, after = _spans(group.before), _spans(group.after)
    here, there = _name(group.host.path, label), _name(group.origin.path, label)
    match group.reason:
        case RankReason.REPLACED:
            text = f"{here}: takes {after} of {there}, {_nearness(group, label)}."
        case RankReason.FILLED_GAP:
            text = f"{here}: {before} becomes {after}, closing a gap of {there}."
        case RankReason.LOST:
            text = f"{here}: lost {before}."
        case RankReason.STEPPED_ASIDE:
            verb = "steps" if len(group.before) == 1 else "step"
            text = f"{here}: {before} {verb} aside, healthy: {_why_aside(group, barred, label)}."
        case RankReason.RETURNED:
            text = f"{here}: joins as {after}, because the world has room."
        case RankReason.SHIFTED:
            num_moved = counted(len(group.before), "worker moves", "workers move")
            text = f"{num_moved} down, from {before} to {after}: ranks below them found no spare."
        case _:
            text = f"First plan: {after}, in the order of the tree."
    return text


def _why_aside(group: _Group, barred: Set[Domain], label: Label) -> str:
    node: Domain | None = group.host
    while node is not None:
        if node in barred:
            return f"{_name(node.path, label)} is below its minimum"
        node = node.parent
    return "a maximum, or the world's size"


def _nearness(group: _Group, label: Label) -> str:
    domains, origin = group.host.path, group.origin.path
    common = 0
    while common < min(len(domains), len(origin)) and domains[common] == origin[common]:
        common += 1
    return f"both in {_name(domains[:common], label)}" if common else "from another part of the tree"


def _name(path: tuple[str, ...], label: Label) -> str:
    return "/".join(map(label, path)) if path else "the root"


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
