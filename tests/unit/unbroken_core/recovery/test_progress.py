"""How much of the time was progress, and what was lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken_core.recovery.progress import Progress

MOVES = st.lists(
    st.tuples(st.sampled_from(["run", "stop", "step"]), st.floats(0.0, 100.0), st.integers(0, 5)), max_size=30
)


def test_lost_time_is_what_was_repeated_or_stood_still_times_the_ranks_that_it_cost() -> None:
    progress = Progress()
    progress.run(0.0, world_size=8)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    assert (progress.gained_s(25.0), progress.lost_rank_s(25.0)) == (20.0, 0.0)  # 5 s that may still become a step
    progress.stop(25.0)
    assert progress.lost_rank_s(25.0) == 5.0 * 8
    assert progress.lost_rank_s(30.0) == 10.0 * 8  # stands still
    progress.run(30.0, world_size=4)
    progress.step(2, 46.0)  # loads for 6 s, and does it again
    progress.step(3, 56.0)
    assert progress.lost_rank_s(56.0) == 10.0 * 8 + 16.0 * 4
    assert progress.gained_s(56.0) == 30.0


def test_what_seemed_to_be_progress_before_the_first_step_is_shown_until_there_is_as_much() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1)
    assert progress.gained_s(50.0) == 50.0, "nobody knows that there will be steps"
    progress.step(1, 70.0)
    progress.step(2, 80.0)
    assert progress.gained_s(80.0) == 70.0, "a counter never falls"
    progress.step(9, 150.0)
    assert progress.gained_s(150.0) == 90.0
    assert progress.totals(150.0) == (90.0, 150.0)


def test_without_steps_only_the_time_between_iterations_is_lost() -> None:
    progress = Progress()
    assert (progress.gained_s(5.0), progress.lost_rank_s(5.0)) == (0.0, 0.0)
    progress.run(10.0, world_size=2)
    assert (progress.gained_s(40.0), progress.lost_rank_s(40.0)) == (30.0, 0.0)
    progress.stop(40.0)
    progress.run(45.0, world_size=2)
    assert (progress.gained_s(50.0), progress.lost_rank_s(50.0)) == (35.0, 10.0)


def test_nothing_is_lost_any_more_when_the_job_is_over() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2)
    progress.step(1, 5.0)
    progress.step(2, 10.0)
    progress.stop(11.0)
    progress.end(15.0)
    assert (progress.gained_s(1000.0), progress.lost_rank_s(1000.0)) == (10.0, 10.0)


@given(moves=MOVES)
def test_both_only_rise_and_are_all_of_the_wall_time_in_the_end(moves: list[tuple[str, float, int]]) -> None:
    progress = Progress()
    now_s, gained_s, lost_rank_s, began_s = 0.0, 0.0, 0.0, None
    is_running = False
    for move, seconds, step in moves:
        now_s += seconds
        if move == "run" and not is_running:
            progress.run(now_s, world_size=4)
            is_running = True
            began_s = now_s if began_s is None else began_s
        elif move == "stop":
            progress.stop(now_s)
            is_running = False
        elif move == "step":
            progress.step(step, now_s)
        seen = progress.gained_s(now_s), progress.lost_rank_s(now_s)
        assert seen[0] >= gained_s - 1e-9
        assert seen[1] >= lost_rank_s - 1e-9
        gained_s, lost_rank_s = seen
    progress.end(now_s)
    wall_s = 0.0 if began_s is None else now_s - began_s
    gained_s, ran_for_s = progress.totals(now_s)
    assert (ran_for_s or 0.0) == pytest.approx(wall_s, abs=1e-6)
    assert gained_s + progress.lost_rank_s(now_s) / 4 == pytest.approx(wall_s, abs=1e-6)


def test_a_job_stands_still_from_its_last_new_step_on_whatever_it_repeats() -> None:
    progress = Progress()
    assert progress.still_for_s(50.0) == 0.0, "it has not run"
    progress.run(100.0, world_size=2)
    assert progress.still_for_s(1000.0) == 0.0, "of a script that tells no steps, running is all that there is"
    progress.step(5, 1000.0)
    assert progress.still_for_s(1030.0) == 30.0
    progress.stop(1040.0)
    progress.run(1050.0, world_size=2)
    progress.step(4, 1060.0)
    progress.step(5, 1070.0)
    assert progress.still_for_s(1080.0) == 80.0
    progress.step(6, 1090.0)
    assert progress.still_for_s(1090.0) == 0.0
    progress.end(1100.0)
    assert progress.still_for_s(9999.0) == 0.0


def test_without_steps_a_job_stands_still_between_iterations() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2)
    progress.stop(100.0)
    assert progress.still_for_s(130.0) == 30.0
    progress.run(140.0, world_size=2)
    assert progress.still_for_s(200.0) == 0.0


def test_a_new_coordinator_counts_from_when_it_takes_over() -> None:
    progress = Progress()
    progress.take_over(0.0, 400.0, 500.0, world_size=2)
    assert progress.still_for_s(530.0) == 30.0


@given(MOVES)
def test_it_stands_still_for_no_longer_than_it_has_run_and_for_no_less_than_no_time(
    moves: list[tuple[str, float, int]],
) -> None:
    progress, now_s = Progress(), 0.0
    for move, seconds, step in moves:
        now_s += seconds
        match move:
            case "run":
                progress.run(now_s, world_size=1)
            case "stop":
                progress.stop(now_s)
            case _:
                progress.step(step, now_s)
        assert 0.0 <= progress.still_for_s(now_s) <= now_s


TIMED = st.sampled_from(["run", "stop", "step", "stall", "away", "regain", "give up", "ask"])


@given(st.lists(st.tuples(TIMED, st.floats(0.0, 100.0), st.floats(0.0, 200.0), st.integers(-1, 3)), max_size=30))
def test_what_is_shown_as_progress_never_falls_however_late_it_is_told(
    moves: list[tuple[str, float, float, int]],
) -> None:
    progress, now_s, shown_s, iteration = Progress(), 1000.0, 0.0, 0
    for move, seconds, ago_s, step in moves:
        now_s += seconds
        before_s = progress.gained_s(now_s)
        assert before_s >= shown_s - 1e-9
        match move:
            case "run":
                iteration += 1
                progress.stop(now_s)
                progress.run(now_s, 2, iteration)
            case "stop":
                progress.stop(now_s, now_s - ago_s, is_hang=step > 1)
            case "step":
                progress.step(step, now_s - ago_s, now_s)
            case "stall":
                progress.stall(iteration, ago_s, now_s)
            case "away":
                progress.lose_touch(now_s, now_s - ago_s)
            case "regain":
                progress.regain(step, now_s - ago_s, now_s)
            case "give up":
                progress.give_up(now_s)
        shown_s = progress.gained_s(now_s)
        assert shown_s >= before_s - 1e-9, move


def test_a_first_step_that_is_told_late_takes_nothing_back() -> None:
    progress = Progress()
    progress.run(100.0, world_size=8)
    assert progress.gained_s(130.0) == 30.0
    progress.step(0, 110.0, 130.0)
    assert progress.gained_s(130.0) == 30.0


def test_an_iteration_that_is_given_up_unseen_takes_nothing_back() -> None:
    progress = Progress()
    progress.run(100.0, world_size=8)
    progress.lose_touch(120.0, 110.0)
    assert progress.gained_s(150.0) == 50.0
    progress.give_up(150.0)
    assert progress.gained_s(150.0) == 50.0
