"""Where the time of a job went: each stretch is in one term, under several coordinators, too."""

from collections.abc import Callable
from dataclasses import astuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unbroken_core.protocol.messages import EarlierRun, TimeSpent
from unbroken_core.recovery.account import ratios, terms, wall_of
from unbroken_core.recovery.progress import Progress
from unbroken_core.vocabulary.reasons import Spent


def spent(progress: Progress, now_s: float) -> TimeSpent:
    """Return the account, which is there."""
    found = progress.account.spent(now_s)
    assert found is not None
    return found


def four_of_six(progress: Progress, now_s: float, term: Spent | None) -> None:
    """Let the coordinator say what it does: 4 of 4 wanted ranks, 6 held."""
    progress.account.look(now_s, term, held=6, wanted=4)


def test_each_stretch_is_in_the_term_that_it_was_for() -> None:
    progress = Progress()
    four_of_six(progress, 0.0, Spent.WAITING)
    assert progress.account.spent(5.0) is None, "it has not run yet"
    progress.run(10.0, world_size=4)
    four_of_six(progress, 10.0, None)
    progress.step(1, 20.0)
    progress.step(2, 30.0)
    progress.stop(100.0, fault_s=37.0)  # a hang that was noticed after 63 s
    four_of_six(progress, 100.0, Spent.RESTART)
    four_of_six(progress, 101.0, Spent.WAITING)
    four_of_six(progress, 161.0, Spent.RESTART)
    progress.run(163.0, world_size=4)
    four_of_six(progress, 163.0, None)
    progress.step(2, 177.0)  # of which 4 s to load
    progress.step(3, 187.0)
    found = spent(progress, 190.0)
    assert terms(found) == pytest.approx(
        {
            "progress": 20.0 + 10.0,
            "checkpoint": 0.0,
            "redo": 7.0 + 10.0,
            "detect": 63.0,
            "restart": 1.0 + 2.0 + 4.0,
            "waiting": 60.0,
            "suspended": 0.0,
            "open": 3.0,
        },
        abs=1e-9,
    )
    assert (found.progress_rank_s, found.held_rank_s) == pytest.approx((30.0 * 4, 180.0 * 6))
    assert ratios(found) == pytest.approx(
        {"ettr": 30 / 180, "ettr_capacity": 30 / 180, "goodput_allocated": 30 * 4 / (180 * 6)}
    )


def test_what_comes_before_the_first_step_of_an_iteration_is_a_part_of_the_restart() -> None:
    """Seen before: with a checkpoint after each step, a minute of loading it counted as progress."""
    progress = Progress()
    progress.run(0.0, world_size=4, iteration=0)
    for step in range(1, 5):
        progress.step(step, 10.0 * step)
    progress.stop(45.0)
    progress.run(50.0, world_size=4, iteration=1)
    progress.step(5, 120.0)
    progress.step(6, 130.0)
    found = spent(progress, 130.0)
    assert (found.progress_s, found.redo_s, found.restart_s) == pytest.approx((40.0 + 20.0, 5.0, 5.0 + 60.0))
    assert progress.gained_s(130.0) == pytest.approx(60.0)
    assert progress.lost_rank_s(130.0) == pytest.approx(4 * 70.0)


def test_a_first_report_cannot_have_taken_less_time_than_a_step_takes() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stop(20.0)
    progress.run(30.0, world_size=1, iteration=1)
    progress.step(3, 34.0)
    found = spent(progress, 34.0)
    assert (found.progress_s, found.restart_s) == pytest.approx((24.0, 10.0))


def test_the_second_report_says_how_long_the_first_step_took_where_none_was_known() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.step(501, 70.0)
    found = spent(progress, 72.0)
    assert (found.progress_s, found.restart_s, found.open_s) == (0.0, 0.0, 72.0), "nobody knows yet"
    progress.stall(0, 3.0, 83.0)  # told after the first step: of the time after it
    progress.step(502, 83.0)
    found = spent(progress, 83.0)
    assert (found.progress_s, found.restart_s, found.checkpoint_s) == pytest.approx((20.0, 60.0, 3.0))
    assert found.progress_rank_s == pytest.approx(2 * 20.0)


