"""What two records come to: equal, different, or nothing that can be said. Nothing to compare is never equal."""

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from unbroken.checkpoint_records import LoadedStep, SavedPart, Struck
from unbroken.comparing.comparison import (
    Compared,
    Extent,
    FirstDifference,
    Sameness,
    compare_broken,
    compare_calm,
    problem_of_calm,
    step_to_strike,
)
from unbroken.comparing.records import Record
from unbroken.comparing.text import RunReport, lines_of, outcome_of, value_of

NAMES = ("weight", "generator", "rate")


def saved(step: int, rank: int = 0, iteration: int = 0, **other: str) -> SavedPart:
    """Return a part with two tensors, one of them of floats, and a number: those of the step but for others."""
    digests = "".join(f"{other.get(name, f'{name}{step}'):>16}" for name in NAMES)
    return SavedPart(iteration, rank, 2, step, NAMES, 1, 2, digests)


def calm(steps: Iterable[int] = range(10)) -> Record:
    """Return a run of two ranks without a fault."""
    saves = tuple(saved(step, rank) for step in steps for rank in (0, 1))
    return Record(saves, tuple(LoadedStep(0, rank, "nothing", -1) for rank in (0, 1)))


def broken(restored: int = 4, **other: str) -> Record:
    """Return a run in which rank 1 was hit before step 6 was saved, and rank 0 had saved that."""
    before = tuple(saved(step, rank) for step in range(7) for rank in (0, 1) if (step, rank) != (6, 1))
    after = tuple(saved(step, rank, 1, **other) for step in range(restored + 1, 10) for rank in (0, 1))
    loads = tuple(LoadedStep(1, rank, "memory", restored) for rank in (0, 1))
    return Record((*before, *after), (*calm().loads, *loads), Struck(0, 1, 6))


def test_what_was_saved_after_a_fault_is_compared_part_by_part_also_where_it_was_saved_before() -> None:
    seen = compare_broken(calm(), broken(), (), 0)
    assert seen == Compared(
        Sameness.EQUAL,
        struck=Struck(0, 1, 6),
        restored=LoadedStep(1, 0, "memory", 4),
        extent=Extent(5, 2, 10, 20, 10),
    )


def test_the_first_difference_is_named_with_its_step_ranks_and_values() -> None:
    record = broken()
    wrong = {(7, 1): saved(7, 1, 1, weight="x"), (8, 0): saved(8, 0, 1, weight="x", rate="y")}
    saves = tuple(wrong.get((one.step, one.rank), one) if one.iteration else one for one in record.saves)
    seen = compare_broken(calm(), replace(record, saves=saves), (), 0)
    assert (seen.outcome, seen.difference) == (Sameness.DIFFERENT, FirstDifference(7, (1,), ("weight",), 1, 2))


def test_a_step_that_was_made_again_with_another_result_is_different() -> None:
    record = broken()
    saves = tuple(
        saved(5, 0, 1, weight="x") if (one.step, one.rank, one.iteration) == (5, 0, 1) else one for one in record.saves
    )
    seen = compare_broken(calm(), replace(record, saves=saves), (), 0)
    assert seen.difference == FirstDifference(5, (0,), ("weight",), 1, 1)


def test_values_that_are_there_in_one_run_alone_are_different() -> None:
    one = SavedPart(1, 1, 2, 9, (*NAMES, "more"), 1, 2, saved(9).digests + "0" * 16)
    record = broken()
    saves = tuple(one if (each.step, each.rank) == (9, 1) else each for each in record.saves)
    seen = compare_broken(calm(), replace(record, saves=saves), (), 0)
    assert seen.difference == FirstDifference(9, (1,), ("more",), 0, 1)


def test_values_in_which_calm_runs_differ_say_nothing_of_faults() -> None:
    again = calm()
    again = replace(again, saves=(*again.saves[:-1], saved(9, 1, rate="other", generator="other")))
    seen = compare_calm(calm(), again)
    assert (seen.outcome, seen.noise) == (Sameness.EQUAL, ("generator", "rate"))
    assert compare_broken(calm(), broken(rate="third"), seen.noise, 0).outcome is Sameness.EQUAL
    assert compare_broken(calm(), broken(rate="third"), (), 0).outcome is Sameness.DIFFERENT


