"""The parts of the wrapper that decide without a socket."""

import builtins
import contextlib
import dataclasses
import gc
import os
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from unbroken import inprocess, restored_to
from unbroken.agent.adapters.stamp_page import StampPage
from unbroken.inprocess import exception
from unbroken.inprocess.attribution import Interruption, InterruptionRecord, format_interruption_records
from unbroken.inprocess.connections.sockets import shut_gloo_connections
from unbroken.inprocess.exception import NoAgentError, RestartAbort, RestartError
from unbroken.inprocess.health_check import FaultCounter, FaultCounterExceeded
from unbroken.inprocess.initialize import RetryController
from unbroken.inprocess.interruption import failure
from unbroken.inprocess.interruption.gate import Gate, RankShouldRestart
from unbroken.inprocess.interruption.stacks import describe_threads, log_hang
from unbroken.inprocess.loop.call import WrappedCall
from unbroken.inprocess.loop.plan_state import state_in
from unbroken.inprocess.pod.environment import (
    NCCL_ERRORS_END_PROCESS,
    PodContext,
    export,
    read_pod_context,
    survive_nccl_errors,
    variables,
)
from unbroken.inprocess.pod.link import AgentLink, AgentOrders
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
)
from unbroken.inprocess.state import FrozenState, Mode, State
from unbroken.inprocess.torch_state import leftovers
from unbroken.inprocess.torch_state.deferred_destroyer import MAX_DESTROYING, DeferredDestroyer
from unbroken.inprocess.torch_state.leftovers import Leftovers
from unbroken.standstill import standstill
from unbroken_core.pod import stamps
from unbroken_core.pod.pod_messages import Attach, Enter, Leave, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Fault
from unbroken_core.vocabulary.checkpoints import Candidate, Restore
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

PLACE = PodContext(Path("/run/pod"), local_rank=1, incarnation=0, local_world_size=2, pod_address="127.0.1.2")


def enter(iteration: int, rank: int | None = 3) -> Enter:
    """Return a plan."""
    return Enter(term=1, iteration=iteration, rank=rank, world_size=4, master_host="127.0.1.1", master_port=4000)


def leave(iteration: int) -> Leave:
    """Return an end."""
    return Leave(iteration, Cause.EXCEPTION, 0, "")


def assign(step: Any, rank: int, world_size: int, dead: set[int]) -> State:
    """Return the state after one step."""
    state: State = step(RankAssignmentCtx(State(rank=rank, world_size=world_size), None, set(dead))).state
    return state


def test_shift_ranks_keeps_the_order_and_discards_the_dead() -> None:
    """0.1, 0.2, 0.5, 0.10, 0.11"""
    dead = {1, 4, 5}
    survivors = [assign(ShiftRanks(), rank, 8, dead) for rank in range(8) if rank not in dead]
    assert [(state.rank, state.world_size) for state in survivors] == [(rank, 5) for rank in range(5)]
    ctx = RankAssignmentCtx(State(rank=0, world_size=8), None, set(dead))
    assert ShiftRanks()(ctx) is ctx
    assert ctx.terminated_ranks == set()
    for rank in dead:
        with pytest.raises(
            RankDiscarded, match=rf"rank {rank} was discarded: terminated ranks are \[1, 4, 5\]"
        ) as caught:
            assign(ShiftRanks(), rank, 8, dead)
        assert isinstance(caught.value, RestartError)


def test_all_ranks_are_activated() -> None:
    """0.6"""
    state = assign(ActivateAllRanks(), 2, 4, set())
    assert (state.mode, state.active_rank, state.active_world_size) == (Mode.ACTIVE, 2, 4)


@pytest.mark.parametrize(
    ("limit", "rank", "expected"),
    [(2, 1, (Mode.ACTIVE, 1, 2)), (2, 2, (Mode.INACTIVE, None, 2)), (None, 3, (Mode.ACTIVE, 3, 4))],
)
def test_active_world_is_limited(limit: int | None, rank: int, expected: tuple[Mode, int | None, int]) -> None:
    """0.7, 0.8"""
    state = assign(MaxActiveWorldSize(limit), rank, 4, set())
    assert (state.mode, state.active_rank, state.active_world_size) == expected
    assert state.world_size == 4


