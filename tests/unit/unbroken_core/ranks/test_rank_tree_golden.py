"""Vectors of the tree of ranks: active rank by initial rank, "N" for none."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken_core.ranks.tree.world import RankedWorld
from unbroken_core.vocabulary.layers import Layer

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
        Layer(
            name,
            min_ranks=minimum[index],
            max_ranks=maximum[index],
            replace_from="R" in flags[index],
            close_gaps="B" in flags[index],
        )
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


def layered(paths: Sequence[tuple[str, ...]], *layers: Layer) -> RankedWorld:
    made = RankedWorld(layers, dict(enumerate(paths)))
    made.step(())
    return made


def test_innermost_layer_without_reserve_blocks_the_spares_of_all_layers_above() -> None:
    """0.23, 0.35"""
    seen = world(8, 4, ("R", ""), maximum=(6, None))
    seen.step(())
    seen.step({1})
    assert active_ranks(seen) == [0, N, 1, 2, 3, 4, N, N]


def test_search_for_a_spare_stops_below_the_first_layer_without_reserve() -> None:
    """0.23, 0.35: the root would allow it, the rack in between does not."""
    paths = [(f"rack-{rank // 4}", f"host-{rank // 2}") for rank in range(8)]
    seen = layered(
        paths,
        Layer("root", min_ranks=1, max_ranks=6, replace_from=True),
        Layer("rack", replace_from=False),
        Layer("host", replace_from=True),
    )
    seen.step({0})
    assert active_ranks(seen) == [N, 0, 1, 2, 3, 4, N, N]


def test_one_name_under_two_parents_is_two_domains() -> None:
    """0.26"""
    paths = [("a", "x"), ("a", "x"), ("b", "x"), ("b", "x")]
    seen = layered(
        paths,
        Layer("root", replace_from=False),
        Layer("rack", replace_from=False),
        Layer("host", min_ranks=2, replace_from=False),
    )
    seen.step({0})
    assert active_ranks(seen) == [N, N, 0, 1]


def test_gap_is_closed_in_the_highest_domain_of_an_unbroken_chain_of_backfill() -> None:
    """0.30: the root has the flag, too, but the layer in between has not."""
    paths = [(f"rack-{rank // 4}", f"host-{rank // 2}") for rank in range(8)]
    seen = layered(
        paths,
        Layer("root", close_gaps=True, replace_from=False),
        Layer("rack", close_gaps=False, replace_from=False),
        Layer("host", close_gaps=True, replace_from=False),
    )
    seen.step({2})
    assert active_ranks(seen) == [0, 1, N, 2, 3, 4, 5, 6]
    both = layered(
        paths,
        Layer("root", close_gaps=False, replace_from=False),
        Layer("rack", close_gaps=True, replace_from=False),
        Layer("host", close_gaps=True, replace_from=False),
    )
    both.step({0})
    assert active_ranks(both) == [N, 1, 2, 0, 3, 4, 5, 6]


def test_workers_are_activated_while_every_domain_above_is_below_its_maximum() -> None:
    """0.29"""
    assert active_ranks_at_start(world(8, 4, maximum=(5, 3))) == [0, 1, 2, N, 3, 4, N, N]


def active_ranks_at_start(seen: RankedWorld) -> Row:
    seen.step(())
    return active_ranks(seen)


def test_healthy_spares_count_towards_the_minimum() -> None:
    """0.33"""
    seen = world(8, 4, minimum=(1, 3), maximum=(None, 3))
    seen.step(())
    seen.step({0})
    assert active_ranks(seen) == [N, 0, 1, N, 2, 3, 4, N]
    assert discarded(seen) == [0]


def test_loss_of_a_spare_changes_no_active_rank_and_it_is_never_used() -> None:
    """0.34, 0.42"""
    seen = world(8, 4, ("R", "R"), maximum=(6, None))
    seen.step(())
    before = active_ranks(seen)
    plan = seen.step({6})
    assert (len(plan), active_ranks(seen)) == (0, before)
    seen.step({0})
    seen.step({0})
    assert active_ranks(seen) == [N, N, 1, 2, 3, 4, N, 0]


def test_living_workers_are_numbered_in_the_order_of_the_tree() -> None:
    """0.39, 0.40"""
    seen = world(6, 3, ("B", "B"))
    seen.step(())
    seen.step({1})
    standings = [seen.standing(rank) for rank in range(6)]
    assert [standing and (standing.rank, standing.active_rank, standing.world_size) for standing in standings] == [
        (0, 0, 5),
        None,
        (1, 2, 5),
        (2, 3, 5),
        (3, 4, 5),
        (4, 1, 5),
    ]


@settings(max_examples=200)
@given(
    num_ranks=st.integers(1, 64),
    group=st.integers(1, 8),
    flags=st.tuples(st.sampled_from(["", "R", "B", "RB"]), st.sampled_from(["", "R", "B", "RB"])),
    limit=st.sampled_from([None, 1, 2, 5]),
    losses=st.lists(st.sets(st.integers(0, 63), max_size=20), max_size=6),
)
def test_active_ranks_are_always_zero_to_n_and_every_worker_sees_the_same_world(
    num_ranks: int, group: int, flags: tuple[str, str], limit: int | None, losses: list[set[int]]
) -> None:
    """The random property of the golden vectors; 0.41"""
    seen = world(num_ranks, group, flags, maximum=(None, limit))
    for loss in [set[int](), *losses]:
        if not seen.world_size:
            return
        seen.step(sorted({rank % seen.world_size for rank in loss} if seen.tree.by_rank else ()))
        standings = [standing for rank in range(num_ranks) if (standing := seen.standing(rank))]
        active = sorted(standing.active_rank for standing in standings if standing.active_rank is not None)
        assert len(standings) == seen.world_size
        assert all(standing.active_world_size == len(active) for standing in standings)
        assert active == list(range(len(active)))
        assert sorted(standing.rank for standing in standings) == list(range(seen.world_size))
        assert len(seen.tree) == num_ranks
