"""What no plan can be made of is refused with what was seen and wanted, or is a plan that says why. Never bad ranks."""

import pytest

from unbroken_core.ranks.ranking import Ranking
from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.tree import Place, RankTree, explain
from unbroken_core.ranks.tree.world import RankedWorld
from unbroken_core.ranks.worlds import Shortage, World
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer

LAYERS = [
    Layer("job", min_ranks=1, max_ranks=8, replace_from=True),
    Layer("rack", replace_from=True),
    Layer("pod", min_ranks=2, replace_from=True),
]


def six_pods() -> RankTree:
    """Return a tree of three racks of two pods of two workers: eight are active, all spares are in rack-2."""
    places = [Place(f"uid-{pod}", (f"rack-{pod // 2}", f"pod-{pod}"), 2) for pod in range(6)]
    tree = RankTree(LAYERS, places)
    tree.start()
    return tree


def holders(tree: RankTree) -> list[tuple[str, int]]:
    return [tree.worker(leaf) for leaf in tree.by_rank]


def whole(*pods: int) -> list[tuple[str, int]]:
    return [(f"uid-{pod}", local_rank) for pod in pods for local_rank in range(2)]


def test_all_spares_in_one_dead_rack_change_no_rank_and_the_next_loss_says_that_none_was_found() -> None:
    tree = six_pods()
    for pod in (4, 5):
        tree.lose(f"uid-{pod}")
    plan = tree.plan()
    assert (len(plan), holders(tree)) == (0, whole(0, 1, 2, 3))
    assert explain(plan) == ["Plan 1: 8 active, 0 spare, 4 lost ranks; nothing changes."]
    tree.lose("uid-1")
    plan = tree.plan()
    assert holders(tree) == whole(0, 2, 3)
    assert explain(plan)[-1] == "4 workers move down, from ranks 4-7 to ranks 2-5: ranks below them found no spare."


def test_spares_and_active_ranks_that_die_in_one_rack_together_leave_valid_ranks() -> None:
    tree = six_pods()
    for pod in (2, 3, 4, 5):
        tree.lose(f"uid-{pod}")
    tree.plan()
    assert holders(tree) == whole(0, 1)


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_job_whose_spares_are_all_in_one_dead_rack_shrinks_or_says_what_is_short(minimum: int) -> None:
    ranking = Ranking(Rules(2, minimum, 1, 1, None, 1, (Layer("rack", "rack"),)))
    for pod, rack in (("p0", "r1"), ("p1", "r2"), ("p2", "r3"), ("p3", "r3")):
        ranking.place(pod, pod, (rack,))
        ranking.fit(pod, (0,))
    ranking.first({"p0", "p1"})
    ranking.take()
    for pod in ("p1", "p2", "p3"):
        ranking.fit(pod, ())
    outcome = ranking.following(may_promote=True, may_grow=True)
    if minimum == 1:
        assert outcome == World(1, 1, num_closed=1, num_left=1)
    else:
        assert outcome == Shortage(1, 1, "1 healthy pod of at least 2")


def test_a_world_size_filter_that_raises_leaves_the_ranks_as_they_were_and_is_named() -> None:
    """0.38"""
    tree = six_pods()

    def broken(_size: int) -> int:
        raise KeyError("size")

    tree.lose("uid-0")
    tree.world_rule = broken
    with pytest.raises(InputError, match=r"from 0 to 8, got KeyError: 'size'") as caught:
        tree.plan()
    assert isinstance(caught.value.__cause__, KeyError)
    assert holders(tree) == whole(0, 1, 2, 3)
    tree.world_rule = None
    tree.plan()
    assert holders(tree) == whole(4, 1, 2, 3)


@pytest.mark.parametrize("more", [9, 10**9])
def test_a_world_size_filter_that_returns_more_than_it_got_is_refused(more: int) -> None:
    """0.38"""
    tree = six_pods()
    tree.world_rule = lambda _size: more
    tree.lose("uid-5")
    with pytest.raises(InputError, match=f"from 0 to 8, got {more}"):
        tree.plan()
    assert holders(tree) == whole(0, 1, 2, 3)


def living(num_ranks: int) -> RankedWorld:
    """Return workers that number themselves, two to a host, after their first step."""
    layers = [Layer("root", replace_from=False), Layer("host", replace_from=False)]
    world = RankedWorld(layers, {rank: (str(rank // 2),) for rank in range(num_ranks)})
    world.step([])
    return world


def active_ranks(world: RankedWorld, num_ranks: int) -> list[int | None]:
    found = [world.standing(rank) for rank in range(num_ranks)]
    return [None if standing is None else standing.active_rank for standing in found]


def test_a_rank_that_is_terminated_twice_in_one_step_is_lost_once() -> None:
    """0.32, 0.39"""
    world = living(6)
    world.step([1, 1, 4, 1])
    assert (world.world_size, active_ranks(world, 6)) == (4, [0, None, 1, 2, None, 3])


@pytest.mark.parametrize("rank", [-1, 6, 100])
def test_a_terminated_rank_that_nobody_has_is_refused_and_changes_nothing(rank: int) -> None:
    """0.32"""
    world = living(6)
    with pytest.raises(InputError, match=f"terminated_ranks: want ranks from 0 to 5, got {rank}"):
        world.step([1, rank])
    assert (world.world_size, active_ranks(world, 6)) == (6, list(range(6)))


def test_an_empty_world_is_refused_and_one_that_becomes_empty_has_no_ranks_but_a_reason() -> None:
    """0.32"""
    with pytest.raises(InputError, match="want at least one worker, got none"):
        RankedWorld([Layer("root", replace_from=False), Layer("host", replace_from=False)], {})
    world = living(4)
    plan = world.step(range(4))
    assert plan.shortfall
    assert explain(plan) == [f"Plan 1 is not possible: {plan.shortfall}."]
    assert (world.world_size, active_ranks(world, 4)) == (0, [None] * 4)
