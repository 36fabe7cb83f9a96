"""Rounds of torchrun's nodes: who is in the next one, when it begins, who is called, and what ends a run."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_core.torchrun_rounds.rounds_fleet import LIMITS, Fleet

from unbroken_core.torchrun_rounds.messages import Departure, EndOfRounds, Intent, NodeReport, Stage
from unbroken_core.torchrun_rounds.rounds import KEEP_S, RunRounds
from unbroken_core.vocabulary.errors import WireError


def _stage(fleet: Fleet, name: str) -> Stage:
    standing = fleet.members[name].standing
    assert standing is not None
    return standing.stage


def _of(minimum: int, maximum: int) -> Fleet:
    return Fleet(replace(LIMITS, min_nodes=minimum, max_nodes=maximum))


# ---------------------------------------------------------------------------------------------------------- first round


def test_round_begins_at_once_when_all_nodes_that_it_may_have_are_here() -> None:
    """3.12: count == max."""
    fleet = _of(2, 3)
    fleet.add("b", "a")
    assert not fleet.begun
    fleet.add("c")
    assert fleet.begun == {0: {0: "a", 1: "b", 2: "c"}}


def test_enough_nodes_wait_for_more_until_the_last_call_is_over() -> None:
    """3.26."""
    fleet = _of(2, 4)
    fleet.add("a", "b")
    fleet.pass_time(29.9)
    assert not fleet.begun
    fleet.pass_time(0.2)
    assert fleet.world() == ["a", "b"]


def test_last_call_begins_anew_when_the_nodes_were_too_few_meanwhile() -> None:
    """3.6."""
    fleet = _of(2, 4)
    fleet.add("a", "b")
    fleet.pass_time(20.0)
    fleet.kill("b")
    fleet.pass_time(5.0)
    fleet.add("c")
    fleet.pass_time(29.0)
    assert not fleet.begun
    fleet.pass_time(2.0)
    assert fleet.world() == ["a", "c"]


def test_first_ranks_follow_the_names_as_a_person_counts() -> None:
    """3.38: node-10 comes after node-2."""
    fleet = _of(3, 3)
    fleet.add("node-10", "node-2", "node-1")
    assert fleet.world() == ["node-1", "node-2", "node-10"]


def test_nodes_of_one_domain_have_ranks_beside_each_other() -> None:
    fleet = _of(4, 4)
    for name, domain in {"a": "r1", "b": "r2", "c": "r1", "d": "r2"}.items():
        fleet.add(name, domains=("row", domain))
    assert fleet.world() == ["a", "c", "b", "d"]


# ---------------------------------------------------------------------------------------------------------- next rounds


def test_node_that_comes_to_the_next_round_calls_the_others_at_once() -> None:
    """3.34: no keep-alive has to be missed, no time has to pass."""
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.members["b"].is_obedient = False
    fleet.join("a")
    standing = fleet.members["b"].standing
    assert standing is not None
    assert standing.num_waiting == 1
    fleet.join("b")
    assert fleet.begun[1] == {0: "a", 1: "b"}


def test_round_after_a_loss_begins_as_soon_as_all_who_are_left_have_come() -> None:
    """1.24 and 3.40: a lost node is reason enough for another round, and nobody waits for a last call."""
    fleet = _of(2, 3)
    fleet.add("a", "b", "c")
    fleet.kill("a")
    assert fleet.world() == ["a", "b", "c"]
    fleet.pass_time(LIMITS.reconnect_s)
    assert fleet.world() == ["b", "c"]
    assert fleet.runners() == {"b", "c"}


def test_silent_node_is_lost_after_the_heartbeat_timeout() -> None:
    """3.36 and 3.41: measured on one clock alone, that of the rendezvous."""
    fleet = _of(1, 2)
    fleet.add("a", "b")
    fleet.pass_time(14.9, silent=("b",))
    assert fleet.world() == ["a", "b"]
    fleet.pass_time(0.2, silent=("b",))
    assert fleet.world() == ["a"]


def test_survivors_that_are_too_few_wait_for_a_replacement_which_takes_the_lost_rank() -> None:
    fleet = _of(3, 3)
    fleet.add("a", "b", "c")
    fleet.kill("b")
    fleet.pass_time(60.0)
    assert fleet.world() == ["a", "b", "c"]
    assert _stage(fleet, "a") is Stage.WAITING
    fleet.add("d")
    assert fleet.world() == ["a", "d", "c"]


def test_node_that_is_back_in_time_interrupts_nobody() -> None:
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.disconnect("b")
    fleet.pass_time(1.9)
    fleet.connect("b")
    fleet.pass_time(30.0)
    assert list(fleet.begun) == [0]
    assert fleet.runners() == {"a", "b"}


def test_newcomers_are_gathered_while_the_round_runs_on() -> None:
    """3.25: capacity; the training does not stand still during the last call."""
    fleet = _of(1, 4)
    fleet.add("a")
    fleet.pass_time(31.0)
    fleet.add("b")
    fleet.pass_time(20.0)
    fleet.add("c")
    assert fleet.runners() == {"a"}
    fleet.pass_time(10.1)
    assert fleet.world() == ["a", "b", "c"]


def test_newcomers_that_fill_all_places_are_taken_in_at_once() -> None:
    fleet = _of(1, 2)
    fleet.add("a")
    fleet.pass_time(31.0)
    fleet.add("b")
    assert fleet.world() == ["a", "b"]


def test_spare_waits_without_an_end_and_takes_the_place_of_a_lost_node() -> None:
    """3.22."""
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.add("c")
    assert _stage(fleet, "c") is Stage.SPARE
    fleet.pass_time(5000.0)
    fleet.kill("a")
    fleet.pass_time(LIMITS.reconnect_s)
    assert fleet.world() == ["c", "b"]


def test_node_that_takes_long_to_stop_its_workers_is_waited_for_and_then_left_behind() -> None:
    fleet = _of(1, 2)
    fleet.add("a", "b")
    fleet.members["b"].is_obedient = False
    fleet.join("a")
    fleet.pass_time(LIMITS.leave_s - 0.1)
    assert fleet.world() == ["a", "b"]
    fleet.pass_time(0.2)
    assert fleet.world() == ["a"]
    standing = fleet.members["b"].standing
    assert standing is not None
    assert (standing.round, standing.num_waiting) == (1, 1)
    fleet.join("b")
    assert fleet.runners() == {"a", "b"}


# ---------------------------------------------------------------------------------------------------------- start


def test_round_that_loses_a_node_before_it_runs_forms_again_without_it() -> None:
    fleet = _of(2, 3)
    fleet.add("a", "b")
    fleet.members["a"].can_open = False
    fleet.add("c")
    assert _stage(fleet, "b") is Stage.STARTING
    fleet.kill("a")
    fleet.pass_time(1.0 + LIMITS.last_call_s)
    assert fleet.world() == ["b", "c"]
    assert min(fleet.begun) > 0, "the number of the round that was given up is not used again"


@pytest.mark.parametrize(
    ("name", "inability", "complaint", "others"),
    [
        pytest.param("a", "can_open", "want the store of a open within 60 s", ["b", "c"], id="opens no store"),
        pytest.param("b", "can_connect", "store of a at 10.0.1.1:4000", ["a", "c"], id="does not reach it"),
    ],
)
def test_node_that_keeps_a_round_from_starting_is_turned_out_alone(
    name: str, inability: str, complaint: str, others: list[str]
) -> None:
    fleet = _of(2, 3)
    fleet.add("a", "b")
    setattr(fleet.members[name], inability, False)
    fleet.add("c")
    fleet.pass_time(LIMITS.start_s + LIMITS.last_call_s + 1)
    assert complaint in fleet.members[name].rejected
    assert fleet.world() == others


def test_node_whose_store_nobody_reaches_is_turned_out_instead_of_the_others() -> None:
    fleet = _of(2, 3)
    fleet.is_store_reachable = False
    fleet.add("a", "b", "c")
    fleet.pass_time(LIMITS.start_s + 1)
    assert "2 of 2 nodes do not reach the store of a" in fleet.members["a"].rejected
    assert not fleet.members["b"].rejected


# --------------------------------------------------------------------------------------------------------------- ends


def test_nodes_that_finish_disturb_nobody_and_the_one_with_the_store_stays_for_the_others() -> None:
    """1.20 and 3.35."""
    fleet = _of(3, 3)
    fleet.add("a", "b", "c")
    fleet.leave("a")
    assert _stage(fleet, "a") is Stage.RUNNING
    fleet.leave("b")
    assert _stage(fleet, "b") is Stage.LEFT
    assert fleet.runners() == {"c"}
    fleet.leave("c")
    assert _stage(fleet, "a") is Stage.LEFT


def test_spare_is_released_when_a_node_has_finished_and_later_ones_are_turned_away() -> None:
    """3.21: graceful for whoever has waited, closed for the others."""
    fleet = _of(2, 2)
    fleet.add("a", "b", "spare")
    fleet.leave("b")
    assert fleet.end_of("spare") is EndOfRounds.RELEASED
    fleet.add("late")
    assert fleet.end_of("late") is EndOfRounds.CLOSED
    assert fleet.end_of("a") is EndOfRounds.NO


def test_node_that_fails_after_another_has_finished_goes_on_while_there_are_enough() -> None:
    """1.25: nobody's end dooms the others."""
    fleet = _of(1, 2)
    fleet.add("a", "b")
    fleet.leave("b")
    fleet.join("a")
    assert fleet.world() == ["a"]