def test_nobody_can_say_that_a_first_step_trained_where_no_second_one_ever_came() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1)
    progress.step(1, 70.0)
    progress.stop(75.0)
    found = spent(progress, 80.0)
    assert (found.progress_s, found.restart_s, found.redo_s) == (0.0, 70.0 + 5.0, 5.0)


def test_a_checkpoint_that_is_loaded_where_it_is_told_is_a_checkpoint() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stop(20.0)
    progress.run(20.0, world_size=1, iteration=1)
    progress.stall(1, 40.0, 75.0)
    progress.step(3, 75.0)
    found = spent(progress, 75.0)
    assert (found.progress_s, found.checkpoint_s, found.restart_s) == pytest.approx((30.0, 40.0, 5.0))


def test_a_fault_before_the_first_step_makes_the_time_until_it_a_part_of_the_restart() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stop(20.0)
    progress.run(25.0, world_size=1, iteration=1)
    progress.stop(60.0, fault_s=55.0)
    found = spent(progress, 60.0)
    assert (found.restart_s, found.redo_s, found.detect_s) == (5.0 + 30.0, 0.0, 5.0)


def test_iterations_without_a_step_were_getting_ready_once_another_one_has_steps() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.stop(60.0)
    assert spent(progress, 60.0).progress_s == 60.0, "nobody knows that there will be steps"
    progress.run(65.0, world_size=2, iteration=1)
    progress.step(1, 135.0)
    progress.step(2, 145.0)
    found = spent(progress, 145.0)
    assert (found.progress_s, found.restart_s) == pytest.approx((20.0, 60.0 + 5.0 + 60.0))
    assert found.progress_rank_s == pytest.approx(40.0)
    assert progress.totals(145.0) == pytest.approx((20.0, 145.0))
    assert progress.lost_rank_s(145.0) == pytest.approx(2 * 125.0)


def test_all_new_steps_of_a_first_report_count_each_as_long_as_one_takes() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stop(20.0)
    progress.run(20.0, world_size=1, iteration=1)
    progress.step(5, 100.0)  # told late
    assert spent(progress, 100.0).progress_s == pytest.approx(20.0 + 30.0)


def test_an_iteration_that_is_taken_over_after_its_first_step_does_not_load_any_more() -> None:
    progress = Progress()
    progress.adopt(7, 500)
    progress.take_over(0.0, 100.0, 100.0, world_size=2)
    progress.run(100.0, world_size=2, iteration=7)
    progress.step(530, 130.0)
    progress.step(540, 140.0)
    progress.stop(140.0)
    progress.run(150.0, world_size=2, iteration=8)
    progress.step(541, 171.0)
    found = spent(progress, 171.0)
    assert (found.progress_s, found.restart_s) == pytest.approx((141.0, 10.0 + 20.0))


def test_a_job_whose_first_step_is_learned_when_it_is_found_again_was_getting_ready_before() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.stop(60.0)  # out of touch
    progress.adopt(1, 3)
    progress.run(70.0, world_size=2, iteration=1)
    progress.step(5, 80.0)
    found = spent(progress, 80.0)
    assert (found.progress_s, found.restart_s) == (10.0, 70.0)
    assert progress.totals(80.0) == (10.0, 80.0)


def test_a_step_that_hangs_is_detected_from_when_it_should_have_been_over() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    for step in range(1, 4):
        progress.step(step, 10.0 * step)
    progress.stop(130.0, fault_s=30.0, is_hang=True)
    found = spent(progress, 130.0)
    assert (found.progress_s, found.redo_s, found.detect_s) == pytest.approx((30.0, 10.0, 90.0))


def test_what_stamps_say_of_a_hang_counts_where_it_is_later_than_the_step() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stop(130.0, fault_s=70.0, is_hang=True)  # it validated for 50 s before it hung
    found = spent(progress, 130.0)
    assert (found.redo_s, found.detect_s) == pytest.approx((50.0, 60.0))


