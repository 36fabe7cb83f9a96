"""The reference's classes, each called on a ctx as a script would."""

import datetime
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch.distributed as dist

from unbroken.inprocess.compose import Compose
from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.exception import TimeoutError as BarrierTimeout
from unbroken.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    RootKeyMismatch,
    ShiftRanks,
    Tree,
)
from unbroken.inprocess.state import Mode, State
from unbroken_core.vocabulary.errors import InputError

from .rank_threads import Job, MemoryStore

R, B = LayerFlag.RESERVE, LayerFlag.BACKFILL
PATIENT = datetime.timedelta(seconds=60)


def ctx(rank: int, world_size: int, terminated: Iterable[int] = (), store: object = None) -> RankAssignmentCtx:
    return RankAssignmentCtx(State(rank, world_size), store, set(terminated))


def new_rank(step: Callable[[RankAssignmentCtx], RankAssignmentCtx], context: RankAssignmentCtx) -> int | None:
    try:
        return step(context).state.rank
    except RankDiscarded:
        return None


def new_ranks(step: RankAssignment, world_size: int, terminated: set[int]) -> list[int | None]:
    return [new_rank(step, ctx(rank, world_size, terminated)) for rank in range(world_size)]


# ----------------------------------------------------------------------------------------------------- names and types


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (RankAssignmentCtx, ["state", "store", "terminated_ranks"]),
        (MaxActiveWorldSize, [("max_active_world_size", None)]),
        (ActiveWorldSizeDivisibleBy, [("divisor", 1)]),
        (FilterCountGroupedByKey, ["key_or_fn", "condition", ("timeout", datetime.timedelta(seconds=60))]),
        (Layer, [("min_ranks", 1), ("max_ranks", None), ("key_or_fn", ""), ("flag", None)]),
        (Tree, ["layers", ("world_size_filter", None)]),
    ],
)
def test_arguments_and_defaults_are_those_of_the_reference(kind: type, parameters: list[object]) -> None:
    """0.2, 0.7, 0.9, 0.24"""
    own = list(inspect.signature(kind).parameters.values())[: len(parameters)]
    seen = [p.name if isinstance(w, str) else (p.name, p.default) for p, w in zip(own, parameters, strict=True)]
    assert seen == parameters


def test_classes_stand_to_each_other_as_in_the_reference() -> None:
    """0.3"""
    assert issubclass(RankFilter, RankAssignment)
    assert all(
        issubclass(kind, RankFilter) for kind in (ActivateAllRanks, MaxActiveWorldSize, ActiveWorldSizeDivisibleBy)
    )
    assert not any(issubclass(kind, RankFilter) for kind in (ShiftRanks, FillGaps, Tree, FilterCountGroupedByKey))
    assert issubclass(RankDiscarded, RestartError)


@pytest.mark.parametrize("step", [ShiftRanks(), FillGaps()])
def test_only_the_terminated_rank_is_discarded_and_told_why(step: RankAssignment) -> None:
    """0.1, 0.5"""
    with pytest.raises(RankDiscarded, match=r"rank 4 .*\[1, 4, 5\]"):
        step(ctx(4, 8, {1, 4, 5}))
    survivor = ctx(3, 8, {1, 4, 5})
    assert step(survivor) is survivor
    assert survivor.terminated_ranks == set()


# ------------------------------------------------------------------------------------------------------------- filters


def test_activate_all_ranks_activates_each_rank() -> None:
    """0.4, 0.6"""
    state = ActivateAllRanks()(ctx(3, 8)).state
    assert (state.mode, state.active_rank, state.active_world_size) == (Mode.ACTIVE, 3, 8)