def test_active_world_is_a_multiple_also_after_a_limit() -> None:
    """0.9: chains, and the result may be 0."""
    chain = inprocess.Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(3))
    assert assign(chain, 1, 4, set()).active_world_size == 2
    assert assign(ActiveWorldSizeDivisibleBy(8), 1, 4, set()).active_world_size == 0


def test_compose_calls_from_right_to_left_and_is_of_the_common_class() -> None:
    """2.1: a composition passes the type check of its parts."""
    calls: list[str] = []

    class One(inprocess.initialize.Initialize):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, state: FrozenState) -> FrozenState:
            calls.append(self.name)
            return state

    composed = inprocess.Compose(One("a"), One("b"), RetryController())
    state = State(rank=0, world_size=1, active_world_size=1).freeze()
    assert composed(state) is state
    assert calls == ["b", "a"]
    assert isinstance(composed, inprocess.initialize.Initialize)
    inprocess.Wrapper(initialize=composed)
    with pytest.raises(TypeError, match="want at least one callable"):
        inprocess.Compose()


def test_frozen_state_rejects_mutation_and_carries_any_exception() -> None:
    """0.46, 2.20: the exception is handed over, not copied."""

    class ThreeArguments(Exception):
        def __init__(self, one: int, two: int, three: int) -> None: ...

    error = ThreeArguments(1, 2, 3)
    frozen = State(rank=0, world_size=2, fn_exception=error).freeze()
    assert frozen.fn_exception is error
    assert frozen.without_exception().fn_exception is None
    with pytest.raises(AttributeError):
        frozen.rank = 1  # type: ignore[misc] # what mypy forbids is what must fail


def test_state_advances_and_forgets_the_exception() -> None:
    """0.4, 2.17"""
    state = State(rank=1, world_size=2, fn_exception=ValueError())
    state.advance()
    assert (state.iteration, state.fn_exception, state.initial_rank, state.initial_world_size) == (1, None, 1, 2)


@pytest.mark.parametrize(
    ("controller", "text"),
    [
        (RetryController(max_iterations=4), "max_iterations: want an iteration below 4, got 4"),
        (RetryController(min_world_size=9), "min_world_size: want at least 9, got 8"),
        (RetryController(min_active_world_size=7), "min_active_world_size: want at least 7, got 6"),
    ],
)
def test_retry_controller_ends_the_call_past_its_limits(controller: RetryController, text: str) -> None:
    """2.20"""
    with pytest.raises(RestartAbort, match=text):
        controller(State(rank=0, world_size=8, active_world_size=6, iteration=4).freeze())
    state = State(rank=0, world_size=9, active_world_size=9, iteration=3).freeze()
    assert controller(state) is state


def test_fault_counter_counts_only_this_process() -> None:
    """2.20"""
    counter = FaultCounter(max_rank_faults=1)
    calm, failed = State(rank=0, world_size=1).freeze(), State(rank=0, world_size=1, fn_exception=ValueError()).freeze()
    for state in (calm, failed, calm):
        counter(state)
    with pytest.raises(FaultCounterExceeded, match="want at most 1, got 2"):
        counter(failed)


def test_interruption_record_reads_its_own_text() -> None:
    """2.21"""
    record = InterruptionRecord(3, Interruption.SOFT_TIMEOUT)
    assert InterruptionRecord.from_str(repr(record)) == record
    with pytest.raises(ValueError, match="want the text of its repr"):
        InterruptionRecord.from_str("rank=1")
    text = format_interruption_records([record, InterruptionRecord(1, Interruption.SOFT_TIMEOUT)])
    assert text == "Interruption.SOFT_TIMEOUT on ranks=[1, 3]"


def test_variables_are_those_of_torchrun() -> None:
    """2.8"""
    assert variables(PLACE, enter(iteration=2), "job") == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.1.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_RUN_ID": "job",
        "UNBROKEN_TERM": "1",
        "UNBROKEN_POD_FOLDER": str(PLACE.folder),
    }


