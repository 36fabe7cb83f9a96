"""Policies with keys: each worker says its own, one worker answers with the keys of all."""

import datetime
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.inprocess import Compose
from unbroken.inprocess import rank_assignment as ra
from unbroken.inprocess.assignment.evaluation import answer
from unbroken.inprocess.assignment.policy import Asked, ask
from unbroken.inprocess.state import Mode, State
from unbroken_core.protocol.bounds import MAX_KEYS, MAX_SENTENCE
from unbroken_core.protocol.messages import Policy, Question
from unbroken_core.vocabulary.layers import Layer

from .rank_threads import Job

PATIENT = datetime.timedelta(seconds=60)
R, B = ra.LayerFlag.RESERVE, ra.LayerFlag.BACKFILL
Policies = Sequence[ra.RankAssignment]


def question(num_workers: int, lost: set[int], said: Sequence[tuple[str, ...] | None], num_active: int = 0) -> Question:
    """Ask as the coordinator does, which knows nothing of a worker that has said nothing."""
    names = list(dict.fromkeys(keys for keys in said if keys is not None))
    keys = tuple(-1 if keys is None else names.index(keys) for keys in said)
    return Question(1, 1, 0, num_workers, num_active, tuple(sorted(lost)), tuple(names), keys)


def keys_of(policies: Policies) -> list[tuple[str, ...]]:
    """Return what each worker says, asked about itself."""
    return [ask(policy, None, State(rank, len(policies))).keys for rank, policy in enumerate(policies)]


def asked(policies: Policies, lost: set[int], of: int) -> tuple[int, ...]:
    """Return the workers by rank when one of them is asked."""
    found = answer(policies[of], None, question(len(policies), lost, keys_of(policies)))
    assert found.error == ""
    return found.workers


def each_for_itself(policies: Policies, lost: set[int]) -> tuple[int, ...]:
    """Return the workers by rank when each of them runs its own policy, as in the reference."""
    remaining = iter(policies)
    job = Job(len(policies), lambda: next(remaining))
    done = job.step(lost)
    assert all(isinstance(error, ra.RankDiscarded) for error in job.errors.values()), job.errors
    active: dict[int, int] = {}
    for worker, context in done.items():
        state = context.state
        rank = state.rank if state.mode is Mode.INITIALIZED else state.active_rank
        if rank is not None:
            active[rank] = worker
    return tuple(active[rank] for rank in sorted(active))


# ------------------------------------------------------------------------------------------- FilterCountGroupedByKey


def _named(name: str, _state: State) -> str:
    return name