def test_node_that_fails_after_another_has_finished_is_told_at_once_that_they_are_too_few() -> None:
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.leave("b")
    fleet.join("a")
    assert fleet.end_of("a") is EndOfRounds.CLOSED


def test_node_that_gives_up_leaves_the_others_to_go_on_where_they_are_enough() -> None:
    """3.45: one node's shutdown does not close the run."""
    fleet = _of(2, 3)
    fleet.add("a", "b", "c")
    fleet.leave("c", Departure.FAILED)
    assert fleet.world() == ["a", "b"]


def test_run_is_closed_at_once_when_a_node_gives_up_and_the_others_are_too_few() -> None:
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.leave("b", Departure.FAILED)
    assert fleet.end_of("a") is EndOfRounds.CLOSED


def test_node_that_gives_up_can_close_the_run_for_all() -> None:
    fleet = _of(1, 3)
    fleet.add("a", "b", "c")
    fleet.leave("c", Departure.FAILED, closes=True)
    assert {fleet.end_of(name) for name in "ab"} == {EndOfRounds.CLOSED}


def test_spare_that_goes_disturbs_nobody() -> None:
    """3.45: a node whose time was over before it got a place."""
    fleet = _of(2, 2)
    fleet.add("a", "b", "spare")
    fleet.leave("spare", Departure.GONE)
    assert fleet.runners() == {"a", "b"}
    fleet.add("next")
    assert _stage(fleet, "next") is Stage.SPARE