def test_the_pace_is_the_median_of_the_last_reports() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    now_s = 0.0
    for step in range(1, 60):
        now_s += 300.0 if step % 5 == 0 else 2.0  # an evaluation after each fifth step
        progress.step(step, now_s)
    progress.stop(now_s)
    progress.run(now_s, world_size=1, iteration=1)
    progress.step(60, now_s + 32.0)
    assert spent(progress, now_s + 32.0).restart_s == pytest.approx(30.0)


def test_of_a_stretch_that_ends_with_a_new_step_the_share_of_steps_that_were_there_is_done_again() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2)
    progress.step(1, 1.0)
    progress.step(20, 20.0)
    progress.stop(20.0)
    progress.run(30.0, world_size=2)
    progress.step(1, 31.0)  # The first step is told at once, others with heartbeats.
    progress.step(25, 55.0)
    found = spent(progress, 55.0)
    assert (found.progress_s, found.redo_s, found.restart_s) == pytest.approx((25.0, 20.0, 10.0))
    assert progress.gained_s(55.0) == pytest.approx(25.0)
    assert progress.lost_rank_s(55.0) == pytest.approx(2 * 30.0)


def test_a_checkpoint_between_two_steps_is_no_progress_and_the_longest_counts() -> None:
    progress = Progress()
    progress.run(0.0, world_size=4, iteration=3)
    progress.step(1, 10.0)
    progress.stall(3, 4.0, 24.0)
    progress.stall(3, 3.0, 24.0)  # another pod waited for less
    progress.step(2, 24.0)
    progress.stall(3, 9.0, 30.0)  # told after the step: of the stretch that begins with it
    assert spent(progress, 34.0).open_s == pytest.approx(10.0)
    progress.step(3, 44.0)
    found = spent(progress, 44.0)
    assert (found.progress_s, found.checkpoint_s, found.redo_s) == pytest.approx((35.0, 9.0, 0.0))
    assert found.progress_rank_s == pytest.approx(35.0 * 4)
    assert progress.gained_s(44.0) == pytest.approx(35.0)
    assert progress.lost_rank_s(44.0) == pytest.approx(9.0 * 4)
    assert progress.ettr(44.0) == pytest.approx(35 / 44)


def test_a_checkpoint_before_a_fault_and_one_of_steps_that_are_made_again_are_checkpoints() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(4, 40.0)
    progress.stall(0, 5.0, 48.0)
    progress.stop(50.0, fault_s=47.0)
    progress.run(60.0, world_size=1, iteration=1)
    progress.step(1, 61.0)
    progress.stall(1, 2.0, 65.0)
    progress.step(3, 65.0)
    found = spent(progress, 65.0)
    assert (found.progress_s, found.checkpoint_s, found.redo_s) == pytest.approx((40.0, 7.0, 2.0 + 1.0 + 2.0))


def test_a_checkpoint_counts_without_steps_too() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.stall(0, 5.0, 30.0)
    found = spent(progress, 40.0)
    assert (found.progress_s, found.checkpoint_s) == pytest.approx((35.0, 5.0))
    assert [progress.gained_s(now_s) for now_s in (31.0, 34.0, 40.0)] == [30.0, 30.0, 35.0], "a counter never falls"
    progress.stop(50.0)
    found = spent(progress, 50.0)
    assert (found.progress_s, found.checkpoint_s, found.progress_rank_s) == pytest.approx((45.0, 5.0, 90.0))


def test_workers_cannot_have_stood_still_for_longer_than_they_ran() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.stall(0, 1e9, 30.0)
    progress.step(3, 30.0)
    progress.step(4, 80.0)
    found = spent(progress, 80.0)
    assert (found.checkpoint_s, found.progress_s) == pytest.approx((30.0, 50.0))