class OwnShift(ra.ShiftRanks):
    """The user's own, which each worker takes for itself."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        return super().__call__(ctx)


def at_least(number: int) -> Callable[[int], bool]:
    return lambda count: count >= number


COMPOSITIONS: list[Callable[[ra.RankAssignment, ra.RankAssignment], ra.RankAssignment]] = [
    lambda host, _rack: Compose(ra.ShiftRanks(), host),
    lambda host, _rack: Compose(ra.FillGaps(), host),
    lambda host, rack: Compose(ra.ShiftRanks(), rack, host),
    lambda host, rack: Compose(ra.MaxActiveWorldSize(5), ra.ShiftRanks(), rack, ra.FillGaps(), host),
    lambda host, rack: Compose(ra.ActiveWorldSizeDivisibleBy(2), ra.FillGaps(), rack, ra.ShiftRanks(), host),
    lambda host, rack: Compose(ra.FillGaps(), rack, OwnShift(), host),
    lambda host, rack: Compose(OwnShift(), rack, host, OwnShift()),
]


@settings(max_examples=150)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=10),
    least=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    lost=st.sets(st.integers(0, 9)),
    compose=st.sampled_from(COMPOSITIONS),
    data=st.data(),
)
def test_one_worker_counts_as_all_would_together(
    places: list[tuple[int, int]],
    least: tuple[int, int],
    lost: set[int],
    compose: Callable[[ra.RankAssignment, ra.RankAssignment], ra.RankAssignment],
    data: st.DataObject,
) -> None:
    """0.15, 0.17, 0.18: the key of a worker is true in its own process only, whoever is asked."""
    policies = [
        compose(
            ra.FilterCountGroupedByKey(f"host-{host}", at_least(least[0]), PATIENT),
            ra.FilterCountGroupedByKey(partial(_named, f"rack-{rack}"), at_least(least[1]), PATIENT),
        )
        for host, rack in places
    ]
    lost = {rank for rank in lost if rank < len(places)}
    of = data.draw(st.sampled_from(range(len(places))))
    assert asked(policies, lost, of) == each_for_itself(policies, lost)


@pytest.mark.parametrize(("lost", "workers"), [({1, 4, 5, 6}, (2, 3)), ({1, 4, 5}, (2, 3, 6, 7)), (set(range(8)), ())])
def test_groups_of_the_listed_sizes_leave_as_a_whole(lost: set[int], workers: tuple[int, ...]) -> None:
    """0.16, 0.19"""
    pairs = ra.FilterCountGroupedByKey(lambda state: str((state.rank or 0) // 2), lambda count: count == 2)
    assert asked([Compose(ra.ShiftRanks(), pairs)] * 8, lost, 0) == workers


def test_counting_is_sent_as_code_with_the_key_of_this_worker() -> None:
    """2.8: names of all steps, so that workers that count in another way are noticed."""
    policy = Compose(ra.ShiftRanks(), ra.FilterCountGroupedByKey(lambda state: f"host-{state.rank}", bool))
    module = "unbroken.inprocess.rank_assignment"
    code = Policy(code=f"{module}.ShiftRanks, {module}.FilterCountGroupedByKey")
    assert ask(policy, None, State(7, 8)) == Asked(code, ("host-7",))


class Counted(ra.FilterCountGroupedByKey):
    """The user's own, around the reference's."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        ctx = super().__call__(ctx)
        ctx.terminated_ranks.add(0)
        return ctx


class Hidden(ra.RankAssignment):
    """Counts inside of itself, where nobody asks the workers for their keys."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        return ra.ShiftRanks()(ra.FilterCountGroupedByKey("all", bool)(ctx))


class Meeting(ra.RankAssignment):
    """Wants to talk to the others."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        ctx.store.set("here", str(ctx.state.rank))
        return ctx


class Apart(ra.RankAssignment):
    """Does not say the same of all."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        ctx.terminated_ranks = {ctx.state.rank or 0}
        return ctx


def test_own_way_to_count_is_followed() -> None:
    policies = [Compose(ra.ShiftRanks(), Counted(f"host-{rank // 2}", at_least(2), PATIENT)) for rank in range(6)]
    assert asked(policies, {3}, 1) == (1, 4, 5)


def _fails(_count: int) -> bool:
    raise KeyError("no condition for this")


COUNT = ra.FilterCountGroupedByKey("all", bool)


@pytest.mark.parametrize(
    ("policy", "said", "error"),
    [
        pytest.param(
            Compose(ra.ShiftRanks(), COUNT),
            [("all",), None],
            r"want 1 keys from each worker, got [] from worker 1",
            id="a worker that has said nothing",
        ),
        pytest.param(
            Compose(ra.ShiftRanks(), COUNT),
            [("all",), ("all", "more")],
            "want 1 keys from each worker, got ['all', 'more'] from worker 1",
            id="a worker with another script",
        ),
        pytest.param(
            Hidden(), [None, None], "must be a step of rank_assignment itself, so that each worker", id="hidden"
        ),
        pytest.param(
            Meeting(), [None, None], "ctx.store.set: one worker answers for all, so there is no store", id="other store"
        ),
        pytest.param(
            Compose(ra.ShiftRanks(), COUNT, Apart()),
            [("all",), ("all",)],
            "want the same terminated ranks on all workers, got a difference on 1: [0, 1]",
            id="not the same for all",
        ),
        pytest.param(
            Compose(ra.ShiftRanks(), ra.FilterCountGroupedByKey("all", _fails)),
            [("all",), ("all",)],
            "KeyError: 'no condition for this' (",
            id="condition raises",
        ),
    ],
)
def test_what_one_worker_cannot_answer_is_an_error_that_says_why(
    policy: ra.RankAssignment, said: list[tuple[str, ...] | None], error: str
) -> None:
    found = answer(policy, None, question(2, set(), said))
    assert found.workers == ()
    assert error in found.error


# ------------------------------------------------------------------------------------------------- subclasses of Tree


class Named(ra.Tree):
    """Only adds something."""

    def __init__(self, *arguments: Any, name: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.name = name


class Own(ra.Tree):
    """Decides itself, at the end; here as the reference does."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        return super().__call__(ctx)


