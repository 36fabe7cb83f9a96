"""Who is named for a hang where ranks say how far they are in their groups."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.unbroken_core.recovery.ranks_in_groups import (
    LOADS,
    SOFT_S,
    STOP,
    WAITS,
    Call,
    Ranks,
    grid,
    steps,
)

from unbroken_core.pod.group_ranks import rank_runs, rank_text
from unbroken_core.protocol.messages import Activity, GroupState
from unbroken_core.recovery.collectives import find_waits
from unbroken_core.recovery.hangs import HangVerdict, Witness, judge
from unbroken_core.vocabulary.reasons import Doing

TP, DP, STEPS = 4, 4, 3
Program = list[Call]
Broken = Callable[[str, int], frozenset[int]]


def stopped(
    change: Callable[[dict[int, Program]], object] = lambda _programs: None,
    broken: Broken = lambda _group, _number: frozenset(),
) -> Ranks:
    """Let a grid of ranks run, with changed programs or broken collectives, until all stand still."""
    programs = steps(TP, DP, STEPS)
    change(programs)
    ranks = Ranks(grid(TP, DP), programs, broken)
    ranks.run()
    return ranks


def stops(rank: int, at: int) -> Ranks:
    """Return ranks of which one stands in its own code before its call `at`."""
    return stopped(lambda programs: programs[rank].insert(at, STOP))


def verdict(ranks: Ranks) -> HangVerdict:
    return judge(ranks.witnesses(TP), SOFT_S)


@pytest.mark.parametrize("seed", range(40))
def test_rank_that_stands_anywhere_is_named_and_nobody_else(seed: int) -> None:
    rng = random.Random(seed)
    culprit = rng.randrange(TP * DP)
    assert verdict(stops(culprit, rng.randrange(4 * STEPS))).ranks == (culprit,)


def test_sentence_says_who_waits_for_whom_through_nested_groups() -> None:
    assert verdict(stops(5, 5)).text == (
        "rank 5 hung for 61 s in its own code (train.py:41 load_batch) while ranks 0-3, 8-15 waited in reduce_scatter, "
        "ranks 4, 6, 7 waited in all_gather; ranks 1, 9, 13 in reduce_scatter (collective 2 of group 'dp1') wait for "
        "rank 5, ranks 4, 6, 7 in all_gather (collective 4 of group 'tp1') wait for rank 5, ranks 0, 8, 12 in "
        "reduce_scatter (collective 2 of group 'dp0') wait for rank 4, ranks 2, 10, 14 in reduce_scatter (collective 2 "
        "of group 'dp2') wait for rank 6, 1 more"
    )


@pytest.mark.parametrize("told_groups", [False, True])
def test_rank_that_is_stopped_is_named_though_it_says_nothing_of_its_groups(told_groups: bool) -> None:
    witnesses = stops(6, 4).witnesses(TP)
    activity = witnesses[6].activity
    assert activity is not None
    frozen = replace(activity if told_groups else LOADS, doing=Doing.FROZEN)
    witnesses[6] = witnesses[6]._replace(activity=frozen)
    assert judge(witnesses, SOFT_S).ranks == (6,)


def test_rank_with_a_collective_in_the_background_is_named_for_its_own_code_all_the_same() -> None:
    # It began an all_reduce whose other members wait for it elsewhere: that is no circle.
    ranks = stopped(lambda programs: programs[6].insert(5, programs[6].pop(7)))
    witnesses = ranks.witnesses(TP)
    activity = witnesses[6].activity
    assert activity is not None
    assert any(state.pending >= 0 for state in activity.groups)
    witnesses[6] = witnesses[6]._replace(activity=replace(LOADS, groups=activity.groups, num_groups=3))
    assert judge(witnesses, SOFT_S).ranks == (6,)


@pytest.mark.parametrize(
    ("activity", "ranks", "told"),
    [
        pytest.param(None, (), "rank 5 did not answer", id="no answer"),
        pytest.param(LOADS, (5,), "rank 5 hung for 61 s in its own code", id="no flight recorder"),
        pytest.param(replace(LOADS, ping_s=1.0), (), "rank not known", id="it has just pinged"),
    ],
)
def test_what_is_not_known_of_a_rank_is_said(activity: Activity | None, ranks: tuple[int, ...], told: str) -> None:
    witnesses = stops(5, 5).witnesses(TP)
    witnesses[5] = witnesses[5]._replace(activity=activity)
    found = judge(witnesses, SOFT_S)
    assert found.ranks == ranks
    assert told in found.text
    assert found.text.endswith("; not checked: the collectives of rank 5")


@pytest.mark.parametrize(
    ("ranks", "named", "text"),
    [
        pytest.param(
            stopped(lambda programs: programs[5].__setitem__(6, ("dp1", "broadcast"))),
            (),
            "the script's mistake, no machine's: as collective 2 of group 'dp1' began ranks 1, 9, 13 reduce_scatter, "
            "rank 5 broadcast",
            id="another operation",
        ),
        pytest.param(
            stopped(lambda programs: programs[5].pop(4)),
            (),
            "the script's mistake, no machine's: as collective 3 of group 'tp1' began ranks 4, 6, 7 all_reduce, "
            "rank 5 all_gather",
            id="one left out",
        ),
        pytest.param(
            stopped(lambda programs: programs[5].pop(6)),
            (),
            "the script's mistake, no machine's: ranks wait for each other in a circle; ranks 1, 9, 13 in "
            "reduce_scatter (collective 2 of group 'dp1') wait for rank 5, ranks 0, 2-8, 10-12, 14, 15 in all_reduce "
            "(collective 2 of group 'all') wait for ranks 1, 9, 13",
            id="one left out, the next in another group",
        ),
        pytest.param(
            stopped(
                broken=lambda group, number: frozenset(range(16)) if (group, number) == ("dp1", 2) else frozenset()
            ),
            (),
            "no rank: all members have begun what does not end: ranks 1, 5, 9, 13 in reduce_scatter "
            "(collective 2 of group 'dp1'): look at the links between them",
            id="all are in",
        ),
        pytest.param(
            stopped(broken=lambda group, number: frozenset([5]) if (group, number) == ("dp1", 2) else frozenset()),
            (5,),
            "rank 5 waited for 62 s in reduce_scatter (collective 2 of group 'dp1'), which has ended for 3 others: "
            "look at the links there",
            id="one does not get out",
        ),
    ],
)
def test_no_machine_is_blamed_for_the_script_and_no_rank_for_a_link(
    ranks: Ranks, named: tuple[int, ...], text: str
) -> None:
    assert verdict(ranks) == HangVerdict(named, text)


def test_operation_that_has_ended_for_the_one_that_took_another_is_still_compared() -> None:
    """Of a broadcast gloo's root is out at once, and in the next collective when it hangs."""
    states = {
        rank: GroupState("0", "0-3", 40, 40, "all_reduce Float[2]", ("barrier", "all_reduce Float[2]"))
        for rank in (0, 2, 3)
    }
    states[1] = GroupState("0", "0-3", 41, 41, "all_reduce Float[2]", ("broadcast Float[2]", "all_reduce Float[2]"))
    world = [
        Witness(rank, f"p{rank}", replace(WAITS, groups=(state,), num_groups=1))
        for rank, state in sorted(states.items())
    ]
    assert judge(world, SOFT_S) == HangVerdict(
        (),
        "the script's mistake, no machine's: as collective 40 of group '0' began ranks 0, 2, 3 all_reduce Float[2], "
        "rank 1 broadcast Float[2]",
    )


