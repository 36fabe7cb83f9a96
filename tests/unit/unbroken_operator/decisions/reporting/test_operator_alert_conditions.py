"""RestartStorm and NoProgress: when they begin, what they say, what ends them, and what abuses their numbers."""

import copy
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_recovery, running_world

from unbroken_core.protocol.messages import Recovery
from unbroken_core.vocabulary.alert_thresholds import STILL_S, STORM_RECOVERIES, STORM_S
from unbroken_core.vocabulary.reasons import Cause, JobPhase
from unbroken_operator.decisions.snapshot import PlanMemory

START = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
ENOUGH = STORM_RECOVERIES + 1


def at(seconds: float) -> str:
    """Return a time so many seconds after the beginning."""
    return (START + timedelta(seconds=seconds)).isoformat()


def ended(number: int, seconds: float, **fields: Any) -> Recovery:
    return a_recovery(number, started_at=at(seconds - 1), ended_at=at(seconds), **fields)


def say(world: World, now_s: float, *recoveries: Recovery, **fields: Any) -> dict[str, tuple[str, str, str]]:
    """Let the rendezvous report these recoveries; return both conditions, as far as there are any."""
    world.now = at(now_s)
    phase = fields.pop("phase", JobPhase.RUNNING)
    world.rendezvous_says(phase, ["digits-0", "digits-1"], ["digits-2"], recoveries=recoveries, **fields)
    return look(world)


def look(world: World) -> dict[str, tuple[str, str, str]]:
    world.settle()
    return {
        item["type"]: (item["status"], item["reason"], item["message"])
        for item in world.job["status"]["conditions"]
        if item["type"] in ("RestartStorm", "NoProgress")
    }


def restarted(world: World) -> World:
    """Return what another operator finds: what is stored, and no memory or report."""
    world.job = copy.deepcopy(world.job)
    world.memory, world.report, world.report_from, world.is_reachable = PlanMemory(), None, "", False
    return world


def a_storm(number: int = ENOUGH, every_s: float = 10.0) -> list[Recovery]:
    return [ended(index, every_s * index) for index in range(1, number + 1)]


def test_a_storm_is_more_recoveries_than_its_limit_within_its_window() -> None:
    world = running_world()
    assert say(world, 60.0, *a_storm(STORM_RECOVERIES)) == {}, "as many as the limit are none"
    faults = [*a_storm(STORM_RECOVERIES), ended(ENOUGH, 60.0, cause=Cause.POD_LOST)]
    message = "more than 5 recoveries within 15 minutes; of the last ones 5 exception, 1 pod-lost"
    assert say(world, 61.0, *faults) == {"RestartStorm": ("True", "KeepsRecovering", message)}
    assert world.messages("KeepsRecovering") == [message]


@pytest.mark.parametrize("spread_s", [STORM_S - 1, STORM_S + 1])
def test_recoveries_far_enough_apart_are_no_storm(spread_s: int) -> None:
    faults = a_storm(ENOUGH, every_s=spread_s / STORM_RECOVERIES)
    newest_s = spread_s / STORM_RECOVERIES * ENOUGH
    assert ("RestartStorm" in say(running_world(), newest_s, *faults)) == (spread_s < STORM_S)


def test_one_that_has_not_ended_is_not_counted() -> None:
    faults = [*a_storm(STORM_RECOVERIES), a_recovery(ENOUGH, started_at=at(60), ended_at="")]
    assert say(running_world(), 61.0, *faults, phase=JobPhase.INTERRUPTED) == {}


def test_a_storm_passes_by_itself_and_time_alone_writes_nothing() -> None:
    world = running_world()
    say(world, 61.0, *a_storm())
    writes = world.num_status_writes
    world.now = at(300)
    assert look(world)["RestartStorm"][0] == "True"
    assert world.num_status_writes == writes
    world.now = at(STORM_S + 11)
    message = "no more than 5 recoveries within 15 minutes"
    assert look(world) == {"RestartStorm": ("False", "RecoversSeldom", message)}


def test_a_storm_outlives_operators_and_a_new_rendezvous_adds_to_it() -> None:
    world = running_world()
    say(world, 41.0, *a_storm(4))
    assert look(restarted(world)) == {}
    assert say(world, 50.0, ended(1, 45.0), ended(2, 49.0), term=2)["RestartStorm"][0] == "True"
    assert look(restarted(world))["RestartStorm"][0] == "True"
    world.now, world.unheard_for_s = at(STORM_S + 60), 60.0
    assert look(world)["RestartStorm"][0] == "False", "the rendezvous is silent, and time has passed"


@pytest.mark.parametrize("ahead_s", [2 * STORM_S, 10 * 365 * 86_400])
def test_recoveries_in_the_future_are_no_storm(ahead_s: float) -> None:
    assert say(running_world(), 0.0, *[ended(number, ahead_s + number) for number in range(1, 21)]) == {}


def test_clocks_that_differ_by_minutes_delay_a_storm_by_as_much_and_no_more() -> None:
    world = running_world()
    assert say(world, 61.0 - 300.0, *a_storm())["RestartStorm"][0] == "True"
    world.now = at(STORM_S + 61)
    assert look(world)["RestartStorm"][0] == "False"


def test_nothing_new_for_long_is_no_progress_until_something_is() -> None:
    world = running_world()
    assert say(world, 0.0, max_step=120, still_for_s=STILL_S - 1.0) == {}
    message = "no step was reached for the first time in 30 minutes; the newest is 120"
    assert say(world, 1.0, max_step=120, still_for_s=float(STILL_S)) == {"NoProgress": ("True", "StandsStill", message)}
    assert world.messages("StandsStill") == [message]
    writes = world.num_status_writes
    assert say(world, 500.0, max_step=120, still_for_s=STILL_S + 500.0)["NoProgress"][2] == message
    assert world.num_status_writes == writes, "time alone is no news"
    assert say(world, 501.0, max_step=121, still_for_s=0.5)["NoProgress"][:2] == ("False", "GetsOn")


def test_a_script_without_steps_is_told_of_when_it_does_not_train() -> None:
    found = say(running_world(), 0.0, phase=JobPhase.INTERRUPTED, still_for_s=1e9)
    assert found["NoProgress"][2] == "the job has not trained for 30 minutes, although it should"


def test_no_progress_outlives_operators_and_is_unknown_while_the_rendezvous_is() -> None:
    world = running_world()
    say(world, 0.0, max_step=120, still_for_s=STILL_S + 1.0)
    report, sender = world.report, world.report_from
    assert look(restarted(world))["NoProgress"][0] == "True", "stored, until the rendezvous has been asked"
    world.unheard_for_s = 60.0
    assert look(world)["NoProgress"][0] == "Unknown"
    world.report, world.report_from, world.is_reachable, world.unheard_for_s = report, sender, True, 0.0
    assert look(world)["NoProgress"][0] == "True"


def test_both_end_with_the_job_and_with_its_suspension() -> None:
    for end in (JobPhase.COMPLETE, JobPhase.FAILED):
        world = running_world()
        assert len(say(world, 61.0, *a_storm(), max_step=9, still_for_s=STILL_S)) == 2
        found = say(world, 62.0, *a_storm(), phase=end, max_step=9)
        assert {status for status, _reason, _message in found.values()} == {"False"}
    world = running_world()
    say(world, 61.0, *a_storm(), max_step=9, still_for_s=STILL_S)
    world.job["spec"]["suspend"] = True
    assert {item[:2] for item in look(world).values()} == {("False", "Suspended")}
