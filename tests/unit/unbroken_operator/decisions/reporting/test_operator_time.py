"""Where the time of a job went outlives its rendezvous, the operator, and both."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_recovery, running_world

from unbroken_core.protocol.messages import EarlierRun, TimeSpent
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api.schema import structural_schema
from unbroken_operator.api.status_models import Status
from unbroken_operator.decisions.reporting.status import status_patch
from unbroken_operator.decisions.time_spent import NAMES, earlier_time, newest_counted, spent_of, time_of

SPENT = TimeSpent(800.0, 50.0, 20.0, 30.0, 100.0, 0.0, 0.5, 3200.0, 6003.0, 4002.0)


def say(world: World, term: int = 1, **fields: Any) -> None:
    """Let the rendezvous of a term say that the job trains."""
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], term=term, **fields)


def told(seconds: float = 800.0, term: int = 1) -> World:
    """Return a job of which this is stored, as of the first instant of 2026."""
    world = running_world()
    spent = replace(SPENT, progress_s=seconds)
    say(world, term, time=spent, gained_s=seconds, ran_for_s=seconds + 200.5, ettr=0.8)
    world.settle()
    return world


def test_the_status_says_where_the_time_went() -> None:
    time = told().job["status"]["time"]
    assert time == {
        "term": 1,
        "reportedAt": "2026-01-01T00:00:00Z",
        "progressSeconds": 800.0,
        "checkpointSeconds": 0.0,
        "redoSeconds": 50.0,
        "detectSeconds": 20.0,
        "restartSeconds": 30.0,
        "waitingSeconds": 100.0,
        "suspendedSeconds": 0.0,
        "openSeconds": 0.5,
        "progressRankSeconds": 3200.0,
        "heldRankSeconds": 6003.0,
        "wantedRankSeconds": 4002.0,
        "ettrCapacity": pytest.approx(3200 / 4002, abs=1e-4),
        "goodputAllocated": pytest.approx(3200 / 6003, abs=1e-4),
    }
    assert set(time) <= set(structural_schema(Status)["properties"]["time"]["properties"])
    assert set(NAMES.values()) < set(time)
    assert spent_of(time) == SPENT


def test_time_that_passes_is_no_news_for_half_an_hour() -> None:
    world = told()
    before = world.job["status"]
    for now, is_written in (("2026-01-01T00:29:59Z", False), ("2026-01-01T00:30:00Z", True)):
        after = copy.deepcopy(before)
        after["time"] |= {"reportedAt": now, "progressSeconds": 2400.0}
        assert bool(status_patch(before, after)) is is_written


def test_an_operator_without_memory_tells_a_new_rendezvous_what_is_stored() -> None:
    world = told()
    world.now = "2026-01-01T00:05:00Z"
    say(world, term=2)
    earlier = earlier_time(world.snapshot())
    assert earlier == EarlierRun(300.0, 800.0, 1000.5, SPENT)
    # It has a later report itself: that counts.
    known = replace(world.memory, earlier=EarlierRun(1.0, 805.0, 1010.0, None), earlier_term=1)
    assert earlier_time(replace(world.snapshot(), memory=known)) == known.earlier


def test_nobody_tells_a_rendezvous_what_it_has_said_itself() -> None:
    assert earlier_time(told().snapshot()) is None


def test_what_is_stored_stays_until_the_new_rendezvous_knows_of_it() -> None:
    world = told()
    stored = world.job["status"]["time"]
    say(world, term=2, time=TimeSpent(30.0))
    assert world.report is not None
    assert time_of(world.snapshot(), world.report) == stored
    say(world, term=2, time=None)
    assert world.report is not None
    assert time_of(world.snapshot(), world.report) == stored
    say(world, term=2, time=replace(SPENT, progress_s=900.0))
    assert world.report is not None
    found = time_of(world.snapshot(), world.report)
    assert found is not None
    assert (found["term"], found["progressSeconds"]) == (2, 900.0)


@pytest.mark.parametrize(
    ("now", "own_s", "is_known"),
    [
        pytest.param("2026-01-01T00:00:05Z", 30.0, False, id="it counts from a short iteration"),
        pytest.param("2026-01-01T00:29:00Z", 1740.0, False, id="from one that is longer than all that is stored"),
        pytest.param("2026-01-01T00:29:00Z", 2720.0, True, id="it was told, and its report is some seconds old"),
    ],
)
def test_a_new_rendezvous_that_counts_from_its_own_beginning_does_not_reset_ettr(
    now: str, own_s: float, is_known: bool
) -> None:
    world = told()
    world.now = now
    say(world, term=2, time=TimeSpent(own_s), gained_s=own_s, ran_for_s=own_s, ettr=1.0)
    world.settle()
    status = world.job["status"]
    assert (status["ettr"], status["time"]["term"]) == ((1.0, 2) if is_known else (0.8, 1))


def test_what_a_rendezvous_was_told_once_it_knows_for_good() -> None:
    world = told()
    say(world, term=2, time=replace(SPENT, progress_s=900.0), ettr=0.82)
    world.settle()
    # It has ended: its time stands still.
    world.now = "2026-01-01T02:00:00Z"
    say(world, term=2, time=replace(SPENT, progress_s=900.0), ettr=0.9)
    world.settle()
    assert world.job["status"]["ettr"] == 0.9


def test_a_suspension_is_told_as_such() -> None:
    world = told()
    world.job["status"] |= {"endedTerm": 1, "startTime": "2026-01-01T02:00:00Z"}
    world.now = "2026-01-01T02:01:00Z"
    say(world, term=2)
    earlier = earlier_time(world.snapshot())
    assert earlier is not None
    assert (earlier.ago_s, earlier.suspended_s) == (7260.0, 7200.0)


def test_an_account_of_another_release_with_fewer_fields_is_read() -> None:
    assert spent_of({"progressSeconds": 5, "lunchSeconds": 3}) == TimeSpent(5.0)


def test_the_push_to_a_new_rendezvous_carries_it() -> None:
    world = told()
    world.now = "2026-01-01T00:05:00Z"
    say(world, term=2)
    world.settle()
    pushed = [observation for _uid, term, observation in world.pushed if term == 2]
    assert pushed
    assert pushed[-1].earlier is not None
    assert pushed[-1].earlier.time == SPENT


def test_a_new_rendezvous_is_told_which_recoveries_of_others_are_counted() -> None:
    world = told()
    say(world, recoveries=(a_recovery(number=1), a_recovery(number=2), a_recovery(number=3, ended_at="")))
    world.settle()
    assert newest_counted(world.snapshot()) == (0, 0), "its own"
    say(world, term=2)
    world.settle()
    pushed = [observation for _uid, term, observation in world.pushed if term == 2]
    assert pushed[-1].counted == (1, 2)
    # The third one, which the first rendezvous did not live to finish, is in what the second one tells.
    say(world, term=2, recoveries=(a_recovery(number=1, started_at="2026-01-01T00:09:00Z"),))
    world.settle()
    assert [(item["term"], item["number"]) for item in world.job["status"]["history"]] == [(1, 1), (1, 2), (2, 1)]