def test_tensors_in_which_calm_runs_differ_end_the_comparison() -> None:
    again = calm()
    seen = compare_calm(calm(), replace(again, saves=(*again.saves[:-1], saved(9, 1, weight="other"))))
    assert (seen.outcome, seen.difference) == (
        Sameness.NOT_COMPARABLE,
        FirstDifference(9, (1,), ("weight",), 1, 1),
    )


def test_a_difference_before_the_fault_is_none_of_the_fault() -> None:
    record = broken(weight="x")
    seen = compare_broken(calm(), replace(record, saves=(saved(0, 0, weight="y"), *record.saves[1:])), (), 0)
    assert seen.outcome is Sameness.NOT_COMPARABLE
    assert "before the fault already" in seen.reason


def still(record: Record, *, first: int) -> Record:
    """Return a run whose tensors of floating-point numbers no longer change from a step on."""
    saves = (saved(one.step, one.rank, one.iteration, weight="still") for one in record.saves)
    return replace(
        record, saves=tuple(new if new.step >= first else old for new, old in zip(saves, record.saves, strict=True))
    )


def test_values_that_no_step_changes_prove_nothing() -> None:
    """A copy that was made before the training is equal whatever became of what is trained."""
    assert "no tensor of floating-point numbers changes" in problem_of_calm(still(calm(), first=0))
    assert problem_of_calm(still(calm(), first=1)) == ""
    seen = compare_broken(still(calm(), first=4), still(broken(), first=4), (), 0)
    assert seen.outcome is Sameness.NOT_COMPARABLE
    assert "no tensor of floating-point numbers changes" in seen.reason
    assert compare_broken(still(calm(), first=5), still(broken(), first=5), (), 0).outcome is Sameness.EQUAL


def test_of_two_values_with_one_name_both_are_compared() -> None:
    def twice(record: Record, first: str) -> Record:
        saves = (replace(one, names=("weight", "rate", "rate"), num_tensors=1) for one in record.saves)
        return replace(
            record, saves=tuple(replace(one, digests=f"{one.digests[:16]}{first:>16}{0:>16}") for one in saves)
        )

    assert compare_calm(twice(calm(), "a"), twice(calm(), "a")).noise == ()
    assert compare_calm(twice(calm(), "a"), twice(calm(), "b")).noise == ("rate",)


FULL = calm()
ANEW = broken(-1)


@pytest.mark.parametrize(
    ("record", "code", "outcome", "reason"),
    [
        pytest.param(FULL, 0, 2, "the training ended before the fault was due", id="no fault"),
        pytest.param(replace(broken(), loads=FULL.loads), 0, 2, "no rank called `load` after the fault", id="no load"),
        pytest.param(broken(-1), 0, 2, "nothing was restored after the fault", id="began anew"),
        pytest.param(
            replace(broken(-1), saves=tuple(one for one in broken(-1).saves if one.iteration)),
            0,
            2,
            "nothing was restored after the fault",
            id="hit before the first save",
        ),
        pytest.param(
            replace(ANEW, saves=tuple(one for one in ANEW.saves if one.rank == 1)),
            0,
            2,
            "; all ranks have to save, and rank 0 had no checkpoint in memory",
            id="one rank saves",
        ),
        pytest.param(
            replace(ANEW, saves=tuple(replace(one, skipped="no room" * one.rank) for one in ANEW.saves)),
            0,
            2,
            "; all ranks have to save, and rank 1 had no checkpoint in memory: no room",
            id="no room for one rank",
        ),
        pytest.param(broken(9), 0, 2, "no new step was saved after the fault", id="nothing after it"),
        pytest.param(
            replace(broken(9), saves=(*broken(9).saves, saved(9, 0, 1), saved(9, 1, 1))),
            0,
            2,
            "no new step was saved after the fault",
            id="that which it went on from, again",
        ),
        pytest.param(
            replace(broken(), saves=tuple(one for one in broken().saves if not one.iteration)),
            0,
            1,
            "10 parts missing, first step 5 of rank 0",
            id="ended early",
        ),
        pytest.param(replace(broken(), problem="torn"), 0, 2, "torn", id="not readable"),
        pytest.param(broken(), 9, 1, "it ended with exit code 9 after the fault", id="did not survive"),
        pytest.param(FULL, 9, 2, "it ended with exit code 9 before the fault", id="failed by itself"),
        pytest.param(Record(), 0, 2, "it trained no step that it saved", id="found that all was done"),
        pytest.param(
            replace(broken(), saves=broken().saves[:-1]),
            0,
            1,
            "1 part missing, first step 9 of rank 1",
            id="a part less",
        ),
        pytest.param(
            replace(broken(), saves=(*broken().saves, saved(10, 0, 1))),
            0,
            1,
            "1 part more, first step 10",
            id="one more",
        ),
        pytest.param(
            replace(
                broken(), saves=tuple(replace(one, world_size=3) if one.iteration else one for one in broken().saves)
            ),
            0,
            2,
            "the world has 3 ranks after the fault, and had 2",
            id="another world",
        ),
        pytest.param(
            replace(broken(), loads=(LoadedStep(0, 0, "disk", 3), *broken().loads[2:])),
            0,
            2,
            "it began from step 3 (disk), with step 0 as the first that it saved, and the first run anew",
            id="leftovers",
        ),
    ],
)
def test_what_cannot_be_compared_is_said_and_never_equal(record: Record, code: int, outcome: int, reason: str) -> None:
    seen = compare_broken(FULL, record, (), code)
    assert seen.outcome.value == outcome
    assert reason in seen.reason


