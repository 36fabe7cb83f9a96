"""When a round of nodes forms, who is in it, and as which rank. Pure.

first round          all of `max_nodes` are here, or `min_nodes` are and the last call is over
after a loss         everybody who is left has come, and those are enough: at once, for nobody else is expected
too few are left     as for the first round: replacements are gathered
more could take part all that there is room for have come, or the first has waited for the last call: then the round
                     that runs is called to the next one. It runs on until then
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unbroken_core.torchrun_rounds.messages import Limits
from unbroken_core.vocabulary.plurals import counted


@dataclass(frozen=True)
class RoundCandidate:
    """A node that wants to be in the next round."""

    uid: str
    name: str
    domains: tuple[str, ...]
    since_s: float
    """When it came."""
    previous_rank: int | None
    """Its rank in the round before; None: it was not in it."""
    is_connected: bool
    """False: it has been away for a moment."""


@dataclass(frozen=True)
class FormingRound:
    """What decides about the next round."""

    candidates: tuple[RoundCandidate, ...]
    num_pending: int
    """Nodes of the round before that have not come yet."""
    pending_until_s: float
    """So long they are waited for."""
    previous_size: int
    """Nodes of the round before; 0: there was none."""
    enough_since_s: float | None
    """Since when there are `min_nodes` candidates; None: there are not."""
    limits: Limits


@dataclass(frozen=True)
class NotYet:
    """The round does not form now."""

    until_s: float
    """Look again then; inf: when something has changed."""
    reason: str


def decide_round(forming: FormingRound, now_s: float) -> tuple[str, ...] | NotYet:
    """Return the nodes of the next round, index = rank; or what it waits for."""
    limits, num_candidates = forming.limits, len(forming.candidates)
    here = counted(num_candidates, "node is", "nodes are")
    away = [candidate for candidate in forming.candidates if not candidate.is_connected]
    if forming.num_pending and now_s < forming.pending_until_s:
        return NotYet(
            forming.pending_until_s, f"{counted(forming.num_pending, 'node')} of the round before still to come"
        )
    if forming.enough_since_s is None or num_candidates < limits.min_nodes:
        return NotYet(math.inf, f"{here} here, want {limits.min_nodes}")
    if away:
        return NotYet(math.inf, f"{away[0].name} has lost its connection")
    last_call_s = forming.enough_since_s + limits.last_call_s
    if num_candidates < limits.max_nodes and not _is_complete(forming) and now_s < last_call_s:
        return NotYet(last_call_s, f"{here} here, which is enough: last call for more")
    return order_ranks(forming.candidates, limits.max_nodes)


def _is_complete(forming: FormingRound) -> bool:
    """Return whether those who were in the round before make the next one, so that nobody else is expected."""
    if not forming.previous_size:
        return False
    num_again = sum(candidate.previous_rank is not None for candidate in forming.candidates)
    return num_again >= forming.limits.min_nodes or len(forming.candidates) >= forming.previous_size


def growth_due_s(since_s: Sequence[float], room: int, last_call_s: float) -> float:
    """Return when a round that runs makes room for those who have come at these times; inf: never, -inf: now."""
    if room <= 0 or not since_s:
        return math.inf
    return -math.inf if len(since_s) >= room else min(since_s) + last_call_s


def order_ranks(candidates: Iterable[RoundCandidate], max_nodes: int) -> tuple[str, ...]:
    """Return the uids by rank, at most `max_nodes`; who was in the round before goes first, then who came first.

    Ranks change as little as they can: newcomers take the places that are free, what stays free is closed up. Then
    nodes of one domain are put together, outermost domains first, each where its first node stands.
    """
    ordered = sorted(candidates, key=_precedence)
    chosen = ordered[:max_nodes]
    old = {node.previous_rank: node for node in chosen if node.previous_rank is not None}
    # Of the newcomers, too, the order is that of their names, as a person counts.
    new = sorted((node for node in chosen if node.previous_rank is None), key=lambda node: _natural(node.name))
    places: list[RoundCandidate] = []
    for rank in range(max(old, default=-1) + 1):
        if rank in old:
            places.append(old[rank])
        elif new:
            places.append(new.pop(0))
    return tuple(node.uid for node in _by_domain([*places, *new], 0))


def _precedence(node: RoundCandidate) -> tuple[bool, int, float, str]:
    return node.previous_rank is None, node.previous_rank or 0, node.since_s, node.uid


def _by_domain(nodes: list[RoundCandidate], level: int) -> list[RoundCandidate]:
    """Put nodes of one domain together, from this level inwards; the order is kept otherwise."""
    if not any(len(node.domains) > level for node in nodes):
        return nodes
    groups = _grouped(nodes, lambda node: node.domains[level] if len(node.domains) > level else "")
    return [node for group in groups for node in _by_domain(group, level + 1)]


def _grouped(nodes: list[RoundCandidate], key: Callable[[RoundCandidate], str]) -> list[list[RoundCandidate]]:
    groups: dict[str, list[RoundCandidate]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return list(groups.values())


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key by which node-2 comes before node-10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return tuple((text, int(number[:40]) if number else -1) for text, number in parts)
