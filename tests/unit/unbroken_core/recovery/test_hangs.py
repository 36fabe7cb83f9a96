"""Who is named for a hang, from what every rank did."""

import random
from dataclasses import replace

import pytest

from unbroken_core.protocol.messages import Activity
from unbroken_core.recovery.hangs import HangVerdict, Witness, judge
from unbroken_core.recovery.history import FaultRecord, Incident
from unbroken_core.vocabulary.reasons import Cause, Doing

SOFT_S = 60.0
WAITS = Activity(0, Doing.COLLECTIVE, "all_reduce", 62.0, 62.0, 40, 1)
BACKWARD = replace(WAITS, doing=Doing.WAITING, what="backward")
LOADS = Activity(0, Doing.OWN_CODE, "train.py:41 load_batch", 60.0, 60.0, 39, 1)
SILENT_WAITS = replace(WAITS, ping_s=-1.0)
SPINS = replace(LOADS, idle_s=0.0, ping_s=-1.0)
FROZEN = replace(LOADS, doing=Doing.FROZEN, what="")
UNKNOWN = replace(LOADS, doing=Doing.UNKNOWN, what="train.py:9 step")


def world(*activities: Activity | None, ranks_per_pod: int = 1) -> list[Witness]:
    return [Witness(rank, f"p{rank // ranks_per_pod}", activity) for rank, activity in enumerate(activities)]


@pytest.mark.parametrize(
    ("activities", "ranks", "text"),
    [
        pytest.param(
            (WAITS, WAITS, LOADS, WAITS),
            (2,),
            "rank 2 hung for 60 s in its own code (train.py:41 load_batch) while ranks 0, 1, 3 waited in all_reduce",
            id="one is in its own code",
        ),
        pytest.param(
            (LOADS, WAITS, WAITS, WAITS),
            (0,),
            "rank 0 hung for 60 s in its own code (train.py:41 load_batch) while ranks 1-3 waited in all_reduce",
            id="rank 0 is",
        ),
        pytest.param(
            (SILENT_WAITS, SPINS, SILENT_WAITS, SILENT_WAITS),
            (1,),
            "no rank pings; rank 1 is not in a collective but in its own code (train.py:41 load_batch) for 62 s "
            "while ranks 0, 2, 3 waited in all_reduce",
            id="nobody pings",
        ),
        pytest.param(
            (WAITS, FROZEN, WAITS, WAITS),
            (1,),
            "rank 1 hung for 60 s without running any thread: stopped, or a thread holds the GIL "
            "while ranks 0, 2, 3 waited in all_reduce",
            id="one is stopped",
        ),
        pytest.param(
            (BACKWARD, replace(LOADS, doing=Doing.DATA_LOADER), BACKWARD, BACKWARD),
            (1,),
            "rank 1 hung for 60 s in a data loader (train.py:41 load_batch) while ranks 0, 2, 3 waited in backward",
            id="one is in a data loader, the others in backward",
        ),
        pytest.param(
            (WAITS, LOADS, FROZEN, WAITS, WAITS),
            (1, 2),
            "rank 1 hung for 60 s in its own code (train.py:41 load_batch), rank 2 hung for 60 s without running any "
            "thread: stopped, or a thread holds the GIL while ranks 0, 3, 4 waited in all_reduce",
            id="two hang",
        ),
        pytest.param((LOADS,), (0,), "rank 0 hung for 60 s in its own code (train.py:41 load_batch)", id="a lone rank"),
        pytest.param(
            (WAITS, None, WAITS, LOADS),
            (3,),
            "rank 3 hung for 60 s in its own code (train.py:41 load_batch) while ranks 0, 2 waited in all_reduce; "
            "rank 1 did not answer",
            id="one does not answer",
        ),
        pytest.param((WAITS, WAITS, WAITS), (), "rank not known: ranks 0-2 in all_reduce", id="all wait alike"),
        pytest.param((BACKWARD, BACKWARD), (), "rank not known: ranks 0, 1 in backward", id="all are in backward"),
        pytest.param(
            (LOADS, LOADS, LOADS, WAITS),
            (),
            "rank not known: ranks 0-2 in their own code (train.py:41 load_batch), rank 3 in all_reduce",
            id="most are in their own code: all wait for the disk",
        ),
        pytest.param(
            (replace(WAITS, idle_s=3.0), LOADS, replace(WAITS, idle_s=3.0)),
            (),
            "rank not known: ranks 0, 2 in all_reduce for a short time, rank 1 in its own code "
            "(train.py:41 load_batch)",
            id="the others have not waited for long",
        ),
        pytest.param(
            (WAITS, replace(LOADS, ping_s=1.0), WAITS),
            (),
            "rank not known: ranks 0, 2 in all_reduce, rank 1 in its own code (train.py:41 load_batch)",
            id="who is outside has just pinged",
        ),
        pytest.param(
            (WAITS, UNKNOWN, WAITS),
            (),
            "rank not known: ranks 0, 2 in all_reduce, rank 1 in a call that may wait for others (train.py:9 step)",
            id="one is blocked in a call that may wait",
        ),
        pytest.param((None, None, None), (), "rank not known: ranks 0-2 did not answer", id="nobody answers"),
        pytest.param(
            (WAITS, replace(WAITS, sequence=39, what="broadcast"), WAITS, WAITS),
            (1,),
            "rank 1 waited in broadcast, collective 39 of the group, while ranks 0, 2, 3 waited in all_reduce, "
            "collective 40 of the group, for 62 s",
            id="one came fewer times",
        ),
        pytest.param(
            (WAITS, replace(WAITS, what="broadcast"), WAITS, WAITS),
            (1,),
            "rank 1 waited in broadcast, collective 40 of the group, while ranks 0, 2, 3 waited in all_reduce, "
            "collective 40 of the group, for 62 s",
            id="one is in another collective",
        ),
        pytest.param(
            tuple(replace(each, num_groups=2) for each in (WAITS, replace(WAITS, sequence=39), WAITS)),
            (),
            "rank not known: ranks 0-2 in all_reduce",
            id="with several groups a number says nothing",
        ),
        pytest.param(
            (WAITS, replace(WAITS, sequence=39)), (), "rank not known: ranks 0, 1 in all_reduce", id="one word each"
        ),
    ],
)
def test_who_is_named(activities: tuple[Activity | None, ...], ranks: tuple[int, ...], text: str) -> None:
    assert judge(world(*activities), SOFT_S) == HangVerdict(ranks, text)