def test_checkpoints_of_another_iteration_and_from_before_all_ran_do_not_count() -> None:
    progress = Progress()
    progress.stall(2, 30.0, 5.0)
    progress.run(10.0, world_size=1, iteration=2)
    progress.stall(1, 90.0, 50.0)
    progress.stall(9, 90.0, 50.0)
    progress.stall(2, 31.0, 50.0)
    progress.step(1, 50.0)
    progress.stop(50.0)
    progress.run(60.0, world_size=1, iteration=3)
    progress.stall(2, 45.0, 70.0)
    progress.step(2, 70.0)
    assert spent(progress, 70.0).checkpoint_s == pytest.approx(1.0)


def test_a_world_that_has_shrunk_counts_less() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2)
    four_of_six(progress, 0.0, None)
    progress.step(1, 5.0)
    progress.step(2, 10.0)
    found = ratios(spent(progress, 10.0))
    assert found["ettr"] == 1.0
    assert found["ettr_capacity"] < 1.0


def test_without_steps_all_running_time_is_progress_until_it_stops() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1)
    assert spent(progress, 25.0).progress_s == 25.0
    progress.stop(40.0, fault_s=30.0)
    assert spent(progress, 50.0) == TimeSpent(
        30.0, detect_s=10.0, restart_s=10.0, progress_rank_s=30.0, held_rank_s=50.0, wanted_rank_s=50.0
    )
    assert progress.totals(50.0) == (30.0, 50.0)
    assert (progress.gained_s(50.0), progress.lost_rank_s(50.0)) == (40.0, 20.0), "it was shown already"


def test_a_job_that_trained_on_while_nobody_was_heard_made_progress() -> None:
    """Seen before: all that a rendezvous slept through was done again, by its account."""
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.lose_touch(80.0, heard_s=22.0)
    assert (progress.is_away, spent(progress, 85.0).open_s) == (True, 65.0)
    progress.regain(8, 82.0, 90.0)
    progress.run(90.0, world_size=2, iteration=0)
    progress.step(9, 92.0)
    found = spent(progress, 92.0)
    assert (progress.is_away, found.progress_s, wall_of(found)) == (False, 92.0, 92.0)


def test_an_iteration_that_was_lost_unseen_ends_when_its_pods_say_so() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.step(1, 10.0)
    progress.step(2, 20.0)
    progress.lose_touch(80.0, heard_s=22.0)
    progress.regain(4, 40.0, 90.0)
    progress.stop(90.0, fault_s=45.0)
    found = spent(progress, 95.0)
    assert (found.progress_s, found.redo_s, found.detect_s, found.restart_s) == (40.0, 5.0, 45.0, 5.0)


@pytest.mark.parametrize("has_steps", [True, False])
def test_of_an_iteration_that_nobody_came_back_from_counts_what_was_heard(has_steps: bool) -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    if has_steps:
        progress.step(1, 10.0)
        progress.step(2, 20.0)
    progress.lose_touch(80.0, heard_s=22.0)
    progress.give_up(90.0)
    found = spent(progress, 95.0)
    ran = (20.0, 2.0) if has_steps else (22.0, 0.0)
    assert (found.progress_s, found.redo_s) == ran
    assert (found.detect_s, found.waiting_s, found.restart_s) == (58.0, 10.0, 5.0)


def test_a_job_that_ends_while_nobody_is_heard_ends_with_the_last_word() -> None:
    progress = Progress()
    progress.run(0.0, world_size=2, iteration=0)
    progress.lose_touch(80.0, heard_s=22.0)
    progress.end(90.0)
    found = spent(progress, 95.0)
    assert (found.progress_s, found.detect_s, found.waiting_s) == (22.0, 58.0, 10.0)


def test_nothing_is_counted_any_more_when_the_job_is_over() -> None:
    progress = Progress()
    progress.run(0.0, world_size=1)
    progress.step(1, 10.0)
    progress.end(12.0)
    assert spent(progress, 12.0) == spent(progress, 1e6)
    assert wall_of(spent(progress, 1e6)) == 12.0


EARLIER = TimeSpent(500.0, 100.0, 50.0, 150.0, 200.0, progress_rank_s=2000.0, held_rank_s=6000.0, wanted_rank_s=4000.0)