def test_one_pod_cannot_say_of_a_neighbour_that_it_is_left_behind() -> None:
    waits = replace(WAITS, groups=(GroupState("0", "0-1", 9, 9, "all_reduce"),), num_groups=1)
    ended = replace(WAITS, groups=(GroupState("0", "0-1", 10, 10, "all_reduce", ("all_reduce",) * 2),), num_groups=1)
    world = [Witness(rank, f"p{rank}", each) for rank, each in enumerate([waits, ended, LOADS, LOADS])]
    assert judge(world, SOFT_S) == HangVerdict(
        (),
        "rank 0 waited for 62 s in all_reduce (collective 9 of group '0'), which has ended for 1 other: "
        "look at the links there",
    )


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("broadcast Float[1]", ", and whether all ranks name the same root"),
        ("reduce", ", and whether all ranks name the same root"),
        ("reduce_scatter Float[1]", ""),
    ],
)
def test_a_root_that_ranks_may_name_differently_is_said_beside_the_links(what: str, more: str) -> None:
    """Of which root is meant nobody keeps anything."""
    waits = replace(WAITS, groups=(GroupState("0", "0-3", 5, 5, what),), num_groups=1)
    ended = replace(WAITS, groups=(GroupState("0", "0-3", 6, 6, "all_reduce", (what, "all_reduce")),), num_groups=1)
    stuck = judge([Witness(rank, f"p{rank}", each) for rank, each in enumerate([waits] * 4)], SOFT_S)
    assert (stuck.ranks, stuck.text.partition("look at the links ")[2]) == ((), f"between them{more}")
    left = judge([Witness(rank, f"p{rank}", each) for rank, each in enumerate([ended, ended, ended, waits])], SOFT_S)
    assert left.text.partition("look at the links ")[2] == f"there{more}"


