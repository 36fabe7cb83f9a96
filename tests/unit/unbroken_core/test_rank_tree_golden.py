"""Vectors of the tree of ranks: active rank by initial rank, "N" for none."""

from collections.abc import Callable, Sequence

import pytest

from unbroken_core.rank_tree import TreeLayer
from unbroken_core.rank_tree.world import RankedWorld

N = None
Row = list[int | None]


def world(
    num_ranks: int,
    group: int,
    flags: tuple[str, str] = ("", ""),
    minimum: tuple[int, int] = (1, 1),
    maximum: tuple[int | None, int | None] = (None, None),
    rule: Callable[[int], int] | None = None,
) -> RankedWorld:
    """Return a root with groups of `group` ranks; flags hold R (RESERVE) and B (BACKFILL)."""
    layers = [
        TreeLayer(name, minimum[index], maximum[index], "R" in flags[index], "B" in flags[index])
        for index, name in enumerate(("root", "group"))
    ]
    return RankedWorld(layers, {rank: (rank // group,) for rank in range(num_ranks)}, rule)


def active_ranks(seen: RankedWorld) -> Row:
    standings = [seen.standing(rank) for rank in range(len(seen.order_of_tree()))]
    return [None if standing is None else standing.active_rank for standing in standings]


def discarded(seen: RankedWorld) -> list[int]:
    return [rank for rank in range(len(seen.order_of_tree())) if seen.standing(rank) is None]


@pytest.mark.parametrize(
    ("seen", "lost", "wanted"),
    [
        pytest.param(world(8, 4, ("B", "B")), [{1}], [[0, N, 2, 3, 4, 5, 6, 1]], id="backfill from the root"),
        pytest.param(world(8, 4, ("", "B")), [{1}], [[0, N, 2, 1, 3, 4, 5, 6]], id="backfill in the group"),
        pytest.param(world(8, 4, ("", "B")), [{3}], [[0, 1, 2, N, 3, 4, 5, 6]], id="the highest of the group is lost"),
        pytest.param(world(8, 4), [{1}], [[0, N, 1, 2, 3, 4, 5, 6]], id="no flags: shift"),
        pytest.param(world(8, 2, ("B", "B")), [{2, 3}], [[0, 1, N, N, 4, 5, 2, 3]], id="two ranks, groups of 2"),
        pytest.param(world(8, 4, ("B", "B")), [{0, 1}], [[N, N, 2, 3, 4, 5, 0, 1]], id="two ranks, groups of 4"),
        pytest.param(
            world(8, 4, ("R", "R"), maximum=(N, 3)),
            [{1}, {3}, {1}],
            [[0, N, 2, 1, 3, 4, 5, N], [0, N, 2, 1, N, 4, 5, 3], [0, N, N, 1, N, 3, 4, 2]],
            id="a spare in each group",
        ),
        pytest.param(world(8, 4, minimum=(1, 3)), [{0, 2}], [[N, N, N, N, 0, 1, 2, 3]], id="group below its minimum"),
        pytest.param(
            world(12, 4, rule=lambda size: size // 4 * 4), [{0}], [[N, 0, 1, 2, 3, 4, 5, 6, 7, N, N, N]], id="rule"
        ),
        pytest.param(
            world(8, 8, ("R", "R"), maximum=(6, N)),
            [{7}, {1}, {1}],
            [[0, 1, 2, 3, 4, 5, N, N], [0, N, 2, 3, 4, 5, 1, N], [0, N, N, 2, 3, 4, 1, N]],
            id="root of six",
        ),
    ],
)
def test_active_ranks_after_losses_are_the_listed_ones(
    seen: RankedWorld, lost: Sequence[set[int]], wanted: list[Row]
) -> None:
    """Golden vectors of 0.35, 0.36, 0.37, 0.38, 0.42."""
    seen.step(())
    found = []
    for terminated in lost:
        seen.step(terminated)
        found.append(active_ranks(seen))
    assert found == wanted


def test_domain_below_its_minimum_discards_its_healthy_ranks() -> None:
    """0.32"""
    seen = world(8, 4, minimum=(1, 3))
    seen.step({0, 2})
    assert discarded(seen) == [0, 1, 2, 3]


def test_root_below_its_minimum_discards_everyone() -> None:
    """0.32"""
    seen = world(8, 4, minimum=(7, 1))
    plan = seen.step({0, 5})
    assert discarded(seen) == list(range(8))
    assert "at least 7" in plan.shortfall
