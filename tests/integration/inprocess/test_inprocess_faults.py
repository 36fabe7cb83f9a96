"""Real workers, real gloo; the agent is played by agent_double."""

import signal
from pathlib import Path
from typing import Any

import pytest

from unbroken_core.pod import stamps
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

from .agent_double import AgentDouble, Policy

pytestmark = pytest.mark.timeout(400)
"""Above the sum of the double's own limits, which say what they waited for."""


def start(folder: Path, function: str, policy: Any, **variables: str) -> Any:
    """Return a double whose workloads know the files `go` and `done` in its folder."""
    return AgentDouble(
        folder, function, policy, {"TEST_GO": str(folder / "go"), "TEST_DONE": str(folder / "done"), **variables}
    )


def values(job: Any, name: str = "returned") -> list[Any]:
    """Return the values of these events, sorted."""
    return sorted(event.values["value"] for event in job.events(name))


def test_plan_that_was_interrupted_at_once_leaves_no_port_behind_that_others_may_have_written_to(
    tmp_path: Path,
) -> None:
    """2.9: every iteration has a store of its own, also one that began on some ranks only."""
    with start(tmp_path, "exception_once", Policy(2, 2, num_passed_over=3)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [f"value of {rank} in 3" for rank in (0, 1)]
        ready = [
            (rank, report.iteration, report.port) for rank, report in job.reports if report.phase is WorkerPhase.READY
        ]
        ports = {(rank, iteration): port for rank, iteration, port in ready}
        assert set(ports) >= {(rank, iteration) for rank in (0, 1) for iteration in (-1, 0, 1, 2)}
        for one in (0, 1):
            of_rank = [port for (rank, _), port in ports.items() if rank == one]
            assert len(set(of_rank)) == len(of_rank)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_exception_restarts_all_workers_in_their_processes(tmp_path: Path, num_workers: int) -> None:
    """2.4, 2.9, 2.20: value pass-through, restart after an exception, CallWrapper given by annotation."""
    with start(tmp_path, "exception_once", Policy(num_workers, num_workers)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [f"value of {rank} in 1" for rank in range(num_workers)]
        assert job.faults()[0] == (1, Cause.EXCEPTION)
        # In the first iteration a rank may be interrupted before it writes.
        started = [(event.rank, event.values["world"]) for event in job.events("started") if event.values["iteration"]]
        assert sorted(started) == [(rank, float(num_workers)) for rank in range(num_workers)]
        # 2.30: torch would end each process that has heard of an error of NCCL, a minute after its restart.
        assert {event.values["nccl"] for event in job.events("started")} == {"0"}
        fault = next(report.fault for _, report in job.reports if report.fault is not None)
        assert fault.detail == "ValueError: injected"
        assert "in train" in fault.stack[-1]


@pytest.mark.parametrize(
    "block",
    [
        "barrier",
        "monitored_barrier",
        "recv",
        "broadcast of objects",
        "new_group",
        "wait of an async all_reduce",
        "store",
        "sleep",
        "queue",
        "lock",
        "socket",
        "child process",
        "C function that a signal ends",
        "python",
    ],
)
def test_blocked_rank_is_freed_wherever_it_blocks(tmp_path: Path, block: str) -> None:
    """2.10, 2.14: abort and interruption end every wait of the main thread."""
    with start(tmp_path, "blocked_in", Policy(3, 3), TEST_BLOCK=block) as job:
        job.wait_for_event("blocks", 3)
        (tmp_path / "go").touch()
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [3, 3, 3]
        assert job.faults()[0] == (1, Cause.EXCEPTION)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_worker_leaves_the_others_with_fewer_ranks(tmp_path: Path, victim: int) -> None:
    """2.24: losing rank 0, which serves the store, is a fault like any other."""
    with start(tmp_path, "steps", Policy(3, 3)) as job:
        job.wait_for_event("started", 3)
        job.kill(victim)
        job.wait_for_event("started", 5)
        (tmp_path / "done").touch()
        job.wait_for_end()
        assert values(job) == [2, 2]
        assert job.iteration == 1


def test_killed_worker_comes_back_in_a_new_process(tmp_path: Path) -> None:
    """The others keep their processes."""
    with start(tmp_path, "steps", Policy(3, 3, does_respawn=True)) as job:
        job.wait_for_event("started", 3)
        pids = {rank: worker.pid for rank, worker in job.workers.items()}
        job.kill(1)
        job.wait_for_event("started", 6)
        (tmp_path / "done").touch()
        job.wait_for_end()
        assert values(job) == [3, 3, 3]
        assert [rank for rank, worker in job.workers.items() if worker.pid != pids[rank]] == [1]
        assert [event.values["restart"] for event in job.events("started")] == ["0"] * 3 + ["1"] * 3


def test_spare_costs_nothing_and_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    """0.4, 2.27: spares wait for the end of the job, and return None."""
    with start(tmp_path, "steps", Policy(2, 4)) as job:
        job.wait_for_event("started", 2)
        job.kill(0)
        job.wait_for_event("started", 4)
        (tmp_path / "done").touch()
        job.wait_for_end()
        returned = [event.values["value"] for event in job.events("returned")]
        assert sorted(returned, key=str) == [2, 2, None]


def test_worker_has_made_a_group_before_it_is_needed(tmp_path: Path) -> None:
    """2.27: of itself alone, once, also a spare; its function finds nothing of it."""
    with start(tmp_path, "counted_groups", Policy(2, 3)) as job:
        job.wait_for_event("started", 2)
        job.wait_for_event("made", 5)
        job.kill(0)
        job.wait_for_event("started", 4)
        (tmp_path / "done").touch()
        job.wait_for_end()
        # Of the worker that lives on and of the spare; the first two events are those before the kill.
        second = [event.values for event in job.events("started")][2:]
        assert sorted((values["made"] for values in second), key=len) == [[1, None], [1, None, None]]
        assert all(values["is_clean"] for values in second)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_worker_lost_while_the_others_connect_to_it_holds_nobody_up(tmp_path: Path, victim: int) -> None:
    """A second fault during the recovery, before the group exists."""
    with start(tmp_path, "lost_before_connecting", Policy(4, 4), TEST_VICTIM=str(victim)) as job:
        job.wait_for_event("victim")
        job.wait_for_event("connects", 4 + 3)
        (tmp_path / "go").touch()
        codes = job.wait_for_end()
        assert sorted(codes.values()) == [-9, 0, 0, 0]
        assert values(job) == [3, 3, 3]


def test_worker_that_connects_to_a_store_whose_server_died_is_freed(tmp_path: Path) -> None:
    """2.24: torch alone tries again for 30 minutes, and nothing ends that."""
    with start(tmp_path, "store_is_gone", Policy(3, 3, does_interrupt=False)) as job:
        job.wait_for_event("waits", 3)
        server = next(rank for rank, worker in job.workers.items() if worker.rank == 0)
        job.kill(server)
        job.wait_for(lambda: server not in job.workers, "the server's end")
        (tmp_path / "go").touch()
        job.wait_for_event("connects", 2)
        job.leave(Cause.PROCESS_SIGNAL)
        job.wait_for_end()
        assert values(job) == [2, 2]


@pytest.mark.parametrize("how", ["holding the GIL", "stopped", "in C", "in an atomic section", "in finally"])
def test_hang_that_cannot_be_interrupted_costs_only_the_hanging_process(tmp_path: Path, how: str) -> None:
    """2.22, 2.23: the others are freed at the soft timeout; who is still stuck at the hard one is ended."""
    policy = Policy(3, 3, does_respawn=True, soft_s=1.2, hard_s=1.8)
    with start(tmp_path, "hangs", policy, TEST_HANG=how) as job:
        job.wait_for_event("hangs")
        pids = {rank: worker.pid for rank, worker in job.workers.items()}
        job.wait_for_end()
        assert values(job) == [3, 3, 3]
        assert [rank for rank, worker in job.workers.items() if worker.pid != pids[rank]] == [1]
        # What the healthy ranks waited for is in their logs.
        logged = job.output()
        assert "hang: cause=soft-timeout" in logged
        assert "waits.py" in logged.partition("this rank stands at")[2]
        assert "in all_reduce" in logged


def test_worker_whose_loop_of_gloo_never_sleeps_is_freed(tmp_path: Path) -> None:
    """2.20: gloo's thread spins on a write that fails while the peer lives; the peer's end would free it."""
    with start(tmp_path, "write_that_fails", Policy(2, 2, does_interrupt=False)) as job:
        job.wait_for_event("writes")
        pids = {rank: worker.pid for rank, worker in job.workers.items()}
        job.leave()
        job.wait_for(lambda: has_left(job, 0), "rank 0 out of the barrier")
        job.kill(1, signal.SIGCONT)
        job.wait_for_end()
        assert values(job) == [2, 2]
        assert {rank: worker.pid for rank, worker in job.workers.items()} == pids


@pytest.mark.parametrize("what", ["connection", "answer"])
def test_worker_that_gloo_lets_wait_for_a_peer_is_freed(tmp_path: Path, what: str) -> None:
    """2.10: a peer that was lost after it had told its address: there is no connection to shut, and gloo waits on."""
    policy = Policy(2, 2, does_interrupt=False)
    variables = {"TEST_FOLDER": str(tmp_path), "TEST_WAITS_FOR": what}
    with start(tmp_path, "peer_that_is_lost_while_a_group_is_formed", policy, **variables) as job:
        job.wait_for_event("connects")
        pids = {rank: worker.pid for rank, worker in job.workers.items()}
        job.leave()
        job.wait_for_end()
        assert values(job) == [2, 2]
        assert {rank: worker.pid for rank, worker in job.workers.items()} == pids
        assert not job.events("freed")[0].values["has_looked_up_names"], "a rescue imports nothing"


def has_left(job: AgentDouble, rank: int) -> bool:
    """Return whether a worker has said that it has left the first iteration."""
    report = job.workers[rank].report
    return report is not None and report.phase is WorkerPhase.READY and report.iteration == 0


@pytest.mark.parametrize("how", ["sleeps", "collective", "computes"])
def test_loop_that_swallows_every_exception_is_left(tmp_path: Path, how: str) -> None:
    """`except BaseException: pass` in a loop does not defeat a restart."""
    with start(tmp_path, "stubborn", Policy(3, 3), TEST_LOOP=how) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [3, 3, 3]
        told = [line for line in job.output().splitlines() if "a handler swallowed RankShouldRestart" in line]
        assert len(told) <= 2, "once by each rank that swallows, 0 and 2; one outside of its `try` swallows nothing"
        # In the script, in what it calls, or in torch.
        assert all("/workloads/" in line or "/torch/" in line for line in told)


def test_clean_up_of_the_function_runs_to_its_end(tmp_path: Path) -> None:
    """`finally` blocks are not interrupted a second time."""
    with start(tmp_path, "cleans_up", Policy(2, 2)) as job:
        job.wait_for_event("blocks")
        (tmp_path / "go").touch()
        job.wait_for_end()
        assert values(job) == [2, 2]
        names = [event.name for event in job.events() if event.name != "returned"]
        assert names == ["blocks", "first begins", "first ends", "second ends"]


def test_atomic_section_ends_before_the_interruption_and_none_begins_after(tmp_path: Path) -> None:
    """2.7: atomic is reentrant, holds the termination off, and is not entered during it."""
    with start(tmp_path, "atomic", Policy(2, 2)) as job:
        job.wait_for_event("enters")
        (tmp_path / "go").touch()
        job.wait_for(lambda: bool(job.leaves), "an interruption")
        (tmp_path / "done").touch()
        job.wait_for_end()
        assert values(job) == [2, 2]
        assert [event.name for event in job.events() if event.name != "returned"] == [
            "enters",
            "leaves",
            "not entered again",
        ]


@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ("three arguments", "ThreeArguments: (its text cannot be shown)"),
        ("huge", "ValueError: xxxx"),
        ("stop iteration", "StopIteration"),
    ],
)
def test_odd_exception_is_a_fault_like_any_other(tmp_path: Path, what: str, detail: str) -> None:
    """0.46: an exception that cannot be copied, of any size, restarts the function."""
    with start(tmp_path, "odd_exception", Policy(2, 2), TEST_RAISE=what) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [2, 2]
        fault = next(report.fault for _, report in job.reports if report.fault is not None)
        assert fault.detail.startswith(detail)
        assert len(fault.detail) <= 2000