@pytest.mark.parametrize(
    ("activities", "ranks", "text"),
    [
        pytest.param(
            (None, None, LOADS, None),
            (2,),
            "rank 2 hung for 60 s in its own code (train.py:41 load_batch); ranks 0, 1, 3 have returned from the "
            "training function",
            id="the last one hangs",
        ),
        pytest.param(
            (None, WAITS, LOADS, None),
            (2,),
            "rank 2 hung for 60 s in its own code (train.py:41 load_batch) while rank 1 waited in all_reduce; "
            "ranks 0, 3 have returned from the training function",
            id="one waits for it",
        ),
        pytest.param(
            (None, None, WAITS, None),
            (),
            "rank not known: rank 2 in all_reduce; ranks 0, 1, 3 have returned from the training function",
            id="the last one waits for who will not come, or did not hear that it was over",
        ),
        pytest.param(
            (None, LOADS, LOADS, LOADS),
            (),
            "rank not known: ranks 1-3 in their own code (train.py:41 load_batch); rank 0 has returned from the "
            "training function",
            id="most are in their own code",
        ),
    ],
)
def test_who_has_returned_waits_for_all_others(
    activities: tuple[Activity | None, ...], ranks: tuple[int, ...], text: str
) -> None:
    ranks_left = [each._replace(has_returned=each.activity is None) for each in world(*activities)]
    assert judge(ranks_left, SOFT_S) == HangVerdict(ranks, text)


def test_rank_that_never_pinged_hung_for_as_long_as_others_have_waited_for_it() -> None:
    # It wakes now and then, so its own main thread tells nothing.
    said = judge(world(WAITS, WAITS, replace(SPINS, idle_s=1.0), WAITS), SOFT_S)
    assert said.ranks == (2,)
    assert said.text.startswith("rank 2 hung for 62 s in its own code")