def test_point_to_point_is_left_to_the_stacks() -> None:
    # Nobody records it: rank 2 receives from rank 3, which stands in its own code; the others wait for rank 2.
    at_40 = GroupState("0", "0-2", 40, 40, "all_reduce", ())
    waits = replace(WAITS, groups=(at_40,), num_groups=1)
    receives = replace(WAITS, what="recv", groups=(replace(at_40, begun=39, pending=-1, what=""),), num_groups=1)
    world = [Witness(rank, f"p{rank}", each) for rank, each in enumerate((waits, waits, receives, LOADS))]
    assert find_waits({witness.rank: witness.activity for witness in world}).roots == (2,)
    assert judge(world, SOFT_S).ranks == (3,)


@pytest.mark.parametrize("seed", range(20))
def test_culprit_of_1024_ranks_in_nested_groups_is_found(seed: int) -> None:
    rng = random.Random(seed)
    culprit, step = rng.randrange(1024), rng.randrange(4)
    witnesses = big_world(culprit, step)
    for silent in rng.sample([rank for rank in range(1024) if rank // 8 != culprit // 8], 20):
        witnesses[silent] = witnesses[silent]._replace(activity=rng.choice([None, replace(WAITS, groups=())]))
    found = judge(witnesses, SOFT_S)
    assert found.ranks == (culprit,)
    assert len(found.text) < 2000


def big_world(culprit: int, step: int) -> list[Witness]:
    """Return what 1,024 ranks, 8 a pod, say that wait for one: in groups of 8 and 128, and in one of all."""
    row = culprit // 8
    witnesses = []
    for rank in range(1024):
        is_peer = rank // 8 == row
        tp = GroupState(f"tp{rank // 8}", rank_text(range(rank - rank % 8, rank - rank % 8 + 8)), step + 1)
        dp = GroupState(f"dp{rank % 8}", rank_text(range(rank % 8, 1024, 8)), step + 1)
        world = GroupState("all", "0-1023", step + 1)
        if rank == culprit:
            activity, tp, dp, world = (
                LOADS,
                replace(tp, begun=step),
                replace(dp, begun=step),
                replace(world, begun=step),
            )
        elif is_peer:
            activity, tp = WAITS, replace(tp, pending=step + 1, what="all_reduce")
            dp, world = replace(dp, begun=step), replace(world, begun=step)
        else:
            activity, dp = WAITS, replace(dp, pending=step + 1, what="reduce_scatter")
            world = replace(world, begun=step)
        witnesses.append(Witness(rank, f"p{rank // 8}", replace(activity, groups=(tp, dp, world), num_groups=3)))
    return witnesses


# ------------------------------------------------------------------------------------------------ whoever says whatever


def lie(rng: random.Random, rank: int, size: int) -> Activity:
    """Return what a rank may say of its groups, true or not."""
    texts = ("0-65535", f"0-{size - 1}", f"{rank}", "", f"{rank}-{rank + 1}", f"0-{size - 1}:2", "9-1", "x")
    states = tuple(
        GroupState(
            rng.choice(["all", f"tp{rank // 4}", f"dp{rank % 4}", "x" * 64]),
            rng.choice(texts),
            rng.randrange(20),
            rng.choice([-1, 0, 1, rng.randrange(20), 2**53 - 1]),
            rng.choice(["", "all_reduce", "w" * 48]),
            ("all_gather",) * rng.randrange(5),
        )
        for _ in range(rng.randrange(17))
    )
    doing = rng.choice(list(Doing))
    return replace(WAITS, doing=doing, ping_s=rng.choice([-1.0, 62.0]), groups=states, num_groups=rng.randrange(17))


@pytest.mark.parametrize("seed", range(6))
def test_pod_that_lies_of_its_groups_can_make_nobody_else_the_culprit(seed: int) -> None:
    for turn in range(60):
        rng = random.Random(f"{seed} {turn}")
        # The others train: they are in a collective, or in their own code, for a moment.
        witnesses = stops(rng.randrange(16), rng.randrange(12)).witnesses(TP)
        for rank, witness in enumerate(witnesses):
            assert witness.activity is not None
            witnesses[rank] = witness._replace(
                activity=replace(witness.activity, idle_s=rng.random(), ping_s=rng.random())
            )
        liar = rng.randrange(DP)
        for rank in range(liar * TP, liar * TP + TP):
            witnesses[rank] = witnesses[rank]._replace(activity=lie(rng, rank, 16))
        assert {rank // TP for rank in judge(witnesses, SOFT_S).ranks} <= {liar}


@pytest.mark.parametrize("seed", range(6))
def test_rank_that_waits_is_never_named_whatever_one_pod_says(seed: int) -> None:
    for turn in range(60):
        rng = random.Random(f"{seed} {turn}")
        culprit = rng.randrange(16)
        witnesses = stops(culprit, rng.randrange(12)).witnesses(TP)
        liar = rng.choice([pod for pod in range(DP) if pod != culprit // TP])
        for rank in range(liar * TP, liar * TP + TP):
            witnesses[rank] = witnesses[rank]._replace(activity=lie(rng, rank, 16))
        assert {rank for rank in judge(witnesses, SOFT_S).ranks if rank // TP != liar} <= {culprit}


def test_members_that_nobody_has_heard_of_are_not_counted_one_by_one() -> None:
    states = tuple(GroupState(f"g{number}", "0-4194304", 9, 9, "all_reduce") for number in range(16))
    world: dict[int, Activity | None] = dict.fromkeys(range(4096), None)
    world[0] = replace(WAITS, groups=states, num_groups=16)
    waits = find_waits(world)
    assert (waits.roots, waits.complete, waits.unread) == ((), (), ())


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        pytest.param([], "", id="none"),
        pytest.param([3], "3", id="one"),
        pytest.param(range(8), "0-7", id="a run"),
        pytest.param(range(3, 1024, 8), "3-1019:8", id="every eighth"),
        pytest.param([0, 1, 2, 9, 16, 17], "0-2,9,16-17", id="several runs"),
        pytest.param([0, 512], "0-512:512", id="two"),
        pytest.param([7 * n * n for n in range(80)], "", id="too many runs"),
    ],
)
def test_ranks_of_a_group_are_a_short_text(ranks: list[int] | range, text: str) -> None:
    assert rank_text(ranks) == text
    assert [rank for run in rank_runs(text) for rank in run] == (list(ranks) if text else [])


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "3-1", "0-9:0", "-1", "1,,2", "99999999", "0-1:1:1", "4-7,0-3", "0-3,3-5"]
)
def test_text_that_names_no_ranks_names_none(text: str) -> None:
    assert rank_runs(text) == ()