def test_what_all_go_back_to_is_handed_over_outside_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc keeps every value that a variable ever had, and this one has some KiB in each iteration."""
    monkeypatch.setattr(os, "environ", {restored_to.VARIABLE: "of the iteration before"})
    monkeypatch.setattr(restored_to, "told", restored_to.Told())
    restore = Restore((Candidate(1, 2, 3, 4),), reason="r" * 4000)
    export(PLACE, dataclasses.replace(enter(iteration=2), restore=restore))
    assert restored_to.told.restore == restore
    assert restored_to.VARIABLE not in os.environ
    assert max(map(len, os.environ.values())) < 200
    export(PLACE, enter(iteration=3))
    assert restored_to.told.restore is None


@pytest.mark.parametrize(
    ("value", "is_warned"), [(None, False), ("0", False), ("False", False), ("1", True), ("yes", True)]
)
def test_torch_is_to_leave_the_process_alone_when_nccl_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None, is_warned: bool
) -> None:
    """2.30: unless the user has said otherwise, and then says what comes of it."""
    monkeypatch.setenv(NCCL_ERRORS_END_PROCESS, "")
    if value is None:
        monkeypatch.delenv(NCCL_ERRORS_END_PROCESS)
    else:
        monkeypatch.setenv(NCCL_ERRORS_END_PROCESS, value)
    survive_nccl_errors()
    assert os.environ[NCCL_ERRORS_END_PROCESS] == (value or "0")
    assert (f"after a restart: {NCCL_ERRORS_END_PROCESS}={value}, want 0" in caplog.text) == is_warned


def test_place_needs_the_launchers_variables() -> None:
    """Bad input says which variable."""
    with pytest.raises(NoAgentError, match="UNBROKEN_LOCAL_RANK: want a number"):
        read_pod_context({"UNBROKEN_DIR": "/x", "UNBROKEN_LOCAL_RANK": "one"})


@pytest.mark.parametrize(
    ("orders", "is_over"),
    [
        (AgentOrders(), False),
        (AgentOrders(enter=enter(2)), False),
        (AgentOrders(enter=enter(2), leave=leave(1)), False),
        (AgentOrders(enter=enter(2), leave=leave(2)), True),
        (AgentOrders(enter=enter(3)), True),
    ],
)
def test_iteration_is_over_by_an_end_or_by_a_newer_plan(orders: AgentOrders, is_over: bool) -> None:
    """A Leave that was missed while the agent restarted changes nothing."""
    assert orders.has_left(2) is is_over


def test_dropped_exception_frees_the_locals_of_its_frames() -> None:
    """0.47, 2.17: also those of its cause, its context and a group's members."""
    import weakref

    class Tensor: ...

    alive: list[weakref.ref[Tensor]] = []

    def fail() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        raise ValueError("inner")

    def chain() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        try:
            fail()
        except ValueError as error:
            raise RuntimeError("outer") from error

    kept: list[BaseException] = []
    try:
        chain()
    except RuntimeError as error:
        kept.append(error)
    assert [reference() is None for reference in alive] == [False, False]
    failure.drop(kept[0])
    assert [reference() is None for reference in alive] == [True, True]