@pytest.mark.parametrize(
    ("steps", "rank", "before", "wanted"),
    [
        pytest.param((MaxActiveWorldSize(),), 7, None, (Mode.ACTIVE, 7, 8), id="without a limit"),
        pytest.param((MaxActiveWorldSize(4),), 3, None, (Mode.ACTIVE, 3, 4), id="below the limit"),
        pytest.param((MaxActiveWorldSize(4),), 4, None, (Mode.INACTIVE, None, 4), id="at the limit"),
        pytest.param((MaxActiveWorldSize(6),), 5, 5, (Mode.INACTIVE, None, 5), id="fewer were active"),
        pytest.param((MaxActiveWorldSize(9),), 7, 12, (Mode.ACTIVE, 7, 8), id="more were active than there are"),
        pytest.param((ActiveWorldSizeDivisibleBy(3),), 5, None, (Mode.ACTIVE, 5, 6), id="divisible by 3"),
        pytest.param((ActiveWorldSizeDivisibleBy(3),), 6, None, (Mode.INACTIVE, None, 6), id="the rest steps aside"),
        pytest.param((ActiveWorldSizeDivisibleBy(9),), 0, None, (Mode.INACTIVE, None, 0), id="nobody is left"),
        pytest.param(
            (ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(5)),
            3,
            None,
            (Mode.ACTIVE, 3, 4),
            id="one after the other",
        ),
    ],
)
def test_filters_activate_the_lowest_ranks(
    steps: tuple[RankFilter, ...], rank: int, before: int | None, wanted: tuple[Mode, int | None, int]
) -> None:
    """0.7, 0.8, 0.9"""
    context = ctx(rank, 8)
    context.state.active_world_size = before
    state = Compose(*steps)(context).state
    assert (state.mode, state.active_rank, state.active_world_size) == wanted
    assert state.world_size == 8


# -------------------------------------------------------------------------------------------------------- renumbering


def test_shift_ranks_keeps_the_order_and_closes_gaps() -> None:
    """0.10, 0.11"""
    assert new_ranks(ShiftRanks(), 8, {1, 4, 5}) == [0, None, 1, 2, None, None, 3, 4]


