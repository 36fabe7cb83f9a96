"""What `make gpu-check` says of what it has seen."""

from typing import Any
from xml.etree import ElementTree

import pytest
from tests.gpu.__main__ import read_device
from tests.gpu.report import HOST_KIB, MAX_SEEN, MIB, Result, Row, of_job, of_tests, of_training, table


def held(rank: int, iteration: int, **more: Any) -> dict[str, Any]:
    """Return a note of what a rank holds."""
    base = {"gpu_used": 900 * MIB, "gpu_allocated": 0, "memory_kib": 500_000, "threads": {"a": 9}, "descriptors": {}}
    return {"event": "holds", "rank": rank, "iteration": iteration, "at_s": float(iteration), **base, **more}


def notes_of(restarts: int, ranks: int = 2, **last: Any) -> list[dict[str, Any]]:
    """Return the notes of a job that went well; `last`: what rank 0 holds at its end."""
    notes: list[dict[str, Any]] = []
    for number in range(restarts + 1):
        for rank in range(ranks):
            notes.append(
                {"event": "works", "rank": rank, "iteration": number, "at_s": number + 0.2, "pid": rank, "seconds": 0.1}
            )
        notes.append({"event": "raised", "rank": ranks - 1, "iteration": number, "at_s": number + 1.0})
    notes.append({"event": "freed", "rank": 0, "at_s": 1.015, "by": "RankShouldRestart"})
    notes += [held(rank, 20) for rank in range(ranks)]
    return [*notes, held(0, restarts, **last), *(held(rank, restarts) for rank in range(1, ranks))]


def test_job_that_went_well_has_a_row_for_each_thing_it_showed() -> None:
    rows = of_job(notes_of(100), 100, 2, 55.0, "")
    assert {row.result for row in rows} == {Result.OK}
    flat = "from restart 20 to 100: +0 MiB used on the device, +0 B allocated by torch, +0 KiB of the host"
    assert [(row.phase, row.seen.removesuffix(", +0 threads, +0 descriptors")) for row in rows] == [
        ("2 ranks on one device", "100 restarts in the same processes"),
        ("abort of a blocked collective", "rank 0 was free 15 ms after rank 1 raised, by RankShouldRestart"),
        (
            "recovery",
            "of 100: 200 ms from the exception until all ranks have reduced again, most 200 ms; "
            "100 ms of it make the group and reduce",
        ),
        ("memory of rank 0", flat),
        ("memory of rank 1", flat),
    ]


@pytest.mark.parametrize(
    ("last", "phase"),
    [
        pytest.param({"gpu_used": 965 * MIB}, "memory of rank 0", id="device"),
        pytest.param({"gpu_allocated": 1}, "memory of rank 0", id="torch's allocator"),
        pytest.param({"memory_kib": 500_001 + HOST_KIB}, "memory of rank 0", id="host"),
        pytest.param({"threads": {"a": 13}}, "memory of rank 0", id="threads"),
        pytest.param({"descriptors": {"socket": 4}}, "memory of rank 0", id="descriptors"),
    ],
)
def test_what_grows_fails_its_row_alone(last: dict[str, Any], phase: str) -> None:
    rows = of_job(notes_of(100, **last), 100, 2, 55.0, "")
    assert [row.phase for row in rows if row.result is Result.FAILED] == [phase]


@pytest.mark.parametrize(
    ("drop", "ending", "failed"),
    [
        pytest.param({"event": "freed"}, "", {"abort of a blocked collective"}, id="never freed"),
        pytest.param({"event": "works", "iteration": 100}, "", {"2 ranks on one device"}, id="last restart is missing"),
        pytest.param({}, "exit code 1", {"2 ranks on one device"}, id="ended badly"),
        pytest.param(
            {"event": "holds", "rank": 1, "iteration": 100}, "", {"memory of rank 1"}, id="a sample is missing"
        ),
    ],
)
def test_what_is_missing_fails(drop: dict[str, Any], ending: str, failed: set[str]) -> None:
    notes = [one for one in notes_of(100) if not drop or any(one.get(key) != drop[key] for key in drop)]
    assert {row.phase for row in of_job(notes, 100, 2, 1.0, ending) if row.result is Result.FAILED} == failed


@pytest.mark.parametrize(
    ("at_s", "by", "result", "seen"),
    [
        pytest.param(
            1.015, "", Result.FAILED, "15 ms after rank 1 raised, by itself: its function went on", id="goes on"
        ),
        pytest.param(0.9, "Error", Result.FAILED, "100 ms before rank 1 raised, by Error", id="never blocked"),
    ],
)
def test_rank_that_is_freed_must_not_go_on(at_s: float, by: str, result: Result, seen: str) -> None:
    freed = {"event": "freed", "rank": 0, "at_s": at_s, "by": by}
    notes = [freed if one["event"] == "freed" else one for one in notes_of(100)]
    row = of_job(notes, 100, 2, 55.0, "")[1]
    assert (row.result, row.seen) == (result, f"rank 0 was free {seen}")


def trained(**changes: Any) -> dict[str, Any]:
    """Return what came of a training of three steps."""
    steps = {step: [[step], [0.5, 0.25]] for step in (1, 2, 3)}
    return {"iteration": 0, "digest": "d", "steps": steps, "lines": 3} | changes