class Reserved(Own):
    """The last rank never trains."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        ctx = super().__call__(ctx)
        state = ctx.state
        if state.active_rank == (state.active_world_size or 0) - 1:
            state.active_rank, state.mode = None, Mode.INACTIVE
        return ctx


def test_tree_with_attributes_of_its_own_is_planned_by_the_coordinator() -> None:
    layers = [ra.Layer(), ra.Layer(2, key_or_fn=lambda state: f"r-{state.rank}", flag=R)]
    wanted = Asked(Policy(layers=(Layer(replace_from=False), Layer(min_ranks=2, replace_from=True))), ("r-3",))
    assert ask(Named(layers, name="digits"), None, State(3, 4)) == wanted
    assert ask(Own(layers), None, State(3, 4)) == Asked(Policy(code=f"{__name__}.Own"), ("", "r-3"))


class Consulted:
    """A job that asks a worker at each loss, and numbers the workers anew each time as the coordinator does."""

    def __init__(self, num_workers: int, layers: list[ra.Layer], kind: type[ra.Tree] = Own, **options: Any) -> None:
        self.policies = [kind(layers, **options) for _ in range(num_workers)]
        self.said: list[tuple[str, ...] | None] = list(keys_of(self.policies))
        self.healthy = set(range(num_workers))
        self.active: list[int] = []
        self.step(set())

    def step(self, lost: set[int], said: bool = True) -> list[int | None]:
        """Lose these workers; return each one's rank by its place. Without `said` nobody knows where they were."""
        self.healthy -= lost
        workers = [*self.active, *sorted(self.healthy - set(self.active))]
        numbers = {number for number, worker in enumerate(workers) if worker not in self.healthy}
        keys = [self.said[worker] if said or worker in self.healthy else None for worker in workers]
        found = answer(self.policies[workers[-1]], None, question(len(workers), numbers, keys, len(self.active)))
        assert found.error == ""
        self.active = [workers[number] for number in found.workers]
        return [self.active.index(worker) if worker in self.active else None for worker in range(len(self.policies))]


