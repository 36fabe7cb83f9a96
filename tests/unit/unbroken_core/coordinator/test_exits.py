"""Exit codes with which a script says that no restart would help."""

from dataclasses import replace
from functools import partial

import pytest

from unbroken_core.protocol.messages import Fault, Finish
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.recovery.history import FaultRecord, History
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, WorkerPhase

from .test_coordinator import GONE, READY, RUNNING, SETTINGS, STARTING, STOPPING, Bench, sent

FATAL = replace(SETTINGS, fatal_exit_codes=(3, 78))


def test_a_worker_that_ends_with_such_a_code_ends_the_job_at_once_and_all_are_told() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    finishes = sent(bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78), Finish)
    assert set(finishes) == {"p0", "p1", "p2"}
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.FATAL_EXIT)
    assert status.message == "rank 2 (p1) exited with code 78, after which restart.fatalExitCodes wants no restart"
    assert status.recoveries == (), "no restart is counted"


@pytest.mark.parametrize(
    ("phase", "exit_code"),
    [
        pytest.param(GONE, 1, id="another code"),
        pytest.param(GONE, None, id="a signal, or nobody knows"),
        pytest.param(WorkerPhase.STOPPING, 78, id="a process that has not ended"),
    ],
)
def test_any_other_end_is_recovered(phase: WorkerPhase, exit_code: int | None) -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.PROCESS_EXIT, phase, exit_code=exit_code)
    assert bench.status().phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED)


def test_without_such_codes_every_end_is_recovered() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78)
    assert bench.status().phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED)


def test_a_script_that_gives_up_before_it_is_ready_ends_the_job_as_well() -> None:
    bench = Bench(FATAL)
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    bench.fault("p0", 1, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT
    assert bench.status().message.startswith("p0 worker 1 exited with code 3,")


def test_a_spare_that_gives_up_ends_the_job_too_since_the_script_is_the_same() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p2", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT


def test_time_after_such_an_end_is_not_lost_time_of_the_job() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.now_s += 10.0
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT
    at_the_end = bench.status().ettr
    bench.now_s += 1000.0
    assert bench.status().ettr == at_the_end == 1.0


def test_a_process_that_was_told_to_end_may_end_as_it_likes() -> None:
    """A worker that hangs is replaced; what its handler of SIGTERM returns is no word of the script."""
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.live(FATAL.timeouts.barrier_s + 1)
    place = bench.coordinator._job.members.by_uid["uid-p1"].places[0]
    assert place.replacing is not None, "its end is ordered"
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().phase is not JobPhase.FAILED


@pytest.mark.parametrize("code", [0, 256, -9])
def test_a_code_that_no_process_can_give_is_refused(code: int) -> None:
    with pytest.raises(InputError, match=f"restart.fatalExitCodes: want codes of 1 to 255, got {code}"):
        JobSettings("j", fatal_exit_codes=(code,))


def test_codes_survive_the_end_of_the_job_only_as_words() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1")
    bench.all_are(RUNNING, 0, "p0", "p1")
    bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    first = bench.status()
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78)
    assert bench.status().message == first.message, "the first one counts"


MISTAKE = "NameError: name 'x' is not defined"


def fail(bench: Bench, workers: list[tuple[str, int]], detail: str, cause: Cause, line: int) -> None:
    """Let these workers of the iteration fail in this order, and all others leave it."""
    iteration = bench.status().iteration
    for pod, local_rank in workers:
        fault = Fault(cause, iteration, detail, stack=("train.py:3 in main", f"train.py:{line} in train"))
        bench.worker(pod, local_rank, STOPPING, fault)
    bench.states |= {pod: bench.workers(READY, iteration) for pod in ("p0", "p1")}
    for pod in ("p0", "p1"):
        bench.report(pod)