def test_closing_lets_the_round_run_on_and_nobody_into_another() -> None:
    """3.34: set_closed."""
    fleet = _of(2, 2)
    fleet.add("a", "b")
    fleet.say("a", closes=True)
    assert fleet.runners() == {"a", "b"}
    fleet.join("b")
    assert fleet.end_of("b") is EndOfRounds.CLOSED


def test_name_of_a_run_that_has_ended_is_free_again_after_a_while() -> None:
    """3.45: closing is not for ever."""
    fleet = _of(1, 1)
    fleet.add("a")
    fleet.leave("a")
    fleet.disconnect("a")
    fleet.add("late")
    assert fleet.end_of("late") is EndOfRounds.CLOSED
    fleet.disconnect("late")
    fleet.pass_time(KEEP_S)
    assert not fleet.rounds.is_over(fleet.now_s)
    assert fleet.rounds.is_over(fleet.now_s + LIMITS.reconnect_s)


# ------------------------------------------------------------------------------------------ the rendezvous starts again


def test_new_rendezvous_takes_a_round_over_without_interrupting_it() -> None:
    fleet = _of(2, 4)
    fleet.add("a", "b", "c", "d", "spare")
    fleet.restart_rendezvous()
    for name in ("spare", "c", "a", "d", "b"):
        fleet.connect(name)
    fleet.pass_time(100.0)
    assert list(fleet.begun) == [0]
    assert fleet.runners() == {"a", "b", "c", "d"}
    assert _stage(fleet, "spare") is Stage.SPARE


def test_spare_that_comes_first_to_a_new_rendezvous_does_not_begin_a_second_world() -> None:
    fleet = _of(1, 1)
    fleet.add("a", "spare")
    fleet.restart_rendezvous()
    fleet.connect("spare")
    fleet.pass_time(LIMITS.heartbeat_s - 1)
    assert list(fleet.begun) == [0]
    fleet.connect("a")
    fleet.pass_time(100.0)
    assert list(fleet.begun) == [0]


def test_node_that_does_not_come_back_to_a_new_rendezvous_is_lost() -> None:
    fleet = _of(2, 3)
    fleet.add("a", "b", "c")
    fleet.restart_rendezvous()
    fleet.members["c"].is_dead = True
    for name in "ab":
        fleet.connect(name)
    fleet.pass_time(LIMITS.heartbeat_s - 0.1)
    assert fleet.world() == ["a", "b", "c"]
    fleet.pass_time(1.0)
    assert fleet.world() == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------- bad input


def test_node_with_other_numbers_of_nodes_is_turned_away_with_both() -> None:
    """3.44."""
    fleet = _of(2, 2)
    fleet.add("a")
    fleet.add("b", limits=replace(LIMITS, min_nodes=2, max_nodes=3))
    assert fleet.members["b"].rejected == "nnodes: want 2:2, as the other nodes of this run, got 2:3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"protocol": 2}, "protocol: want 1, got 2", id="another version"),
        pytest.param({"uid": ""}, "uid: want 1 to 64", id="nobody"),
        pytest.param({"name": "n" * 301}, "name: want 1 to 300", id="a long name"),
        pytest.param({"domains": ("d",) * 17}, "domains: want at most 16", id="many domains"),
        pytest.param({"store_port": 70_000}, "store_port: want 0 to 65535", id="no port"),
        pytest.param({"attempt": -1}, "rounds and rank", id="a negative number"),
        pytest.param({"limits": replace(LIMITS, min_nodes=0)}, "nnodes: want 1 <= min", id="no nodes"),
        pytest.param({"limits": replace(LIMITS, heartbeat_s=0.0)}, "heartbeat_s: want more than 0", id="no time"),
    ],
)
def test_report_that_cannot_be_is_refused_and_changes_nothing(change: dict[str, Any], said: str) -> None:
    report = NodeReport(1, "uid", "node", "", (), LIMITS, Intent.JOIN, 1)
    rounds = RunRounds()
    with pytest.raises(WireError, match=said):
        rounds.receive("session", replace(report, **change), ("", ""), 0.0)
    assert rounds.num_nodes == 0
