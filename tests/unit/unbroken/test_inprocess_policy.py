"""What a wrapper's policy asks of the coordinator."""

from pathlib import Path

import pytest

from unbroken.inprocess import Compose
from unbroken.inprocess import rank_assignment as ra
from unbroken.inprocess.environment import Place
from unbroken.inprocess.policy import Asked, ask, first_state, refuse_inside
from unbroken.inprocess.state import State
from unbroken_core.messages import Policy, PolicyLayer

STATE = State(rank=21, world_size=32)
PLACE = Place(Path("/nowhere"), 3, 0, 4, "127.0.0.1")


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
    layers = (PolicyLayer(8, None, True), PolicyLayer(4, 16, True, True), PolicyLayer(1, None, False, True))
    assert ask(tree, None, STATE) == Asked(Policy(layers=layers, root_key="job"), ("nvl-1", ""))


def test_key_function_that_fails_is_named_with_the_state_that_it_was_given() -> None:
    tree = ra.Tree([ra.Layer(), ra.Layer(key_or_fn=lambda state: str(state.rank // 8))])  # type: ignore[operator]
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


@pytest.mark.parametrize("policy", [ra.Tree([ra.Layer()]), Compose(ra.MaxActiveWorldSize(4), ra.FillGaps())])
def test_policy_that_comes_too_late_is_refused(policy: ra.RankAssignment) -> None:
    with pytest.raises(ValueError, match=r"want .* on the outermost wrapped function"):
        refuse_inside(policy)
    refuse_inside(Compose(ra.MaxActiveWorldSize(4), ra.ShiftRanks()))