@pytest.mark.parametrize(
    ("terminated", "wanted"),
    [
        ({1, 4, 5}, [0, None, 2, 3, None, None, 1, 4]),
        ({1, 2, 7}, [0, None, None, 3, 4, 1, 2, None]),
        (set(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (set(range(8)), [None] * 8),
    ],
)
def test_fill_gaps_moves_the_highest_ranks_into_the_gaps(terminated: set[int], wanted: list[int | None]) -> None:
    """0.12, 0.13"""
    assert new_ranks(FillGaps(), 8, terminated) == wanted


@pytest.mark.parametrize("step", [ShiftRanks(), FillGaps()])
def test_every_loss_pattern_leaves_ranks_without_gaps(step: RankAssignment) -> None:
    """0.14: the reference's FillGaps gives an invalid set of ranks in 290 of the 494 patterns of 2 to 8 ranks."""
    num_patterns = 0
    for size in range(2, 9):
        for number in range(1, size):
            for terminated in itertools.combinations(range(size), number):
                num_patterns += 1
                found = new_ranks(step, size, set(terminated))
                assert sorted(rank for rank in found if rank is not None) == list(range(size - number)), terminated
                assert [rank for rank, new in enumerate(found) if new is None] == list(terminated)
    assert num_patterns == 494


def test_fill_gaps_again_without_losses_changes_nothing() -> None:
    """0.13"""
    assert new_ranks(FillGaps(), 5, set()) == [0, 1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------------- composition


def test_default_composition_of_the_reference_renumbers_and_activates() -> None:
    composed = Compose(ActivateAllRanks(), ShiftRanks())
    state = composed(ctx(6, 8, {1, 4})).state
    assert isinstance(composed, RankAssignment)
    assert (state.rank, state.world_size, state.active_rank, state.active_world_size) == (4, 6, 4, 6)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((ActivateAllRanks(), Tree([Layer()])), id="Tree with a filter"),
        pytest.param((Tree([Layer()]), ShiftRanks()), id="Tree with renumbering"),
        pytest.param((Tree([Layer()]), Tree([Layer()])), id="Tree with Tree"),
        pytest.param((Tree([Layer()]), Compose(ActivateAllRanks(), ShiftRanks())), id="Tree with a composition"),
        pytest.param((ActivateAllRanks(), MaxActiveWorldSize(4)), id="two that activate"),
        pytest.param((ShiftRanks(), MaxActiveWorldSize(4)), id="filter before renumbering"),
    ],
)
def test_compositions_that_cannot_work_are_refused(steps: tuple[RankAssignment, ...]) -> None:
    """0.3, 0.6, 0.28"""
    with pytest.raises(TypeError, match="Compose: want"):
        Compose(*steps)


def test_policy_of_a_user_is_composed_like_the_others() -> None:
    class EvenRanks(RankFilter):
        """Half of the ranks."""

        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            rank = ctx.state.rank or 0
            ctx.state.mode = Mode.INACTIVE if rank % 2 else Mode.ACTIVE
            ctx.state.active_rank = None if rank % 2 else rank // 2
            ctx.state.active_world_size = (ctx.state.world_size + 1) // 2
            return ctx

    state = Compose(EvenRanks(), ShiftRanks())(ctx(7, 8, {0})).state
    assert (state.rank, state.active_rank, state.active_world_size) == (6, 3, 4)


# ------------------------------------------------------------------------------------------------------------ grouping


def pairs_only(**arguments: Any) -> FilterCountGroupedByKey:
    return FilterCountGroupedByKey(lambda state: str((state.rank or 0) // 2), lambda count: count == 2, **arguments)


@pytest.mark.parametrize(
    ("terminated", "wanted"), [({1, 4, 5, 6}, {0, 1, 4, 5, 6, 7}), ({1, 4, 5}, {0, 1, 4, 5}), (set(), set())]
)
def test_groups_that_miss_the_condition_are_terminated_on_every_rank(terminated: set[int], wanted: set[int]) -> None:
    """0.15, 0.17, 0.18, 0.19"""
    job = Job(8, lambda: pairs_only(timeout=PATIENT))
    done = job.step(terminated)
    healthy = {rank: context.terminated_ranks for rank, context in done.items() if rank not in terminated}
    assert job.errors == {}
    assert healthy == {rank: wanted for rank in range(8) if rank not in terminated}
    assert all(context.state.rank == rank and context.state.world_size == 8 for rank, context in done.items())


def test_key_may_be_a_string() -> None:
    """0.16"""
    job = Job(4, lambda: FilterCountGroupedByKey("all", lambda count: count >= 4, PATIENT))
    done = job.step({2})
    assert [done[rank].terminated_ranks for rank in (0, 1, 3)] == [{0, 1, 2, 3}] * 3


def test_ranks_that_made_different_numbers_of_filters_still_meet() -> None:
    """0.21: the reference names them by a counter of the class, and dead-locks."""
    made = itertools.count()

    def policy() -> FilterCountGroupedByKey:
        for _ in range(next(made)):
            pairs_only()
        return pairs_only(timeout=PATIENT)

    job = Job(4, policy)
    job.step(set())
    assert job.errors == {}


def test_two_filters_of_one_composition_do_not_share_counters() -> None:
    """0.16, 0.21"""

    def fours(state: State) -> str:
        return str((state.rank or 0) // 4)

    def policy() -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
        outer = FilterCountGroupedByKey(fours, lambda count: count == 4, PATIENT)
        step: Callable[[RankAssignmentCtx], RankAssignmentCtx] = Compose(
            ShiftRanks(), outer, pairs_only(timeout=PATIENT)
        )
        return step

    job = Job(8, policy)
    done = job.step({1})
    assert {rank: context.state.rank for rank, context in done.items()} == {4: 0, 5: 1, 6: 2, 7: 3}


def test_counts_of_one_iteration_are_not_added_to_those_of_the_next() -> None:
    """0.22"""
    job = Job(4, lambda: pairs_only(timeout=PATIENT))
    for _ in range(3):
        done = job.step(set())
        assert [context.terminated_ranks for context in done.values()] == [set()] * 4
        for state in job.states.values():
            state.advance()


def test_filter_whose_ranks_do_not_come_fails_in_time_and_says_how_many_came() -> None:
    """0.20"""
    step = pairs_only(timeout=datetime.timedelta(0))
    with pytest.raises(BarrierTimeout, match="want 8 ranks in 0 s, got 1"):
        step(ctx(0, 8, store=MemoryStore()))


# ---------------------------------------------------------------------------------------------------------------- Tree


def tree(num_ranks: int, group: int, flag: LayerFlag | None = None, **arguments: Any) -> Job:
    layers = [
        Layer(key_or_fn="root", flag=flag),
        Layer(key_or_fn=lambda state: str((state.rank or 0) // group), flag=flag),
    ]
    return Job(num_ranks, lambda: Tree(layers, timeout=PATIENT, **arguments))


def test_tree_gives_every_rank_the_same_world() -> None:
    """0.25, 0.36, 0.37, 0.39, 0.40, 0.41, 0.48: golden vector, and O(N) reads of the store in all."""
    job = tree(8, 4, B)
    job.step(set())
    assert job.store.num_reads <= 3 * 8
    job.step({1})
    assert job.active_ranks(8) == [0, None, 2, 3, 4, 5, 6, 1]
    assert isinstance(job.errors[1], RankDiscarded)
    seen = {rank: (state.rank, state.world_size, state.active_world_size) for rank, state in job.states.items()}
    assert seen == {initial: (rank, 7, 7) for rank, initial in enumerate((0, 2, 3, 4, 5, 6, 7))}


def test_order_of_the_topology_wins_over_that_of_the_environment_with_one_warning_a_leaf() -> None:
    """0.27"""
    layers = [Layer(), Layer(key_or_fn=lambda state: str((state.rank or 0) % 2))]
    job = Job(1, lambda: Tree(layers))
    step, store = job.policies[0], job.store
    for rank in range(1, 8):
        store.set(f"unbroken/tree/0/0/keys/{rank}", f'["{rank}", "", "{rank % 2}"]')
        store.add("unbroken/tree/0/0/came", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(ctx(0, 8, store=store))
    assert len(caught) == 6
    assert "topology_rank=1 environment_rank=2" in str(caught[0].message)
    world = step._world  # type: ignore[attr-defined] # the ranks as it keeps them, which it tells nobody
    assert [world.standing(rank).active_rank for rank in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_root_keys_that_differ_are_refused_by_name() -> None:
    """0.25"""
    job = Job(2, lambda: Tree([Layer(key_or_fn=lambda state: f"root-{state.rank}")], timeout=PATIENT))
    job.step(set())
    assert all(isinstance(error, RootKeyMismatch | RuntimeError) for error in job.errors.values())
    assert all("['root-0', 'root-1']" in str(error) for error in job.errors.values())
    assert len(job.errors) == 2


class Unpicklable(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"{rank}: {detail}")


def test_exception_is_handed_back_as_it_is_and_not_kept() -> None:
    """0.31, 0.46, 0.47: the reference copies it deeply, and keeps it in every leaf."""
    job = tree(4, 2)
    job.step(set())
    error = Unpicklable(2, "boom")
    for state in job.states.values():
        state.fn_exception, state.iteration = error, 5
    done = job.step({0})
    assert [context.state.fn_exception for context in done.values()] == [error] * 3
    assert [context.state.iteration for context in done.values()] == [5] * 3
    for context in done.values():
        context.state.fn_exception = None
    policy = job.policies[1]
    assert not _holds(policy, error)


def _holds(policy: object, error: BaseException) -> bool:
    import gc

    seen: set[int] = set()
    queue = [policy]
    while queue:
        item = queue.pop()
        if item is error:
            return True
        if id(item) in seen or inspect.ismodule(item) or isinstance(item, type) or inspect.isroutine(item):
            continue
        seen.add(id(item))
        queue += gc.get_referents(item)
    return False


def test_tree_does_not_wait_for_a_rank_that_died_before_it_said_where_it_is() -> None:
    """0.49: the reference blocks."""
    step = Tree([Layer(), Layer(key_or_fn=lambda state: str((state.rank or 0) // 2))], timeout=datetime.timedelta(0))
    store = MemoryStore()
    for rank in (1, 3):
        store.set(f"unbroken/tree/0/0/keys/{rank}", f'["{rank}", "", "{rank // 2}"]')
        store.add("unbroken/tree/0/0/came", 1)
    state = step(ctx(0, 4, store=store)).state
    assert (state.active_rank, state.active_world_size, state.world_size) == (0, 3, 3)
    late = Tree([Layer(), Layer(key_or_fn=lambda state: str((state.rank or 0) // 2))], timeout=datetime.timedelta(0))
    with pytest.raises(RankDiscarded, match=r"rank 2 .*\[2\]"):
        late(ctx(2, 4, store=store))


def test_tree_does_not_wait_for_ranks_that_are_known_to_be_terminated() -> None:
    """0.49"""
    job = tree(4, 2)
    job.step({2}, absent={2})
    assert job.active_ranks(4) == [0, 1, None, 2]


def test_world_comes_back_to_the_largest_multiple_that_is_healthy() -> None:
    """0.38, 0.45: the reference goes 12 -> 8 -> 4 -> 0 with 9 healthy ranks."""
    job = tree(12, 4, world_size_filter=lambda size: size // 4 * 4)
    sizes = []
    for terminated in (set(), {0}, {0}, {0}, {0}, {0}):
        job.step(terminated)
        sizes.append(next(iter(job.states.values())).active_world_size)
    assert sizes == [12, 8, 8, 8, 8, 4]


@pytest.mark.parametrize("flag", [None, R, R | B])
def test_whole_spare_host_takes_over_in_local_order(flag: LayerFlag | None) -> None:
    """0.43: the reference hands the ranks out in reverse."""
    layers = [
        Layer(max_ranks=8, key_or_fn="root", flag=flag),
        Layer(min_ranks=4, key_or_fn=lambda state: str((state.rank or 0) // 4), flag=flag),
    ]
    job = Job(16, lambda: Tree(layers, timeout=PATIENT))
    job.step(set())
    job.step({1})
    taken = job.active_ranks(16)
    assert taken == [None] * 4 + ([0, 1, 2, 3] + [None] * 8 if flag is None else [4, 5, 6, 7, 0, 1, 2, 3] + [None] * 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: Tree([])(ctx(0, 1, store=MemoryStore())), "layers: want at least the root", id="no layer"),
        pytest.param(
            lambda: Tree([Layer(min_ranks=5, max_ranks=4)])(ctx(0, 1, store=MemoryStore())),
            "max_ranks: want at least min_ranks",
            id="minimum above maximum",
        ),
        pytest.param(lambda: ShiftRanks()(ctx(0, 0)), "world_size: want at least 1", id="empty world"),
        pytest.param(lambda: ShiftRanks()(ctx(0, 4, {-1})), "terminated_ranks: want ranks from 0 to 3", id="negative"),
        pytest.param(lambda: FillGaps()(ctx(0, 4, {4})), "terminated_ranks: want ranks from 0 to 3", id="too large"),
        pytest.param(lambda: Tree([Layer()])(ctx(0, 1, {3}, MemoryStore())), "want ranks from 0 to 0", id="in a tree"),
        pytest.param(
            lambda: Tree([Layer()], lambda size: size + 1)(ctx(0, 1, store=MemoryStore())),
            "from 0 to 1, got 2",
            id="filter that returns more",
        ),
        pytest.param(
            lambda: Tree([Layer()], lambda size: 1 // 0)(ctx(0, 1, store=MemoryStore())),
            "from 0 to 1, got ZeroDivisionError",
            id="filter that raises",
        ),
        pytest.param(lambda: ActiveWorldSizeDivisibleBy(0), "divisor: want at least 1", id="divisor 0"),
        pytest.param(lambda: MaxActiveWorldSize(-1), "want at least 0", id="negative limit"),
    ],
)
def test_bad_input_is_refused_with_what_was_seen_and_wanted(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_exchange_works_on_a_store_of_torch() -> None:
    """0.15, 0.25"""
    job = tree(8, 4, B)
    job.store = dist.HashStore()  # type: ignore[attr-defined] # torch does not export it by name
    job.step(set())
    job.step({1})
    assert job.active_ranks(8) == [0, None, 2, 3, 4, 5, 6, 1]
    groups = Job(8, lambda: pairs_only(timeout=PATIENT))
    groups.store = dist.HashStore()  # type: ignore[attr-defined] # torch does not export it by name
    done = groups.step({1, 4, 5, 6})
    assert [done[rank].terminated_ranks for rank in (0, 2, 3, 7)] == [{0, 1, 4, 5, 6, 7}] * 4