def test_calm_runs_that_save_other_steps_are_no_measure() -> None:
    assert compare_calm(calm(), calm(range(8))).outcome is Sameness.NOT_COMPARABLE
    assert "it began" in compare_calm(calm(), calm(range(3, 10))).reason
    assert "found what an earlier run had left" in compare_calm(calm(), Record()).reason


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        pytest.param(calm(), "", id="usable"),
        pytest.param(Record(), "it saved no checkpoint in memory", id="nothing"),
        pytest.param(broken(), "began 2 times", id="fails by itself"),
        pytest.param(
            Record(tuple(replace(one, skipped="no room") for one in calm().saves)), "took none.*: no room", id="no room"
        ),
    ],
)
def test_a_first_run_that_is_no_measure_says_why(record: Record, problem: str) -> None:
    assert re.search(problem, problem_of_calm(record))
    assert bool(problem_of_calm(record)) == bool(problem)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [([0, 1, 2], 2), (range(10), 5), (range(0, 40, 4), 18), ([5, 100, 300], 200), ([0, 1], None), ([], None)],
)
def test_a_fault_comes_after_the_middle_and_between_saves(steps: Iterable[int], wanted: int | None) -> None:
    assert step_to_strike(calm(steps), 0) == wanted


def report(compared: Compared) -> RunReport:
    """Return a run with a result."""
    return RunReport("run 3, kill", compared)


def test_a_difference_counts_more_than_what_could_not_be_compared() -> None:
    equal, other, none = (report(Compared(one)) for one in Sameness)
    assert outcome_of([equal, equal], "") is Sameness.EQUAL
    assert outcome_of([equal, other, none], "") is Sameness.DIFFERENT
    assert outcome_of([equal, none], "") is Sameness.NOT_COMPARABLE
    assert outcome_of([], "it saved nothing") is Sameness.NOT_COMPARABLE
    assert outcome_of([equal], "") is Sameness.NOT_COMPARABLE, "no run with a fault"


def test_names_that_are_told_are_bounded() -> None:
    names = tuple(f"layer.{number}" for number in range(1000))
    seen = [report(Compared(Sameness.DIFFERENT, "", FirstDifference(7, tuple(range(64)), names, 1000, 3), noise=names))]
    assert all(len(line) < 300 for line in lines_of(seen, ""))
    value = value_of(seen, "")["runs"][0]
    assert (len(value["difference"]["names"]), value["difference"]["num_names"]) == (10, 1000)
    assert (len(value["noise"]), value["num_noise"]) == (10, 1000)