@pytest.mark.parametrize(("what", "code"), [("system exit", 5), ("keyboard interrupt", 1)])
def test_base_exception_ends_the_worker_and_restarts_the_others(tmp_path: Path, what: str, code: int) -> None:
    """2.18: SystemExit and KeyboardInterrupt propagate; the others go on without this rank."""
    with start(tmp_path, "odd_exception", Policy(3, 3), TEST_RAISE=what) as job:
        assert sorted(job.wait_for_end().values()) == [0, 0, code]
        assert values(job) == [2, 2]
        # Not the first for sure: its end is one for the others, and the double may hear those of them sooner.
        assert [cause for rank, cause in job.faults() if rank == 1] == [Cause.BASE_EXCEPTION]
        assert len(job.events("raised")) == 1


def test_second_and_third_fault_during_a_recovery_are_recovered_too(tmp_path: Path) -> None:
    """Two ranks at once, one before the group exists, one right after."""
    with start(tmp_path, "raises_again_and_again", Policy(3, 3)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == [3, 3, 3]
        assert job.iteration == 3


def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """0.47, 2.17: descriptors, threads and memory stay flat; the failed frames' tensors are free before re-entry."""
    with start(tmp_path, "many_restarts", Policy(3, 3), TEST_RESTARTS="100") as job:
        job.wait_for_end()
        assert values(job) == [3, 3, 3]
        assert {event.values["alive"] for event in job.events() if "alive" in event.values} == {0}
        for rank in range(3):
            held = [event.values for event in job.events("holds") if event.rank == rank]
            early, late = held[:3], held[3:]
            assert len(late) == 2
            for what in ("descriptors", "threads"):
                assert min(v[what] for v in late) <= max(v[what] for v in early), (what, held)
            growth = min(v["resident_bytes"] for v in late) - min(v["resident_bytes"] for v in early)
            assert growth < 8 << 20, held
        for event in job.events("returned"):
            assert event.values["threads"] == ["MainThread"]


def test_what_the_user_started_lives_through_a_restart(tmp_path: Path) -> None:
    """Threads, connections and signal handlers of the script are left alone."""
    with start(tmp_path, "bystanders", Policy(2, 2)) as job:
        job.wait_for_end()
        for event in job.events("returned"):
            assert {k: event.values[k] for k in ("value", "echo", "handled", "same")} == {
                "value": 2,
                "echo": "still",
                "handled": [signal.SIGTERM],
                "same": True,
            }


def test_forked_child_neither_speaks_for_its_parent_nor_keeps_its_connection(tmp_path: Path) -> None:
    """A data loader's process that lives on changes nothing."""
    with start(tmp_path, "forks", Policy(2, 2)) as job:
        (child,) = job.wait_for_event("child")
        (parent,) = job.wait_for_event("forked")
        page = (tmp_path / "stamps").read_bytes()
        slot = stamps.unpack_slot(page, int(parent.values["local"]))
        assert (slot.step, slot.pid) == (-1, job.workers[int(parent.values["local"])].pid)
        assert child.values["sockets"] < parent.values["sockets"]
        (tmp_path / "go").touch()
        job.wait_for_event("returned", 2)
        (tmp_path / "done").touch()
        job.wait_for_end()
        assert values(job) == [2, 2]


def test_agent_that_restarts_does_not_disturb_training_and_learns_all_again(tmp_path: Path) -> None:
    """Design, 5.4: the worker connects again and says what it is; faults during the absence are told afterwards."""
    with start(tmp_path, "steps", Policy(2, 2)) as job:
        job.wait_for_event("started", 2)
        # The first progress of an iteration is the last thing that a healthy worker tells on its own.
        job.wait_for(lambda: all(w.report is not None and w.report.has_progress for w in job.workers.values()), "steps")
        told = len(job.reports)
        job.break_connections()
        job.wait_for(lambda: {rank for rank, _ in job.reports[told:]} == {0, 1}, "both tell their state again")
        assert {(rank, report.phase, report.iteration, report.has_progress) for rank, report in job.reports[told:]} == {
            (0, WorkerPhase.RUNNING, 0, True),
            (1, WorkerPhase.RUNNING, 0, True),
        }
        job.kill(0)
        job.wait_for_event("started", 3)
        (tmp_path / "done").touch()
        job.wait_for_end()
        assert values(job) == [1]


def test_worker_without_an_agent_for_too_long_leaves_and_tells_why(tmp_path: Path) -> None:
    """Others may have its ranks by then, and both would save; who has completed keeps what it has."""
    with start(tmp_path, "finishes_at_different_times", Policy(2, 2, alone_s=0.2)) as job:
        job.wait_for(lambda: job.workers[0].phase is WorkerPhase.COMPLETED, "rank 0 completed")
        told = len(job.reports)
        job.break_connections(does_come_back=False)
        job.wait_for(lambda: "no agent has heard the rendezvous for" in job.output(), "rank 1 leaves")
        job.come_back()
        job.wait_for(lambda: job.iteration == 1, "another iteration")
        phases = {rank: report.phase for rank, report in reversed(job.reports[told:]) if report.iteration == 0}
        assert phases[0] is WorkerPhase.COMPLETED
        assert job.faults() == [(1, Cause.HEARTBEAT_LOST)]
        (tmp_path / "go").touch()
        job.wait_for_end()
        assert len(job.events("returned")) == 2


def test_worker_that_finished_runs_again_when_another_one_fails(tmp_path: Path) -> None:
    """2.11: a value counts once all active workers have returned."""
    with start(tmp_path, "finishes_at_different_times", Policy(2, 2)) as job:
        job.wait_for(lambda: job.workers[0].phase is WorkerPhase.COMPLETED, "rank 0 completed")
        (tmp_path / "go").touch()
        job.wait_for_end()
        assert values(job) == ["0 in 1", "1 in 1"]


def test_script_without_a_process_group_restarts_as_well(tmp_path: Path) -> None:
    """Nothing to abort is no error."""
    with start(tmp_path, "no_collectives", Policy(2, 2)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert values(job) == ["done", "done"]