def test_training_that_ends_as_one_without_faults_says_what_was_done_twice() -> None:
    row = of_training("fsdp2", trained(), trained(iteration=2, lines=4), 2, 9.0)
    assert (row.phase, row.result) == ("training: fsdp2", Result.OK)
    assert row.seen == "3 steps and 2 faults, bit for bit as without; 1 steps done twice"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        pytest.param({"digest": "e"}, "other weights at the end", id="weights"),
        pytest.param({"iteration": 1}, "1 restarts for 2 faults", id="a fault that did not come"),
        pytest.param({"steps": {1: [[1], [0.5, 0.25]], 2: [[2], [0.5, 0.2]]}}, "in 2 steps, the first 2: ", id="steps"),
    ],
)
def test_training_that_differs_fails(changes: dict[str, Any], seen: str) -> None:
    row = of_training("fsdp2", trained(), trained(**{"iteration": 2, **changes}), 2, 9.0)
    assert row.result is Result.FAILED
    assert seen in row.seen


def test_process_that_was_started_again_is_no_restart_within_it() -> None:
    notes = [{**one, "pid": one["iteration"]} if one["event"] == "works" else one for one in notes_of(100)]
    first = of_job(notes, 100, 2, 1.0, "")[0]
    assert (first.result, first.seen) == (Result.FAILED, "101 processes for 2 ranks: some were started again")


def test_no_note_at_all_fails_and_says_so() -> None:
    rows = of_job([], 100, 2, 200.0, "not done within 200 s")
    assert {row.result for row in rows} == {Result.FAILED}
    assert rows[0].seen == "not done within 200 s; 0 of 2 ranks got to restart 100"


def test_what_nccl_refuses_is_no_failure() -> None:
    (row,) = of_job([{"event": "refused", "rank": 0, "at_s": 1.0, "words": "Duplicate GPU detected"}], 100, 2, 9.0, "")
    assert (row.result, row.seen) == (Result.NOT_RUN, "NCCL does not let them: Duplicate GPU detected")


def test_one_rank_has_nobody_to_wait_for() -> None:
    rows = of_job(notes_of(100, ranks=1), 100, 1, 9.0, "")
    assert [(row.phase, row.result) for row in rows] == [
        ("1 rank", Result.OK),
        ("recovery", Result.OK),
        ("memory of rank 0", Result.OK),
    ]


@pytest.mark.parametrize(
    ("suite", "result", "seen"),
    [
        pytest.param('tests="3" failures="0" errors="0" skipped="0"', Result.OK, "3 passed, 0 failed, 0 skipped"),
        pytest.param('tests="3" failures="1" errors="1" skipped="0"', Result.FAILED, "1 passed, 2 failed, 0 skipped"),
        pytest.param('tests="3" failures="0" errors="0" skipped="3"', Result.FAILED, "0 passed, 0 failed, 3 skipped"),
        pytest.param('tests="0" failures="0" errors="0" skipped="0"', Result.FAILED, "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_tests_of_which_none_ran_are_no_success(suite: str, result: Result, seen: str) -> None:
    row = of_tests(ElementTree.fromstring(f"<testsuites><testsuite {suite}/></testsuites>"), 2.0)
    assert row == Row("tests marked gpu", 2.0, result, seen)


def test_tests_that_failed_and_reasons_of_skips_are_named() -> None:
    text = (
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase name="test_a"><failure message="x"/></testcase><testcase name="test_b"><properties>'
        '<property name="seen" value="0.1 s a GiB"/></properties></testcase>'
        '<testcase name="test_c"><skipped message="needs 2 GPUs"/></testcase></testsuite></testsuites>'
    )
    row = of_tests(ElementTree.fromstring(text), 1.0)
    assert row.seen == "1 passed, 1 failed, 1 skipped; test_a; needs 2 GPUs; 0.1 s a GiB"


def test_cell_of_the_table_is_one_short_line() -> None:
    text = table("A card", [Row("a", 1.25, Result.OK, "x | y\nz"), Row("b", 0.0, Result.FAILED, "w" * 10_000)])
    lines = text.splitlines()
    assert lines[:5] == [
        "# A card",
        "",
        "| phase | seconds | result | seen |",
        "|---|---:|---|---|",
        "| a | 1.2 | ok | x \\| y z |",
    ]
    assert len(lines) == 6
    assert len(lines[5]) < MAX_SEEN + 30


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        pytest.param(0, '{"devices": 0, "torch": "2.13.0+cpu", "cuda": "None"}', "no device, and torch 2.13.0+cpu"),
        pytest.param(1, "RuntimeError: the driver is too old\n", "an error: RuntimeError: the driver is too old"),
        pytest.param(-9, "", "an error: exit code -9"),
        pytest.param(0, "", "an answer that cannot be read: ''"),
        pytest.param(0, "hello", "an answer that cannot be read: 'hello'"),
    ],
)
def test_machine_without_a_gpu_says_what_is_missing(code: int, said: str, words: str) -> None:
    seen = read_device(code, said)
    assert isinstance(seen, str)
    assert seen.startswith(words)