def test_fault_is_described_in_one_bounded_line() -> None:
    """0.46: whatever the exception's class does."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert failure.describe(Odd()) == "Odd: (its text cannot be shown)"
    assert failure.describe(ValueError("two\nlines")) == "ValueError: two lines"
    assert len(failure.describe(ValueError("x" * 10_000))) == 2000
    assert failure.describe(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_group_of_exceptions_is_described_by_its_own_words_and_the_last_one_in_it() -> None:
    group: Any = vars(builtins)["ExceptionGroup"]

    class Odd(group):  # type: ignore[misc]  # Python 3.10 has no such class
        exceptions = property(lambda self: 1 / 0)

    inner = group("of a shard", [KeyError("b")])
    assert failure.describe(Odd("loaders", [ValueError("a"), inner])) == (
        "Odd: loaders (2 sub-exceptions) ... KeyError: 'b'"
    )
    deep: BaseException = ValueError("a")
    for _ in range(5_000):
        deep = group("one", [deep])
    assert failure.describe(deep) == "ExceptionGroup: one (1 sub-exception) ... ExceptionGroup: one (1 sub-exception)"
    assert len(failure.describe(group("x" * 10_000, [ValueError("a")]))) == 2000


def test_an_error_is_shown_without_frames_and_others_with_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    def raised(text: str) -> RestartAbort:
        with pytest.raises(RestartAbort, match=text) as found:
            raise RestartAbort(text)
        return found.value

    before = sys.excepthook
    error = raised("the job has failed")
    failure.show_without_frames(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == "unbroken.inprocess.exception.RestartAbort: the job has failed\n"
        other = raised("boom")
        sys.excepthook(type(other), other, other.__traceback__)
        assert "Traceback" in capsys.readouterr().err
    finally:
        sys.excepthook = before


def test_stacks_show_the_scripts_threads_and_not_the_librarys() -> None:
    """What a rank did when a hang was broken: its main thread first, innermost frame last."""
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, name=name) for name in ("loader", "unbroken-link")]
    for thread in threads:
        thread.start()
    try:
        lines = describe_threads().splitlines()
    finally:
        go.set()
        for thread in threads:
            thread.join()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0] == "thread MainThread, innermost last:"
    assert "thread loader, innermost last:" in heads
    assert not [head for head in heads if "unbroken-" in head]
    of_main = lines[1 : lines.index(heads[1])]
    assert f"{__file__}:" in of_main[-2]
    assert of_main[-1].endswith("in describe_threads")


@pytest.mark.parametrize(
    ("leave", "is_logged"),
    [
        (None, False),
        (Leave(4, Cause.SOFT_TIMEOUT, 1, ""), False),
        (Leave(5, Cause.EXCEPTION, 1, ""), False),
        (Leave(5, Cause.SOFT_TIMEOUT, 1, ""), True),
    ],
)
def test_only_a_hang_of_this_iteration_logs_stacks(
    leave: Leave | None, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception has its own traceback."""
    log_hang(leave, 5)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == (
        ["hang: cause=soft-timeout iteration=5"] if is_logged else []
    )


def read_slot(path: Path) -> stamps.WorkerStamps:
    """Return slot 1."""
    return stamps.unpack_slot(path.read_bytes(), 1)


def test_progress_writes_its_slot_and_no_other(tmp_path: Path) -> None:
    """2.7, 2.23: flags say when timeouts apply; the first ping of an iteration arms the manual timeout."""
    path = tmp_path / "stamps"
    path.write_bytes(stamps.pack_header(3).ljust(stamps.page_bytes(3), b"\0"))
    progress = ProgressSlot(local_rank=1, incarnation=4)
    assert progress.ping(1) is False
    progress.attach(path)
    assert (read_slot(path).incarnation, read_slot(path).flags, read_slot(path).step) == (4, 0, -1)
    progress.begin(iteration=7)
    assert (read_slot(path).iteration, read_slot(path).flags) == (7, stamps.FLAG_IN_FUNCTION)
    assert [progress.ping(5), progress.arm(), progress.ping(6), progress.arm()] == [True, True, False, False]
    assert read_slot(path).flags == stamps.FLAG_IN_FUNCTION | stamps.FLAG_PING_ARMED
    assert (read_slot(path).step, read_slot(path).ping_ns > 0) == (6, True)
    progress.set_protection(is_on=False)
    assert read_slot(path).flags & stamps.FLAG_PROTECTION_OFF
    with standstill.measured():
        pass
    first_ns = read_slot(path).checkpoint_ns
    with standstill.measured(), standstill.measured():
        pass
    assert read_slot(path).checkpoint_ns > first_ns > 0
    progress.begin(iteration=8)
    assert read_slot(path).checkpoint_ns == 0, "each iteration tells its own"
    progress.end()
    with standstill.measured():
        pass
    assert read_slot(path).checkpoint_ns == 0, "what comes after the function holds nobody up"
    assert read_slot(path).flags == 0
    page = path.read_bytes()
    assert stamps.unpack_slot(page, 0) == stamps.unpack_slot(page, 2) == stamps.WorkerStamps(0, 0, 0, 0, 0, 0, 0, 0)