def test_ranks_that_stood_after_a_step_name_who_did_not_come_although_they_wait_for_a_short_time_only() -> None:
    soon, short = replace(WAITS, idle_s=20.0, ping_s=20.0), replace(WAITS, idle_s=9.0, ping_s=9.0)
    assert judge(world(soon, soon, LOADS, soon), SOFT_S, free_s=20.0) == HangVerdict(
        (2,), "rank 2 hung for 60 s in its own code (train.py:41 load_batch) while ranks 0, 1, 3 waited in all_reduce"
    )
    assert judge(world(soon, soon, LOADS, soon), SOFT_S).ranks == ()
    assert judge(world(short, short, LOADS, short), SOFT_S, free_s=20.0).ranks == ()
    for busy in (SPINS, replace(LOADS, ping_s=20.0)):
        assert judge(world(soon, soon, busy, soon), SOFT_S, free_s=20.0).ranks == (), "it may be on its way"


def test_rank_of_a_pod_is_named_only_while_most_other_pods_wait() -> None:
    # Four ranks a pod: the peers of the one that hangs are in its own pod, and say nothing of others.
    crowd = world(LOADS, WAITS, WAITS, WAITS, *[UNKNOWN] * 8, ranks_per_pod=4)
    assert judge(crowd, SOFT_S).ranks == ()
    crowd[4] = crowd[4]._replace(activity=WAITS)
    assert judge(crowd, SOFT_S).ranks == ()
    crowd[8] = crowd[8]._replace(activity=WAITS)
    assert judge(crowd, SOFT_S).ranks == (0,)


LIES = (
    WAITS,
    LOADS,
    SPINS,
    FROZEN,
    UNKNOWN,
    BACKWARD,
    None,
    replace(WAITS, sequence=7),
    replace(WAITS, what="x" * 100),
)


@pytest.mark.parametrize("seed", range(6))
def test_pod_that_lies_can_make_nobody_else_the_culprit(seed: int) -> None:
    for turn in range(200):
        try_to_accuse_those_who_train(random.Random(f"{seed} {turn}"))


def try_to_accuse_those_who_train(rng: random.Random) -> None:
    num_pods = rng.randint(2, 6)
    liar = rng.randrange(num_pods)
    # The others train: none of them waits, or is busy, for long.
    honest = [replace(WAITS, idle_s=rng.random()), replace(LOADS, idle_s=0.1, ping_s=rng.choice([-1.0, 0.1])), None]
    ranks = [Witness(rank, f"p{rank // 2}", rng.choice(honest)) for rank in range(2 * num_pods)]
    for rank in (2 * liar, 2 * liar + 1):
        ranks[rank] = ranks[rank]._replace(activity=rng.choice(LIES))
    assert set(judge(ranks, SOFT_S).ranks) <= {2 * liar, 2 * liar + 1} or num_pods == 2


@pytest.mark.parametrize("seed", range(6))
def test_honest_waiter_is_never_named_whatever_one_pod_says(seed: int) -> None:
    for turn in range(200):
        try_to_accuse_those_who_wait(random.Random(f"{seed} {turn}"))


def try_to_accuse_those_who_wait(rng: random.Random) -> None:
    num_pods = rng.randint(3, 6)
    liar, hung = rng.sample(range(num_pods), 2)
    ranks = [Witness(rank, f"p{rank}", WAITS) for rank in range(num_pods)]
    ranks[hung] = ranks[hung]._replace(activity=rng.choice((LOADS, SPINS, FROZEN)))
    ranks[liar] = ranks[liar]._replace(activity=rng.choice(LIES))
    assert set(judge(ranks, SOFT_S).ranks) <= {liar, hung}


def test_sentence_is_bounded_however_many_ranks_say_whatever() -> None:
    odd = [replace(LOADS, what=f"{rank}" * 20) for rank in range(3000)]
    many = [activity for each in odd for activity in (each, WAITS, WAITS)]
    text = judge(world(*many), SOFT_S).text
    assert len(text) < 4000
    assert text.count("hung for") == 8


