"""What a wrapper's policy asks of the coordinator."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.inprocess import Compose
from unbroken.inprocess import rank_assignment as ra
from unbroken.inprocess.assignment.evaluation import answer
from unbroken.inprocess.assignment.policy import Asked, ask, first_state, refuse_inside
from unbroken.inprocess.pod.environment import PodContext
from unbroken.inprocess.state import Mode, State
from unbroken_core.protocol.messages import Answer, Policy, Question
from unbroken_core.vocabulary.layers import Layer

STATE = State(rank=21, world_size=32)
PLACE = PodContext(Path("/nowhere"), 3, 0, 4, "127.0.0.1")


@pytest.mark.parametrize(
    ("assignment", "rank_filter", "policy"),
    [
        pytest.param(None, None, None, id="nothing"),
        pytest.param(
            Compose(ra.ActivateAllRanks(), ra.ShiftRanks()), None, None, id="what the coordinator does anyway"
        ),
        pytest.param(ra.MaxActiveWorldSize(), None, None, id="no limit"),
        pytest.param(ra.MaxActiveWorldSize(8), None, Policy(max_ranks=8), id="limit"),
        pytest.param(
            Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.MaxActiveWorldSize(9), ra.FillGaps()),
            None,
            Policy(max_ranks=9, divisible_by=4, fills_gaps=True),
            id="composition",
        ),
        pytest.param(
            Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.MaxActiveWorldSize(9), ra.ShiftRanks()),
            Compose(ra.ActiveWorldSizeDivisibleBy(6), ra.MaxActiveWorldSize(7)),
            Policy(max_ranks=7, divisible_by=12),
            id="filter in its own option: all hold",
        ),
        pytest.param(Compose(ra.ShiftRanks(), ra.FillGaps()), None, Policy(fills_gaps=True), id="FillGaps runs first"),
        pytest.param(Compose(ra.FillGaps(), ra.ShiftRanks()), None, None, id="ShiftRanks leaves no gap"),
    ],
)
def test_policy_of_the_reference_is_said_in_numbers(
    assignment: ra.RankAssignment | None, rank_filter: ra.RankFilter | None, policy: Policy | None
) -> None:
    """2.8"""
    assert ask(assignment, rank_filter, STATE) == Asked(policy)


def test_tree_is_said_in_layers_and_in_this_workers_keys() -> None:
    """0.23, 0.24, 0.25: keys are evaluated on the worker's own state, nowhere else."""
    both = ra.LayerFlag.RESERVE | ra.LayerFlag.BACKFILL
    tree = ra.Tree(
        [
            ra.Layer(8, key_or_fn="job", flag=ra.LayerFlag.RESERVE),
            ra.Layer(4, 16, lambda state: f"nvl-{(state.rank or 0) // 16}", both),
            ra.Layer(flag=ra.LayerFlag.BACKFILL),
        ]
    )
    layers = (
        Layer(min_ranks=8, replace_from=True),
        Layer(min_ranks=4, max_ranks=16, replace_from=True, close_gaps=True),
        Layer(min_ranks=1, replace_from=False, close_gaps=True),
    )
    assert ask(tree, None, STATE) == Asked(Policy(layers=layers, root_key="job"), ("nvl-1", ""))


