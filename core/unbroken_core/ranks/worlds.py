"""What a job learns from its tree: a world of active ranks, why there is none, and what a new one changes."""

from dataclasses import dataclass
from typing import NamedTuple, Union

from unbroken_core.ranks.tree import Domain, RankTree, TreePlan
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import RankReason

Locals = tuple[int, ...]
"""Local ranks of one pod, ascending."""
Worker = tuple[str, int]
"""Uid of the pod, and local rank."""
UNKNOWN = "unknown"
"""Shown for a domain without a name."""


@dataclass(frozen=True)
class World:
    """A world that the healthy workers make."""

    world_size: int
    num_pods: int
    """Pods with ranks, those included that the world's size cut off; `replicas` when there are at least so many."""
    num_closed: int = 0
    """How many active ranks fewer than before."""
    num_left: int = 0
    """Pods of the world before that have no rank in this one."""
    promoted: tuple[str, ...] = ()
    """Uids of pods that have ranks and had none, in rank order; empty in a first world."""
    num_broken: int = 0
    """Wholly spare pods of which this world takes some workers only."""


@dataclass(frozen=True)
class Shortage:
    """No valid world can be made of what is ready."""

    num_pods: int
    """Pods that could be active."""
    num_ranks: int
    detail: str
    """Why, with numbers, to end a sentence."""
    is_objection: bool = False
    """Whether the script says so: enough workers are ready, and its own code gives too few of them a rank."""


Outcome = Union[World, Shortage]


class Move(NamedTuple):
    """Why a worker's rank is another than before."""

    reason: RankReason
    origin: str = ""
    """Where a rank that was replaced, or filled a gap, was before: domains and pod, outermost first."""


@dataclass(frozen=True)
class Cut:
    """What a new world changes, by pod uid."""

    world: World
    ranks: dict[str, dict[int, int]]
    """Active rank by local rank of each pod that changes, or was forgotten; pods that are not here keep theirs."""
    moves: dict[str, dict[int, Move]]
    """By local rank."""
    is_first: bool
    """Whether nobody keeps anything: pods that are not in `ranks` have none."""


_TAKEN = (RankReason.REPLACED, RankReason.FILLED_GAP)


class Roll(NamedTuple):
    """Everybody, for who is to choose among them."""

    active: list[Worker]
    """By rank in the world that counts; lost ones included."""
    idle: list[Worker]
    """Usable without a rank, in the order of the tree."""
    lost: list[int]
    """Ranks of the active ones that are lost, or whose domain stands aside; ascending."""


def refuse_crowds(domain: Domain) -> None:
    """Raise InputError when a domain has more active workers than it may."""
    if domain.active > domain.maximum:
        where = _where(domain) or "the job"
        raise InputError(f"{where}: want at most {domain.maximum} active ranks, got {domain.active}")
    for child in domain.children:
        refuse_crowds(child)


def compare(plan: TreePlan, num_pods: int) -> World:
    """Return the world of a plan, compared with the one before."""
    gained: dict[Domain, int] = {}
    given: dict[Domain, int] = {}
    first_rank: dict[Domain, int] = {}
    for host, before, after in zip(plan.hosts, plan.before, plan.after, strict=True):
        if before < 0:
            gained[host] = gained.get(host, 0) + 1
            first_rank[host] = min(after, first_rank.get(host, after))
        elif after < 0:
            given[host] = given.get(host, 0) + 1
    num_closed = sum(given.values()) - sum(gained.values())
    promoted = [host for host, count in gained.items() if host.active + given.get(host, 0) == count]
    promoted.sort(key=first_rank.__getitem__)
    return World(
        plan.world_size,
        num_pods,
        max(num_closed, 0),
        sum(host.active == 0 for host in given),
        tuple(host.key for host in promoted),
        len(plan.broken_spares),
    )


def cut_of(tree: RankTree, plan: TreePlan, world: World, is_first: bool) -> Cut:
    moves: dict[str, dict[int, Move]] = {}
    plain = {reason: Move(reason) for reason in RankReason}
    origins = plan.origins
    for leaf, host, reason in zip(plan.leaves, plan.hosts, plan.reasons, strict=True):
        origin = origins.get(leaf)
        move = plain[reason] if origin is None or reason not in _TAKEN else Move(reason, _where(origin))
        moves.setdefault(host.key, {})[leaf - host.first] = move
    return Cut(world, {uid: ranks_of(tree, uid) for uid in moves}, moves, is_first)


def ranks_of(tree: RankTree, uid: str) -> dict[int, int]:
    return {local_rank: rank for local_rank, rank in enumerate(tree.ranks(uid)) if rank is not None}


def _where(host: Domain) -> str:
    return "/".join(map(shown_name, host.path))


def shown_name(name: str) -> str:
    """Return the name of a domain or place of a job's tree for people: pods without their uid."""
    return name.partition("#")[0] or UNKNOWN