def test_progress_stops_in_a_forked_child_and_refuses_a_strange_page(tmp_path: Path) -> None:
    """A child's stamps would say that its parent lives."""
    path = tmp_path / "stamps"
    path.write_bytes(stamps.pack_header(2).ljust(stamps.page_bytes(2), b"\0"))
    progress = ProgressSlot(local_rank=1, incarnation=0)
    progress.attach(path)
    progress.begin(0)
    before = path.read_bytes()
    progress.forget()
    progress.ping(9)
    progress.beat()
    assert path.read_bytes() == before
    path.unlink()
    path.write_bytes(struct.pack("<2Q", 1, 1).ljust(4096, b"\0"))
    with pytest.raises(inprocess.exception.InternalError, match="want a page of stamps with slot 1"):
        ProgressSlot(local_rank=1, incarnation=0).attach(path)


def test_leaving_the_wrapper_ends_all_that_it_started_and_may_be_repeated(tmp_path: Path) -> None:
    """2.6"""

    def holdings() -> set[object]:
        handlers = [(number, signal.getsignal(number)) for number in signal.valid_signals()]
        descriptors = [path.name for path in Path("/proc/self/fd").iterdir()]
        return {*descriptors, *handlers, *threading.enumerate()}

    def call() -> WrappedCall:
        return WrappedCall(inprocess.Wrapper().options, PodContext(tmp_path, 0, 0, 1, "127.0.0.1"))

    first = call()
    first.open()
    first.close()
    before = holdings()  # What torch itself opens once is open now.
    second = call()
    second.open()
    assert {"unbroken-link", "unbroken-monitor"} <= {thread.name for thread in threading.enumerate()}
    # What tests before this one left behind may end meanwhile.
    second.close()
    assert holdings() - before == set()
    second.close()
    assert holdings() - before == set()