@pytest.mark.parametrize("is_first", [True, False], ids=["told before it takes over", "told after it"])
def test_a_new_coordinator_goes_on_from_what_the_one_before_reported(is_first: bool) -> None:
    progress = Progress()
    earlier = EarlierRun(ago_s=210.0, gained_s=500.0, ran_for_s=1000.0, time=EARLIER)
    if is_first:
        progress.follow(earlier, 1000.0)
    progress.take_over(entered_s=0.0, until_s=803.0, now_s=1000.0, world_size=4)
    if not is_first:
        progress.follow(earlier, 1000.0)
    four_of_six(progress, 1000.0, Spent.RESTART)
    found = spent(progress, 1000.0)
    assert terms(found) == pytest.approx(
        {
            "progress": 513.0,
            "checkpoint": 0.0,
            "redo": 100.0,
            "detect": 50.0 + 197.0,
            "restart": 150.0,
            "waiting": 200.0,
            "suspended": 0.0,
            "open": 0.0,
        }
    )
    assert wall_of(found) == pytest.approx(1210.0, abs=1e-9)
    assert progress.totals(1000.0) == pytest.approx((513.0, 1210.0))
    assert found.progress_rank_s == pytest.approx(2000.0 + 13.0 * 4)


def test_between_two_coordinators_it_was_suspended_or_waited() -> None:
    progress = Progress()
    progress.follow(EarlierRun(100.0, 500.0, 1000.0, EARLIER, suspended_s=70.0), 100.0)
    progress.run(120.0, world_size=4)
    four_of_six(progress, 120.0, None)
    found = spent(progress, 120.0)
    assert (found.suspended_s, found.waiting_s) == pytest.approx((70.0, 200.0 + 50.0))
    assert wall_of(found) == pytest.approx(1120.0)
    assert progress.ettr(120.0) == pytest.approx(500.0 / 1050.0), "a suspension is nobody's loss"


def test_spares_held_under_the_coordinator_before_are_counted_where_the_iteration_is_older_than_its_report() -> None:
    """Seen before: 0.995 of what was allocated was said to be progress, of two ranks that train and one that waits."""
    progress = Progress()
    reported = TimeSpent(100.0, progress_rank_s=200.0, held_rank_s=300.0, wanted_rank_s=200.0)
    progress.follow(EarlierRun(4.0, 100.0, 100.0, reported), 104.0)
    progress.take_over(entered_s=0.0, until_s=104.0, now_s=104.0, world_size=2)
    found = spent(progress, 104.0)
    # Who was there since that report nobody knows, but those that trained.
    assert (found.progress_rank_s, found.held_rank_s, found.wanted_rank_s) == (208.0, 308.0, 208.0)


def test_spares_and_lost_ranks_count_while_an_iteration_is_taken_over() -> None:
    """Seen before: under `unbroken run`, a new rendezvous took all that it took over for held by who trains."""
    progress = Progress()
    progress.take_over(entered_s=0.0, until_s=100.0, now_s=100.0, world_size=2, held=3, wanted=4)
    found = spent(progress, 100.0)
    assert (found.progress_rank_s, found.held_rank_s, found.wanted_rank_s) == (200.0, 300.0, 400.0)
    reported = TimeSpent(50.0, progress_rank_s=100.0, held_rank_s=250.0, wanted_rank_s=200.0)
    progress.follow(EarlierRun(50.0, 50.0, 50.0, reported), 100.0)
    found = spent(progress, 100.0)
    assert (found.progress_rank_s, found.held_rank_s, found.wanted_rank_s) == (200.0, 250.0 + 150.0, 200.0 + 200.0)


def test_checkpoints_under_the_coordinator_before_stay_when_the_iteration_is_older_than_its_report() -> None:
    progress = Progress()
    reported = TimeSpent(80.0, checkpoint_s=20.0, progress_rank_s=160.0, held_rank_s=200.0, wanted_rank_s=200.0)
    progress.follow(EarlierRun(4.0, 80.0, 100.0, reported), 104.0)
    progress.stall(7, 21.0, 104.0)
    progress.adopt(7, 890)
    progress.take_over(entered_s=0.0, until_s=104.0, now_s=104.0, world_size=2)
    progress.run(104.0, world_size=2, iteration=7)
    progress.stall(7, 23.0, 114.0)
    progress.step(900, 114.0)
    found = spent(progress, 114.0)
    assert (found.progress_s, found.checkpoint_s, wall_of(found)) == pytest.approx((84.0 + 8.0, 22.0, 114.0))
    assert progress.totals(114.0) == pytest.approx((92.0, 114.0))