Tries = list[list[tuple[str, int]]]
EVERYWHERE = [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
HALVES = [EVERYWHERE[:2], EVERYWHERE[2:]]


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("runs", [True, False], ids=["all enter", "it fails before all have entered"])
@pytest.mark.parametrize(
    ("tries", "details", "is_over"),
    [
        pytest.param([EVERYWHERE] * 2, [MISTAKE] * 2, True, id="all ranks, twice"),
        pytest.param([EVERYWHERE[:1], EVERYWHERE[2:3]], [MISTAKE] * 2, True, id="others were interrupted first"),
        pytest.param([EVERYWHERE[:2]] * 2, [MISTAKE] * 2, False, id="one pod alone: its node may lack something"),
        pytest.param([EVERYWHERE] * 2, [MISTAKE, f"{MISTAKE}!"], False, id="another message"),
        pytest.param(
            [EVERYWHERE] * 2, ["OSError: [Errno 5] Input/output error"] * 2, False, id="storage may come back"
        ),
        pytest.param([EVERYWHERE], [MISTAKE], False, id="once"),
        pytest.param(
            [EVERYWHERE] * 3, [MISTAKE, f"{MISTAKE}!", MISTAKE], False, id="it comes back, with another between"
        ),
    ],
)
def test_a_mistake_of_the_script_is_run_once_more_and_no_oftener(
    tries: Tries, details: list[str], is_over: bool, runs: bool, limit: int | None
) -> None:
    bench = Bench(replace(SETTINGS, no_progress_limit=limit))
    bench.run("p0", "p1")
    for workers, detail in zip(tries, details, strict=True):
        assert bench.status().phase is not JobPhase.FAILED
        if runs:
            bench.all_are(RUNNING, bench.status().iteration, "p0", "p1")
        fail(bench, workers, detail, Cause.EXCEPTION, 7)
    status = bench.status()
    assert (status.phase is JobPhase.FAILED) is is_over
    if is_over:
        assert status.reason is Reason.NO_PROGRESS
        assert "failed in the same way 2 times in a row" in status.message
        assert "correct the script, since no restart mends this" in status.message


@pytest.mark.parametrize(
    "detail",
    [
        pytest.param("KeyError: 'loss'", id="an empty answer of a service"),
        pytest.param("AttributeError: 'NoneType' object has no attribute 'to'", id="an empty shard"),
        pytest.param("TypeError: 'NoneType' object is not subscriptable", id="another empty answer"),
        pytest.param("ZeroDivisionError: division by zero", id="no batches"),
        pytest.param(
            "UnboundLocalError: cannot access local variable 'loss' where it is not associated with a value",
            id="a loop over nothing",
        ),
        pytest.param("NameError: cannot access free variable 'loss'", id="a loop over nothing, outside"),
        pytest.param("ModuleNotFoundError: No module named 'model'", id="the file system is away"),
        pytest.param("SyntaxError: invalid syntax (<unknown>, line 0)", id="literal_eval of nothing"),
        pytest.param("NotImplementedError: no operator for device cpu", id="no device"),
    ],
)
def test_an_error_that_its_surroundings_may_cause_is_recovered_ten_times(detail: str) -> None:
    bench = Bench()
    bench.run("p0", "p1")
    for _ in range(10):
        assert bench.status().phase is not JobPhase.FAILED
        bench.all_are(RUNNING, bench.status().iteration, "p0", "p1")
        fail(bench, EVERYWHERE, detail, Cause.EXCEPTION, 7)
    assert bench.status().phase is not JobPhase.FAILED


def test_a_syntax_error_of_a_file_is_a_mistake() -> None:
    bench = Bench()
    bench.run("p0", "p1")
    for _ in range(2):
        assert bench.status().phase is not JobPhase.FAILED
        fail(bench, EVERYWHERE, "SyntaxError: invalid syntax (model.py, line 3)", Cause.EXCEPTION, 7)
    assert bench.status().phase is JobPhase.FAILED


@pytest.mark.parametrize(
    ("tries", "is_over"),
    [
        pytest.param([EVERYWHERE] * 2, True, id="all ranks, twice"),
        pytest.param(HALVES, True, id="all ranks, some of them the second time"),
        pytest.param([EVERYWHERE[:1], EVERYWHERE[1:3], EVERYWHERE[3:]], True, id="all ranks, one after another"),
        pytest.param([EVERYWHERE[:3]] * 3, False, id="all but one"),
    ],
)
def test_a_script_has_given_up_once_each_rank_has_exited(tries: Tries, is_over: bool) -> None:
    bench = Bench()
    bench.run("p0", "p1")
    for workers in tries:
        assert bench.status().phase is not JobPhase.FAILED
        bench.all_are(RUNNING, bench.status().iteration, "p0", "p1")
        fail(bench, workers, "SystemExit: 3", Cause.BASE_EXCEPTION, 7)
    assert (bench.status().phase is JobPhase.FAILED) is is_over


def _is_in(world: tuple[str, ...], uid: str, local_rank: int | None) -> bool:
    return uid in world and local_rank == 0


def test_who_has_exited_and_is_replaced_gives_nothing_up() -> None:
    """Handlers of SIGTERM call sys.exit, and a cluster takes one pod after another."""
    history = History()
    for number, world in enumerate((("a", "b"), ("b", "c"), ("c", "d"), ("d", "d2"))):
        history.open(float(number), number, 2, is_barren=True)
        history.add(FaultRecord(Cause.BASE_EXCEPTION, world[0], 0, float(number), detail="SystemExit: 143"))
        assert history.num_same == number + 1
        assert not history.is_mistake(partial(_is_in, world), 2)
        if number < 3:
            history.abandon()
    history.add(FaultRecord(Cause.BASE_EXCEPTION, "d2", 0, 3.0, detail="SystemExit: 143"))
    assert history.is_mistake(partial(_is_in, ("d", "d2")), 2)
    assert not history.is_mistake(partial(_is_in, ("d", "d2")), 3)


def test_no_more_than_64_mistakes_of_one_recovery_are_told_apart() -> None:
    history = History()
    incident = history.open(0.0, 0, 2000)
    for number in range(2000):
        history.add(
            FaultRecord(Cause.EXCEPTION, "a", number, 0.0, detail=f"NameError: name 'x{number}' is not defined")
        )
    history.add(FaultRecord(Cause.EXCEPTION, "b", 0, 0.0, detail="NameError: name 'x0' is not defined"))
    assert len(incident._by_mistake) == 64
    assert incident.same_workers == {("a", 0), ("b", 0)}


def test_the_same_words_from_another_line_are_another_mistake() -> None:
    bench = Bench()
    bench.run("p0", "p1")
    for line in (7, 8, 8):
        assert bench.status().phase is not JobPhase.FAILED
        bench.all_are(RUNNING, bench.status().iteration, "p0", "p1")
        fail(bench, EVERYWHERE, MISTAKE, Cause.EXCEPTION, line)
    assert bench.status().phase is JobPhase.FAILED