def groups(size: int, *flags: ra.LayerFlag | None, **limits: Any) -> list[ra.Layer]:
    group = ra.Layer(key_or_fn=lambda state: str((state.rank or 0) // size), flag=flags[1], **limits)
    return [ra.Layer(flag=flags[0]), group]


N = None


@pytest.mark.parametrize(
    ("num_workers", "layers", "options", "losses"),
    [
        pytest.param(8, groups(4, B, B), {}, [({1}, [0, N, 2, 3, 4, 5, 6, 1])], id="backfill in the root"),
        pytest.param(8, groups(4, N, B), {}, [({1}, [0, N, 2, 1, 3, 4, 5, 6])], id="backfill in the group"),
        pytest.param(8, groups(4, N, N), {}, [({1}, [0, N, 1, 2, 3, 4, 5, 6])], id="shift"),
        pytest.param(
            8,
            groups(4, R, R, max_ranks=3),
            {},
            [({1}, [0, N, 2, 1, 3, 4, 5, N]), ({4}, [0, N, 2, 1, N, 4, 5, 3]), ({2}, [0, N, N, 1, N, 3, 4, 2])],
            id="reserve, then reserve, then shift",
        ),
        pytest.param(8, groups(4, N, N, min_ranks=3), {}, [({0, 2}, [N, N, N, N, 0, 1, 2, 3])], id="minimum"),
        pytest.param(
            12,
            groups(4, N, N),
            {"world_size_filter": lambda size: size // 4 * 4},
            [({0}, [N, 0, 1, 2, 3, 4, 5, 6, 7, N, N, N]), ({1}, [N, N, 0, 1, 2, 3, 4, 5, 6, 7, N, N])],
            id="filter of the world's size, which grows back",
        ),
        pytest.param(
            8,
            [ra.Layer(max_ranks=6, flag=R)],
            {},
            [({7}, [0, 1, 2, 3, 4, 5, N, N]), ({1}, [0, N, 2, 3, 4, 5, 1, N]), ({2}, [0, N, N, 2, 3, 4, 1, N])],
            id="root alone",
        ),
    ],
)
def test_own_tree_answers_for_all_as_on_each_of_them(
    num_workers: int,
    layers: list[ra.Layer],
    options: dict[str, Any],
    losses: list[tuple[set[int], list[int | None]]],
) -> None:
    """0.34, 0.35, 0.36, 0.37, 0.38, 0.45: the listed ranks, from workers that are numbered anew at each loss."""
    job = Consulted(num_workers, layers, **options)
    assert [job.step(lost) for lost, _wanted in losses] == [wanted for _lost, wanted in losses]


def test_what_a_subclass_adds_to_the_decision_of_the_tree_counts() -> None:
    job = Consulted(4, [ra.Layer()], Reserved)
    assert job.active == [0, 1, 2]
    assert job.step({1}) == [0, None, 1, None]


def test_loss_of_a_worker_that_nobody_can_place_any_more_is_filled_from_anywhere() -> None:
    job = Consulted(8, groups(4, R, R, max_ranks=3))
    assert job.step({5}, said=False) == [0, 1, 2, N, 3, N, 5, 4]


def test_roots_that_differ_are_an_error_of_the_script() -> None:
    """0.25"""
    said = [("job-a", "x"), ("job-b", "x")]
    found = answer(Own([ra.Layer(), ra.Layer()]), None, question(2, set(), said))
    assert "RootKeyMismatch: layers[0].key_or_fn: want the same key on all ranks, got ['job-a', 'job-b']" in found.error


# ----------------------------------------------------------------------------------------------------- ctx.store


class FastestFirst(ra.RankAssignment):
    """Exchanges states, and sorts by what the others say."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        """Reverse the ranks of those that are left."""
        assert ctx.state.rank is not None
        size = ctx.state.world_size
        ctx.state.iteration += 100
        ctx.store.send_state(ctx.state, ctx.state.rank)
        left = [rank for rank in range(size) if rank not in ctx.terminated_ranks]
        states = ctx.store.get_states(left)
        # Each is taken from its first state when it begins again.
        assert {state.iteration for state in states} == {100}
        order = sorted((state.rank for state in states), reverse=True)
        ctx.state.rank = order.index(ctx.state.rank)
        ctx.state.world_size, ctx.terminated_ranks = len(order), set()
        return ctx


def test_policy_exchanges_states_through_the_store_of_its_ctx() -> None:
    policies = [Compose(ra.ActivateAllRanks(), FastestFirst()) for _ in range(4)]
    assert asked(policies, {1}, of=2) == (3, 2, 0)


def test_state_that_nobody_sends_is_an_error_and_no_endless_wait() -> None:
    class Waits(ra.RankFilter):
        def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
            ctx.store.get_states([0])
            return ctx

    found = answer(Compose(Waits(), ra.ShiftRanks()), None, question(2, set(), [()] * 2))
    assert "got none from ranks [0], and no other rank can go on" in found.error


class ByKey(ra.RankAssignment):
    """Sends a key that only its own rank knows, such as the name of its host."""

    def __init__(self, own: str) -> None:
        self.own = own

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        """Sort by key."""
        assert ctx.state.rank is not None
        ctx.store.send_key({"host": self.own}, ctx.state.rank)
        keys = ctx.store.get_keys(range(ctx.state.world_size))
        order = sorted(range(len(keys)), key=lambda rank: keys[rank]["host"])
        ctx.state.rank = order.index(ctx.state.rank)
        return ctx


@pytest.mark.parametrize("of", [0, 2])
def test_keys_that_a_policy_sends_are_those_of_each_worker(of: int) -> None:
    """Whoever answers for all has not the others' host name."""
    policies = [Compose(ra.ActivateAllRanks(), ByKey(name)) for name in ("c", "a", "b")]
    assert asked(policies, set(), of) == (1, 2, 0)


def test_key_that_depends_on_others_is_refused() -> None:
    class Late(ra.RankFilter):
        def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
            ctx.store.get_states([0])
            ctx.store.send_key("x", 0)
            return ctx

    with pytest.raises(ValueError, match="get_states before send_key: want the key to depend on this rank alone"):
        ask(Compose(Late(), ra.ShiftRanks()), None, State(0, 2))


class Sends(ra.RankFilter):
    """Sends a key, or else a state."""

    def __init__(self, key: object, state: object = None) -> None:
        self.key = key
        self.state = state

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        if self.key is None:
            ctx.store.send_state(self.state, ctx.state.rank)
        else:
            ctx.store.send_key(self.key, ctx.state.rank)
        return ctx


def test_key_that_no_message_can_hold_is_refused_where_it_is_made() -> None:
    """The agent would refuse each report with it, and the worker wait for an agent that is there."""
    longest = "x" * (MAX_SENTENCE - 2)  # JSON adds its quotes
    assert ask(Compose(Sends(longest), ra.ShiftRanks()), None, State(0, 2)).keys == (f'"{longest}"',)
    wanted = r"Sends: ctx.store.send_key: want at most 16,384 characters.*, got 3,000,002: \"x"
    with pytest.raises(ValueError, match=wanted):
        ask(Compose(Sends("x" * 3_000_000), ra.ShiftRanks()), None, State(0, 2))
    with pytest.raises(
        ValueError, match=r"FilterCountGroupedByKey: key_or_fn: want at most 16,384 .*, got 20,000: yyy"
    ):
        ask(Compose(ra.FilterCountGroupedByKey("y" * 20_000, bool), ra.ShiftRanks()), None, State(0, 2))
    steps = [Sends("x")] * (MAX_KEYS + 1)
    with pytest.raises(ValueError, match="want at most 64 keys of all its steps together, got 65"):
        ask(Compose(*steps, ra.ShiftRanks()), None, State(0, 2))


def test_what_is_sent_as_a_state_and_is_none_is_refused_with_the_line_of_the_script() -> None:
    failed = answer(Compose(Sends(None, {"rank": 3}), ra.ShiftRanks()), None, question(2, set(), [()] * 2))
    wanted = "TypeError: send_state: want a State, such as ctx.state, got dict: {'rank': 3} ("
    assert failed.error.startswith(wanted)
    assert re.search(r"test_evaluation\.py:\d+ in __call__\)$", failed.error), failed.error


def test_policy_that_raises_once_is_evaluated_again() -> None:
    class FailsOnce(ra.RankFilter):
        def __init__(self, failures: int) -> None:
            self.failures = failures

        def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
            self.failures -= 1
            if self.failures >= 0:
                raise OSError("a file server is away")
            return ctx

    assert answer(Compose(FailsOnce(1), ra.ShiftRanks()), None, question(2, set(), [()] * 2)).workers == (0, 1)
    failed = answer(Compose(FailsOnce(2), ra.ShiftRanks()), None, question(2, set(), [()] * 2))
    assert failed.error.startswith("OSError: a file server is away")