# ------------------------------------------------------------------------------------------------- what a recovery says

HANG = FaultRecord(Cause.SOFT_TIMEOUT, "waits", 0, at_s=10.0, detect_s=62.0, is_hang=True, rank=0, pod="a", node="n")
NAMED = FaultRecord(Cause.SOFT_TIMEOUT, "hangs", 1, at_s=10.0, detect_s=62.0, is_hang=True, detail="rank 1 hung")


def incident(*faults: FaultRecord) -> Incident:
    found = Incident(1, 72.0, 0, 2)
    for fault in faults:
        found.add(fault)
    return found


def test_nobody_is_named_by_the_reports_of_a_hang() -> None:
    found = incident(HANG, replace(HANG, pod_uid="other", at_s=1.0, detect_s=71.0, is_certain=True))
    assert (found.culprit.pod_uid, found.culprit.rank, found.culprit.node) == ("", None, "")
    assert found.culprit.detail == "no progress for 62 s; asks all ranks what they do"


def test_verdict_names_the_culprit_and_later_reports_change_nothing() -> None:
    found = incident(HANG)
    found.name(NAMED)
    found.add(replace(HANG, pod_uid="late", at_s=0.0, detect_s=99.0, is_certain=True))
    assert found.culprit == NAMED


def test_verdict_with_more_answers_counts_but_none_of_a_later_iteration() -> None:
    found = incident(HANG)
    found.name(NAMED)
    found.name(better := replace(NAMED, pod_uid="better"))
    assert found.culprit == better
    found.num_plans += 1
    found.name(NAMED)
    assert found.culprit == better


def test_stronger_cause_than_a_hang_names_its_own_culprit() -> None:
    dead = FaultRecord(Cause.PROCESS_SIGNAL, "dead", 0, at_s=80.0)
    found = incident(HANG, dead)
    found.name(NAMED)
    assert found.culprit == dead


def test_hard_timeout_of_the_rank_that_hangs_keeps_the_evidence_of_the_hang() -> None:
    hard = replace(NAMED, cause=Cause.HARD_TIMEOUT, detail="did not leave", is_hang=False, stack=("a.py:1 in f",))
    found = incident(HANG, hard)
    found.name(NAMED)
    assert found.culprit == replace(hard, detail="rank 1 hung; did not leave")


@pytest.mark.parametrize(
    ("verdict", "waited", "named"),
    [
        pytest.param(NAMED, True, "hangs", id="one that waited could not be interrupted either"),
        pytest.param(NAMED, False, "hangs", id="nor could one of which nothing is known"),
        pytest.param(replace(NAMED, pod_uid=""), True, "", id="nobody is known, and one that waited cannot leave"),
        pytest.param(replace(NAMED, pod_uid=""), False, "stuck", id="nobody is known, and only one cannot leave"),
    ],
)
def test_who_could_not_be_interrupted_is_no_culprit_for_that(verdict: FaultRecord, waited: bool, named: str) -> None:
    stuck = FaultRecord(Cause.HARD_TIMEOUT, "stuck", 0, at_s=80.0, waited=waited)
    found = incident(HANG, stuck)
    found.name(verdict)
    assert found.culprit.pod_uid == named


@pytest.mark.parametrize("cause", [Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT])
def test_a_move_to_a_new_template_that_a_hang_cut_short_does_not_hide_the_hang(cause: Cause) -> None:
    leaving = FaultRecord(Cause.POD_LEAVING, "old", None, 100.0, detail="it was made from an earlier template")
    found = incident(HANG, leaving, replace(HANG, cause=cause))
    assert found.culprit.cause is cause
    verdict = replace(HANG, detail="rank 0 hung for 62 s in its own code")
    found.name(verdict)
    assert (found.culprit.cause, found.culprit.rank) == (cause, 0)
    assert "hung for 62 s in its own code" in found.culprit.detail
    assert incident(leaving, replace(leaving, cause=Cause.EXCEPTION)).culprit == leaving, "a consequence of the move"