def test_a_step_that_is_saved_twice_is_compared_time_by_time() -> None:
    """At the end of a training: averaged weights, under the number of the last step."""
    first, rest = calm(), broken()
    last = tuple(saved(9, rank, weight="averaged") for rank in (0, 1))
    twice = replace(first, saves=(*first.saves, *last))
    right = replace(rest, saves=(*rest.saves, *(replace(one, iteration=1) for one in last)))
    assert compare_broken(twice, right, (), 0).outcome is Sameness.EQUAL
    assert compare_calm(twice, replace(first, saves=(*first.saves[:-1], saved(9, 1, weight="x"), *last))).noise == (
        "weight",
    )
    assert "1 part missing" in compare_broken(twice, replace(right, saves=right.saves[:-1]), (), 0).reason


def test_what_is_left_out_is_not_counted_and_with_no_tensor_left_nothing_is_proved() -> None:
    seen = compare_broken(calm(), broken(), ("generator",), 0)
    assert (seen.outcome, seen.extent.num_tensors, seen.extent.num_values) == (Sameness.EQUAL, 10, 10)
    report = RunReport("run 3, kill", seen)
    assert lines_of([report, report], "")[-1].endswith("bit for bit, but for what is left out")
    seen = compare_broken(calm(), broken(), ("generator", "weight"), 0)
    assert (seen.outcome, "no tensor" in seen.reason) == (Sameness.NOT_COMPARABLE, True)
    whole = [replace(one, num_floats=0) for one in calm().saves]
    other = [replace(one, digests="x" * len(one.digests)) for one in whole]
    assert (
        compare_calm(replace(calm(), saves=tuple(whole)), replace(calm(), saves=tuple(other))).outcome
        is Sameness.NOT_COMPARABLE
    )


def test_a_script_that_catches_the_fault_itself_is_told_so() -> None:
    went_on = (*calm().saves, saved(3), saved(4))
    record = Record(went_on, (*calm().loads, LoadedStep(0, 0, "memory", 3)), Struck(0, 1, 6))
    seen = compare_broken(calm(), record, (), 0)
    assert (seen.outcome, seen.reason) == (
        Sameness.NOT_COMPARABLE,
        "the script caught the fault itself: no new iteration began",
    )


def test_rounding_is_no_cause_named_where_no_tensor_differs() -> None:
    seen = compare_broken(calm(), broken(rate="x"), (), 0)
    report = RunReport("run 3, kill", seen)
    text = "\n".join(lines_of([report, report], ""))
    assert "usual cause: state that is in no checkpoint" in text
    assert "MKL" not in text


def test_a_script_that_saves_before_it_trains_saves_the_step_that_it_went_on_from_again() -> None:
    record = broken()
    again = [saved(4, rank, 1) for rank in (0, 1)]
    seen = compare_broken(calm(), replace(record, saves=(*record.saves, *again)), (), 0)
    assert (seen.outcome, seen.extent.num_steps) == (Sameness.EQUAL, 6)
    again[1] = saved(4, 1, 1, weight="x")
    seen = compare_broken(calm(), replace(record, saves=(*record.saves, *again)), (), 0)
    assert (seen.outcome, seen.difference) == (Sameness.DIFFERENT, FirstDifference(4, (1,), ("weight",), 1, 1))
    more = compare_broken(calm(), replace(record, saves=(*record.saves, saved(10, 0, 1))), (), 0)
    assert (more.outcome, "1 part more, first step 10" in more.reason) == (Sameness.DIFFERENT, True)


def test_a_step_that_is_saved_again_as_it_was_is_one_save() -> None:
    """Where the memory did not take the last step, `flush` saves it again: that is chance, and no difference."""
    last = tuple(replace(saved(9, rank), skipped="still being copied") for rank in (0, 1))
    again = replace(calm(), saves=(*calm().saves[:-2], *last, *calm().saves[-2:]))
    assert compare_calm(calm(), again).outcome is compare_calm(again, calm()).outcome is Sameness.EQUAL
    assert compare_broken(again, broken(), (), 0).outcome is Sameness.EQUAL
    assert compare_calm(calm(), again).extent == compare_calm(calm(), calm()).extent