def test_iteration_whose_end_is_heard_just_before_it_begins_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.13: the end is told once, and nobody would end the function later."""
    call = WrappedCall(inprocess.Wrapper().options, PodContext(tmp_path, 0, 0, 1, "127.0.0.1"))

    @contextlib.contextmanager
    def told_meanwhile() -> Iterator[None]:
        call._link._obey(Leave(0, Cause.EXCEPTION, None, "boom"))
        yield

    monkeypatch.setattr("unbroken.inprocess.loop.call.interruptible_env", told_meanwhile)
    call.open()
    try:
        call._iteration = 0
        call._state = state_in(Enter(1, 0, 0, 1, "127.0.0.1", 5000), None)
        ran: list[int] = []
        outcome = call._run_iteration(lambda: ran.append(1))
    finally:
        call.close()
    assert (ran, type(outcome.error)) == ([], RankShouldRestart)


def test_function_that_returned_is_not_interrupted_any_more() -> None:
    """2.13"""
    gate = Gate()
    gate.install()
    try:
        gate.reset()
        outcome = gate.run(lambda: "value")
        gate.leave("too late")
        gate.force_out(lambda: True)
        number = gate._signal_number
        signal.raise_signal(number)
        assert (outcome.value, outcome.error) == ("value", None)
    finally:
        gate.uninstall()


def stubborn(gate: Gate) -> None:
    """Swallow the first interruption."""
    gate.leave("over")
    with contextlib.suppress(BaseException):
        signal.raise_signal(gate._signal_number)
    signal.raise_signal(gate._signal_number)


def tidy(gate: Gate) -> None:
    """Let it pass, and clean up on the way."""
    gate.leave("over")
    try:
        signal.raise_signal(gate._signal_number)
    finally:
        signal.raise_signal(gate._signal_number)


@pytest.mark.parametrize(("function", "named"), [(stubborn, "in stubborn"), (tidy, "")])
def test_a_handler_that_swallows_the_interruption_is_named_and_one_that_cleans_up_is_not(
    function: Callable[[Gate], None], named: str
) -> None:
    gate = Gate()
    gate.install()
    try:
        gate.reset()
        outcome = gate.run(lambda: function(gate))
    finally:
        gate.uninstall()
    assert isinstance(outcome.error, RankShouldRestart)
    assert gate.swallowed_at.endswith(named)
    assert bool(gate.swallowed_at) is bool(named)


def test_agent_that_is_away_for_too_long_is_named(tmp_path: Path) -> None:
    """2.12"""
    link = AgentLink(tmp_path, Attach(PROTOCOL, "worker", os.getpid(), 0, 0), ProgressSlot(0, 0), beat_s=1.0)
    link.start(lambda _: None, lambda _: None)
    try:
        with pytest.raises(
            exception.TimeoutError, match=r"end of the iteration: no agent at .*agent\.sock has .*\(limit 0\.05 s\)"
        ):
            link.wait(lambda _: False, 0.05, "end of the iteration")
    finally:
        link.close()


def test_report_that_may_wait_goes_before_the_next_one_or_when_all_is_quiet(tmp_path: Path) -> None:
    """The agent hears all phases of a worker in their order, whatever is put off."""
    link = AgentLink(tmp_path, Attach(PROTOCOL, "worker", os.getpid(), 0, 0), ProgressSlot(0, 0), beat_s=1.0)
    mine, agents = socket.socketpair()
    running = [WorkerReport(WorkerPhase.RUNNING, iteration) for iteration in range(3)]
    stopping = WorkerReport(WorkerPhase.STOPPING, 1)
    enter = Enter(1, 1, 0, 1, "127.0.0.1", 29500)

    def heard() -> list[WorkerReport]:
        try:
            return [wire.decode(line, WorkerReport) for line in agents.recv(1 << 16).splitlines()]
        except BlockingIOError:
            return []

    with mine, agents:
        agents.setblocking(False)
        link._socket = mine
        link.report(running[0], may_wait=True)
        assert heard() == running[:1], "nobody would look after it"
        link._obey(enter)
        link.report(running[1], may_wait=True)
        assert heard() == []
        link.report(stopping)
        assert heard() == [running[1], stopping]
        link._obey(dataclasses.replace(enter, iteration=2))
        link.report(running[2], may_wait=True)
        link._settle()
        assert heard() == running[2:]
        link._settle()
        assert heard() == []
        link._socket = None
    link.close()


@contextlib.contextmanager
def _agent_heard(folder: Path, link: AgentLink) -> Iterator[BinaryIO]:
    """Be the agent that a link finds when it starts; yields what the link says."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "agent.sock"))
        listener.listen()
        StampPage(folder / "stamps", 1).close()
        link.start(lambda _: None, lambda _: None)
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            yield lines


def test_report_that_was_put_off_is_the_first_that_a_new_agent_hears(tmp_path: Path) -> None:
    """It joins with what the worker is, not with what the agent before it was told last; and hears it once."""
    link = AgentLink(tmp_path, Attach(PROTOCOL, "worker", os.getpid(), 0, 0), ProgressSlot(0, 0), beat_s=1.0)
    link.report(WorkerReport(WorkerPhase.READY, 0))
    link._obey(Enter(1, 1, 0, 1, "127.0.0.1", 29500))
    link.report(WorkerReport(WorkerPhase.RUNNING, 1), may_wait=True)
    with _agent_heard(tmp_path, link) as lines:
        attach, first = lines.readline(), lines.readline()
        link.report(WorkerReport(WorkerPhase.COMPLETED, 1))
        second = lines.readline()
    link.close()
    assert wire.decode(attach, Attach).role == "worker"
    phases = [wire.decode(line, WorkerReport).phase for line in (first, second)]
    assert phases == [WorkerPhase.RUNNING, WorkerPhase.COMPLETED]


