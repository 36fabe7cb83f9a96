"""What `unbroken run` knows and says of where the time went: over the loss of the rendezvous, and at the end."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken.run.earlier import EarlierReports
from unbroken.run.narration import Story, account_line
from unbroken_core.protocol.messages import EarlierRun, JobStatus, Recovery, TimeSpent
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason

TIME = TimeSpent(93.0, 4.0, 1.0, 2.0, progress_rank_s=186.0, held_rank_s=300.0, wanted_rank_s=200.0)


def status(term: int, ran_for_s: float | None, time: TimeSpent | None = TIME, **more: Any) -> JobStatus:
    """Return what a rendezvous reports."""
    phase = more.pop("phase", JobPhase.RUNNING)
    recoveries = more.pop("recoveries", ())
    report = JobStatus(1, "digits", term, 1, phase, Reason.TRAINING, "", 0, 2, 1, 0, (), {}, {}, recoveries, 5, 0.9)
    return replace(report, gained_s=93.0, ran_for_s=ran_for_s, time=time)


def test_next_rendezvous_is_told_what_the_last_one_reported_and_how_long_ago() -> None:
    reports = EarlierReports()
    reports.note(status(1, 60.0), 1000.0)
    reports.note(status(1, 100.0), 1040.0)
    assert reports.told(1041.0) is None, "it is the first"
    reports.end()
    assert reports.told(1043.5) == EarlierRun(3.5, 93.0, 100.0, TIME)


def test_a_rendezvous_that_was_not_told_yet_does_not_make_the_run_forget() -> None:
    reports = EarlierReports()
    reports.note(status(1, 100.0), 1000.0)
    reports.end()
    reports.note(status(2, 7.0), 1010.0)
    reports.end()
    assert reports.told(1010.0) == EarlierRun(10.0, 93.0, 100.0, TIME)
    reports.note(status(3, 111.0), 1011.0)
    assert reports.told(1011.0) == EarlierRun(11.0, 93.0, 100.0, TIME), "the present one knows of itself"
    reports.end()
    assert reports.told(1011.0) == EarlierRun(0.0, 93.0, 111.0, TIME)


def test_of_a_rendezvous_under_which_nothing_ran_there_is_nothing_to_tell() -> None:
    reports = EarlierReports()
    reports.note(status(1, None, None), 1000.0)
    reports.end()
    assert reports.told(1000.0) is None


def test_a_line_says_where_the_time_went() -> None:
    assert account_line(status(1, 100.0)) == [
        "time: progress 93.0%, redo 4.0%, detect 1.0%, restart 2.0% of 100 s; "
        "ettr 0.930, ettr_capacity 0.930, goodput_allocated 0.620"
    ]


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(None, id="no report"),
        pytest.param(status(1, None, None), id="never trained"),
        pytest.param(status(1, 0.0, TimeSpent(0.0)), id="no time"),
    ],
)
def test_of_no_time_nothing_is_said(seen: JobStatus | None) -> None:
    assert account_line(seen) == []


@pytest.mark.parametrize(
    ("is_quiet", "has_fault", "is_said"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_quietly_it_is_said_only_after_a_fault(is_quiet: bool, has_fault: bool, is_said: bool) -> None:
    story = Story(is_quiet)
    faults = (
        (Recovery(1, Cause.EXCEPTION, None, 0, "digits-0", "", "", "ValueError: no", 0, 1, (), {}, "", ""),)
        if has_fault
        else ()
    )
    end = status(1, 100.0, phase=JobPhase.COMPLETE, recoveries=faults)
    story.tell(end, 0.0)
    assert bool(story.end(end)) is is_said


def test_a_training_that_begins_anew_is_told_when_it_is_and_at_the_end_once() -> None:
    lost = MemoryStatus(-1, steps_redone=24, source="nothing", reason="step 10: 2 shards were lost with train-0")
    line = (
        "training began anew in iteration 5, since nothing was restored, 24 steps redone: "
        "step 10: 2 shards were lost with train-0"
    )
    first = replace(status(1, 1.0), memory=MemoryStatus(-1, source="nothing"), iteration=5)
    for is_quiet in (False, True):
        story = Story(is_quiet)
        assert not any("anew" in one for one in story.tell(first, 0.0)), "in its first start nothing was lost"
        assert line in story.tell(replace(first, memory=lost), 1.0)
        assert line not in story.tell(replace(first, memory=replace(lost, complete_step=5)), 2.0)
        over = replace(first, memory=lost, phase=JobPhase.COMPLETE)
        assert line not in story.tell(over, 3.0)
        assert story.end(over)[-1] == line