def test_a_coordinator_before_cannot_have_made_more_progress_than_it_held() -> None:
    progress = Progress()
    progress.follow(EarlierRun(0.0, 5.0, 5.0, TimeSpent(5.0, progress_rank_s=10.0, held_rank_s=5.0)), 50.0)
    progress.run(60.0, world_size=1)
    assert spent(progress, 60.0).progress_rank_s == 5.0


def test_what_an_earlier_release_reported_has_progress_and_restarts_only() -> None:
    progress = Progress()
    progress.follow(EarlierRun(0.0, 600.0, 1000.0), 50.0)
    progress.run(50.0, world_size=1)
    found = spent(progress, 50.0)
    assert (found.progress_s, found.restart_s, wall_of(found)) == (600.0, 400.0, 1000.0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["run", "stop", "hang", "step", "stall", "look", "follow", "take over", "adopt", "away", "back", "given up"]
        ),
        st.floats(0.0, 1e4),
        st.integers(0, 5),
        st.floats(0.0, 1e5),
    ),
    max_size=30,
)


def carry_out(progress: Progress, move: str, now_s: float, number: int, other: float) -> None:
    """Tell what happens now."""
    earlier = TimeSpent(other / 2, other / 8, other / 4, checkpoint_s=other / 8)
    deeds: dict[str, Callable[[], None]] = {
        "run": lambda: progress.run(now_s, world_size=number, iteration=number - 2),
        "stop": lambda: progress.stop(now_s, now_s - other),
        "hang": lambda: progress.stop(now_s, now_s - other, is_hang=True),
        "adopt": lambda: progress.adopt(number - 2, number),
        "step": lambda: progress.step(number, now_s - other * (number % 2), now_s),
        "stall": lambda: progress.stall(number % 2 - 1, other, now_s),
        "look": lambda: four_of_six(progress, now_s, (Spent.WAITING, Spent.RESTART)[number % 2]),
        "follow": lambda: progress.follow(EarlierRun(other, other / 2, other, earlier), now_s),
        "away": lambda: progress.lose_touch(now_s, now_s - other),
        "back": lambda: progress.regain(number, now_s - other, now_s),
        "given up": lambda: progress.give_up(now_s),
        "take over": lambda: progress.take_over(now_s - other, now_s - other / 2, now_s, world_size=number),
    }
    deeds[move]()


@given(moves=MOVES)
@example(moves=[("run", 0.0, 0, 0.0), ("run", 1.0, 0, 0.0), ("away", 0.0, 0, 0.0), ("run", 0.0, 0, 0.0)])
def test_the_terms_are_the_wall_time_whatever_happens(moves: list[tuple[str, float, int, float]]) -> None:
    progress, now_s, shown_s, is_running = Progress(), 0.0, 0.0, False
    for move, seconds, number, other in moves:
        now_s += seconds
        assert progress.gained_s(now_s) >= shown_s - 1e-6
        shown_s = progress.gained_s(now_s)
        if not (is_running and move in ("run", "look")) or (move == "run" and progress.is_away):
            carry_out(progress, move, now_s, number, other)
        is_running = progress._mark_s is not None
        assert progress.gained_s(now_s) >= shown_s - 1e-6, move
        found, (gained_s, ran_for_s) = progress.account.spent(now_s), progress.totals(now_s)
        assert (found is None) is (ran_for_s is None)
        if found is not None:
            assert wall_of(found) == pytest.approx(ran_for_s, abs=1e-9)
            assert found.progress_s == pytest.approx(gained_s, abs=1e-6)
            assert min(astuple(found)) >= 0
            assert all(0 <= ratio <= 1 for ratio in ratios(found).values())