def _orders_without_agent(folder: Path, alone_s: float, *lost_s: float | None) -> tuple[AgentOrders, AgentOrders]:
    """Return what a worker in an iteration obeys before and after it loses an agent that told it this."""
    link = AgentLink(folder, Attach(PROTOCOL, "worker", os.getpid(), 0, 0), ProgressSlot(0, 0), beat_s=1.0)
    mine, agents = socket.socketpair()
    enter = Enter(1, 1, 0, 1, "127.0.0.1", 29500, alone_s=alone_s)
    with mine, agents:
        link._socket = mine
        link._obey(enter)
        link.report(WorkerReport(WorkerPhase.RUNNING, 1))
        for one_s in lost_s:
            link._obey(dataclasses.replace(enter, lost_s=one_s))
        link._leave_when_alone()
        before = link.orders
        link._drop_connection()
        link._leave_when_alone()
    link.close()
    return before, link.orders


def test_worker_counts_from_when_its_agent_lost_the_rendezvous(tmp_path: Path) -> None:
    """The agent may have waited nearly as long as it may when it ends."""
    before, after = _orders_without_agent(tmp_path, 60.0, 61.0)
    assert before.leave is None, "its agent is there, and decides"
    assert after.leave is not None
    assert (after.leave.iteration, after.leave.cause) == (1, Cause.HEARTBEAT_LOST)


@pytest.mark.parametrize(
    "lost_s", [pytest.param((1800.0,), id="not long enough"), pytest.param((3601.0, None), id="heard again")]
)
def test_worker_that_was_out_of_touch_for_a_shorter_time_stays(
    tmp_path: Path, lost_s: tuple[float | None, ...]
) -> None:
    _before, after = _orders_without_agent(tmp_path, 3600.0, *lost_s)
    assert after.leave is None


def test_process_without_torch_has_no_connection_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that does not use it is interrupted again and again all the same."""
    monkeypatch.delitem(sys.modules, "torch._C", raising=False)
    assert shut_gloo_connections() == 0


def test_fault_is_told_to_a_later_agent_with_its_age(tmp_path: Path) -> None:
    link = AgentLink(tmp_path, Attach(PROTOCOL, "worker", os.getpid(), 0, 0), ProgressSlot(0, 0), beat_s=1.0)
    fault = Fault(Cause.EXCEPTION, 0, "ValueError: x")
    link.report(WorkerReport(WorkerPhase.STOPPING, 0, fault=fault))
    link._reported_s -= 5.0
    with _agent_heard(tmp_path, link) as lines:
        attach, last_word = lines.readline(), lines.readline()
    link.close()
    assert wire.decode(attach, Attach).role == "worker"
    heard = wire.decode(last_word, WorkerReport).fault
    assert heard.detect_s >= 5.0
    assert dataclasses.replace(heard, detect_s=0.0) == fault


def test_old_stores_are_destroyed_late_but_never_too_many_are_kept() -> None:
    """With the GIL held: those who join the next iteration must not wait for it."""

    class Store:
        """Something that can be watched."""

    undertaker = DeferredDestroyer()
    stores = [Store() for _ in range(MAX_DESTROYING + 1)]
    seen = [weakref.ref(store) for store in stores]
    while stores:
        undertaker.destroy([stores.pop(0)], 3600.0)
    assert [ref() is None for ref in seen] == [True] + [False] * MAX_DESTROYING
    undertaker.join(30.0)
    assert all(ref() is None for ref in seen)


def test_what_exists_before_the_first_function_is_frozen_also_in_a_fork_of_a_frozen_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each restart collects garbage among the rest. What was frozen by others is not thawed."""

    def is_collected(item: object) -> bool:
        return any(other is item for other in gc.get_objects())

    monkeypatch.setattr(leftovers, "_freezes", [])
    gc.freeze()
    try:
        mine, later = Leftovers(), Leftovers()
        before = [1]
        assert is_collected(before)
        mine.freeze()
        assert not is_collected(before)
        after = [2]
        later.freeze()
        assert is_collected(after), "only once: it may be garbage one day"
        mine.close()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py did: the tests that follow are quicker