def test_key_function_that_fails_is_named_with_the_state_that_it_was_given() -> None:
    tree = ra.Tree([ra.Layer(), ra.Layer(key_or_fn=lambda state: str(state.rank // 8))])  # type: ignore[operator] # that it may be None
    with pytest.raises(ValueError, match=r"layers\[1\].key_or_fn: want a name for State\(rank=None.* got TypeError"):
        ask(tree, None, State(rank=None, world_size=0))


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [
        pytest.param({"RANK": "5", "WORLD_SIZE": "8", "UNBROKEN_POD": "digits-7"}, 5, 8, id="torchrun's words first"),
        pytest.param({"UNBROKEN_POD": "digits-7"}, 31, 0, id="number of the pod, four workers each"),
        pytest.param({"UNBROKEN_POD": "digits"}, None, 0, id="not known: better than a wrong one"),
    ],
)
def test_rank_before_the_first_plan(environment: dict[str, str], rank: int | None, world_size: int) -> None:
    state = first_state(environment, PLACE)
    assert (state.rank, state.initial_rank, state.world_size) == (rank, rank, world_size)


class Backwards(ra.RankAssignment):
    """The last is the first."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        ctx = ra.ShiftRanks()(ctx)
        assert ctx.state.rank is not None
        ctx.state.rank = ctx.state.world_size - 1 - ctx.state.rank
        return ctx


class Broken(ra.RankAssignment):
    """Does what `act` does to each ctx."""

    def __init__(self, act: Callable[[ra.RankAssignmentCtx], Any]) -> None:
        self.act = act

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        made: ra.RankAssignmentCtx = self.act(ra.ShiftRanks()(ctx))
        return made


class Even(ra.RankFilter):
    """Only every other rank is active."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        state = ctx.state
        assert state.rank is not None
        state.mode = Mode.INACTIVE if state.rank % 2 else Mode.ACTIVE
        state.active_rank = None if state.rank % 2 else state.rank // 2
        return ctx


QUESTION = Question(3, 7, 5, 6, 4, (1, 2))
"""Ranks 0 to 3 were active, 4 and 5 idle; 1 and 2 are lost."""


def test_own_policy_is_named_and_its_steps_are_not_said_in_numbers() -> None:
    name = f"{__name__}.Backwards"
    assert ask(Compose(ra.MaxActiveWorldSize(4), Backwards()), None, STATE) == Asked(
        Policy(code=f"unbroken.inprocess.rank_assignment.MaxActiveWorldSize, {name}")
    )


@pytest.mark.parametrize(
    ("assignment", "rank_filter", "workers"),
    [
        pytest.param(Backwards(), None, (5, 4, 3, 0), id="renumbers"),
        pytest.param(Compose(ra.MaxActiveWorldSize(3), Backwards()), None, (5, 4, 3), id="limit"),
        pytest.param(Backwards(), ra.ActiveWorldSizeDivisibleBy(3), (5, 4, 3), id="filter in its own option"),
        pytest.param(None, Even(), (0, 4), id="a filter alone stands after ShiftRanks"),
        pytest.param(Compose(ra.FillGaps(), Backwards()), None, (5, 4, 3, 0), id="nothing left to fill"),
        pytest.param(ra.ShiftRanks(), ra.MaxActiveWorldSize(0), (), id="nobody: the coordinator waits for others"),
    ],
)
def test_one_worker_answers_for_all_as_each_would_for_itself(
    assignment: ra.RankAssignment | None, rank_filter: ra.RankFilter | None, workers: tuple[int, ...]
) -> None:
    """0.2, 0.3"""
    assert answer(assignment, rank_filter, QUESTION) == Answer(3, 7, workers)


def _set(name: str, value: object) -> Callable[[ra.RankAssignmentCtx], object]:
    def act(ctx: ra.RankAssignmentCtx) -> object:
        setattr(ctx if name == "terminated_ranks" else ctx.state, name, value)
        return ctx

    return act


@pytest.mark.parametrize(
    ("act", "error"),
    [
        pytest.param(
            _set("rank", 0), "ValueError: want each rank once, got rank 0 for ranks 0 and 3", id="all the first"
        ),
        pytest.param(_set("rank", None), "TypeError: want a number as rank, got None for rank 0", id="no rank"),
        pytest.param(
            _set("terminated_ranks", {1}), "ValueError: want no terminated ranks after renumb", id="left over"
        ),
        pytest.param(lambda ctx: None, "want the ctx returned, got None for rank 0", id="nothing returned"),
        pytest.param(lambda ctx: 1 // 0, "ZeroDivisionError: integer division or modulo by zero (", id="raises"),
        pytest.param(
            lambda ctx: replace(ctx, state=replace(ctx.state, rank=ctx.state.rank + 1)), "got [1, 2, 3, 4]", id="gap"
        ),
    ],
)
def test_answer_that_cannot_be_is_an_error_with_what_was_seen(
    act: Callable[[ra.RankAssignmentCtx], Any], error: str
) -> None:
    found = answer(Broken(act), None, QUESTION)
    assert (found.workers, error in found.error) == ((), True), found.error


@pytest.mark.parametrize(
    "policy", [ra.Tree([ra.Layer()]), Backwards(), Compose(ra.MaxActiveWorldSize(4), ra.FillGaps())]
)
def test_policy_that_comes_too_late_is_refused(policy: ra.RankAssignment) -> None:
    with pytest.raises(ValueError, match=r" must be on the outermost wrapped function"):
        refuse_inside(policy)
    refuse_inside(Compose(ra.MaxActiveWorldSize(4), ra.ShiftRanks()))
