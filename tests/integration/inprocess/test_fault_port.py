"""A worker's port for faults, with real signals and sockets: what it does once, and what it never does late."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.faults import worker_socket
from unbroken.faults.worker_socket import deliver, socket_name
from unbroken.inprocess.exception import InternalError
from unbroken.inprocess.faults import acts, port
from unbroken.inprocess.faults.acts import InjectedFault
from unbroken.inprocess.faults.port import FaultPort
from unbroken.inprocess.interruption.gate import FunctionOutcome, Gate
from unbroken.inprocess.pod.environment import PodContext
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken_core.pod import fault_orders
from unbroken_core.pod.fault_orders import FaultOrder, write_order
from unbroken_core.vocabulary.errors import InputError

EXCEPTION = FaultOrder(id="0123456789abcdef", kind="exception")


class Call:
    """A call that runs functions through its gate."""

    iteration = 0
    active_rank: int | None = 2
    is_in_function = False
    is_pinged = True

    def __init__(self) -> None:
        self.gate = Gate()

    def run(self, function: Callable[[], object]) -> FunctionOutcome:
        """Run a function as an iteration does."""

        def body() -> object:
            self.is_in_function = True
            return function()

        self.gate.reset()
        outcome = self.gate.run(body)
        self.is_in_function = False
        return outcome


@pytest.fixture
def call() -> Call:
    return Call()


@pytest.fixture
def opened(tmp_path: Path, call: Call) -> Iterator[FaultPort]:
    place = PodContext(tmp_path, 1, 0, 2, "127.0.0.1", allows_faults=True)
    made = FaultPort(place, call, call.gate, ProgressSlot(1, 0))
    made.open()
    yield made
    made.close()


def order_from_a_thread(folder: Path, answer: "Future[str]", order: FaultOrder = EXCEPTION) -> None:
    """Deliver an order while the main thread does something else; the answer may come before this returns."""

    def run() -> None:
        try:
            answer.set_result(deliver(folder, 1, order))
        except InputError as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()


def until(is_true: Callable[[], bool]) -> None:
    """Run lines of a script until something is so."""
    end_s = time.monotonic() + LIMIT_S
    while not is_true() and time.monotonic() < end_s:
        time.sleep(0.005)


@pytest.mark.usefixtures("opened")
def test_an_exception_is_raised_in_the_script_once_and_the_answer_comes_first(tmp_path: Path, call: Call) -> None:
    answer: Future[str] = Future()

    def script() -> None:
        order_from_a_thread(tmp_path, answer)
        until(lambda: False)

    outcome = call.run(script)
    assert isinstance(outcome.error, InjectedFault)
    assert answer.result(LIMIT_S).startswith("exception: rank 2, iteration 0, process ")
    again: Future[str] = Future()

    def repeated() -> None:
        order_from_a_thread(tmp_path, again)
        until(again.done)

    assert call.run(repeated).error is None
    assert again.result(LIMIT_S) == "this order was carried out before; nothing was done again"


def test_an_order_of_an_earlier_process_is_not_carried_out_again(tmp_path: Path, call: Call, opened: FaultPort) -> None:
    answer: Future[str] = Future()

    def script() -> None:
        order_from_a_thread(tmp_path, answer)
        until(lambda: False)

    assert isinstance(call.run(script).error, InjectedFault)
    opened.close()
    place = PodContext(tmp_path, 1, 1, 2, "127.0.0.1", allows_faults=True)
    successor = FaultPort(place, call, call.gate, ProgressSlot(1, 1))
    successor.open()
    assert deliver(tmp_path, 1, EXCEPTION) == "this order was carried out before; nothing was done again"
    successor.close()
    (tmp_path / "fault-1.known").write_bytes(b"\xff")
    successor = FaultPort(place, call, call.gate, ProgressSlot(1, 1))
    successor.open()
    with pytest.raises(InputError, match="not inside its training function now"):
        deliver(tmp_path, 1, EXCEPTION)
    successor.close()


@pytest.mark.usefixtures("opened")
def test_an_order_between_two_iterations_or_for_another_rank_is_refused(tmp_path: Path, call: Call) -> None:
    with pytest.raises(InputError, match="not inside its training function now"):
        deliver(tmp_path, 1, EXCEPTION)
    with pytest.raises(InputError, match="this worker has rank 2, want rank 3; nothing was done"):
        deliver(tmp_path, 1, FaultOrder(id="0123456789abcdef", kind="exception", rank=3))
    call.active_rank = None
    with pytest.raises(InputError, match="this worker is a spare, want rank 3"):
        deliver(tmp_path, 1, FaultOrder(id="0123456789abcdef", kind="exception", rank=3))
    with pytest.raises(InputError, match=r"kind: want one of exception, .* of a worker, got 'xid'"):
        deliver(tmp_path, 1, FaultOrder(id="0123456789abcdef", kind="xid"))
    with pytest.raises(InputError, match=r"worker 0: no process of it takes faults now \(fault-1.sock do\)"):
        deliver(tmp_path, 0, EXCEPTION)


@pytest.mark.usefixtures("opened")
def test_an_order_waits_for_the_end_of_an_atomic_section_and_is_withdrawn_when_that_takes_too_long(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "PATIENCE_S", 0.3)
    answer: Future[str] = Future()

    def script() -> str:
        with call.gate.atomic():
            order_from_a_thread(tmp_path, answer)
            until(answer.done)
        until(lambda: True)
        return "went on"

    assert call.run(script) == FunctionOutcome("went on")
    with pytest.raises(InputError, match=r"ran no line of the script in 0 s: .*; nothing was done"):
        answer.result(LIMIT_S)
    monkeypatch.setattr(port, "PATIENCE_S", LIMIT_S)
    is_out = threading.Event()

    def patient() -> None:
        with call.gate.atomic():
            order_from_a_thread(tmp_path, Future())
            end_s = time.monotonic() + 0.2
            until(lambda: time.monotonic() > end_s)
        is_out.set()
        until(lambda: False)

    assert isinstance(call.run(patient).error, InjectedFault)
    assert is_out.is_set()


def test_an_iteration_that_ends_first_takes_the_order_with_it(tmp_path: Path, call: Call, opened: FaultPort) -> None:
    def leave() -> None:
        with call.gate.atomic():
            order_from_a_thread(tmp_path, answer)
            wait_until(lambda: bool(opened._due), "the order")
            call.gate.leave("the iteration is over")

    answer: Future[str] = Future()
    assert call.run(leave).error is None
    with pytest.raises(InputError, match="not inside its training function now"):
        answer.result(LIMIT_S)
    # Nothing of it is left for the next one.
    end_s = time.monotonic() + 0.2
    assert call.run(lambda: until(lambda: time.monotonic() > end_s)).error is None


def test_a_closed_port_takes_no_order_and_a_new_process_takes_the_place_of_the_old_one(
    tmp_path: Path, call: Call, opened: FaultPort
) -> None:
    place = PodContext(tmp_path, 1, 1, 2, "127.0.0.1", allows_faults=True)
    successor = FaultPort(place, call, call.gate, ProgressSlot(1, 1))
    successor.open()
    opened.close()
    with pytest.raises(InputError, match="not inside its training function now"):
        deliver(tmp_path, 1, EXCEPTION)
    assert (tmp_path / socket_name(1)).stat().st_mode & 0o777 == 0o600
    successor.close()
    with pytest.raises(InputError, match="no process of it takes faults now"):
        deliver(tmp_path, 1, EXCEPTION)


def answers_of(folder: Path, num: int) -> "list[Future[str]]":
    """Give many orders at once, each with an id of its own."""
    answers: list[Future[str]] = [Future() for _ in range(num)]

    def give() -> None:
        for number, answer in enumerate(answers):
            order_from_a_thread(folder, answer, FaultOrder(id=f"{number:08x}", kind="exception"))

    threading.Thread(target=give, daemon=True).start()
    return answers


@pytest.mark.usefixtures("opened")
def test_each_of_a_hundred_orders_at_once_is_done_or_refused_and_says_which(tmp_path: Path, call: Call) -> None:
    answers: list[Future[str]] = []

    def script() -> None:
        with call.gate.atomic():
            answers.extend(answers_of(tmp_path, 100))
        until(lambda: False)

    assert isinstance(call.run(script).error, InjectedFault)
    wait_until(lambda: all(answer.done() for answer in answers), "all answers")
    errors = [str(answer.exception()) for answer in answers if answer.exception() is not None]
    assert len(errors) == 99
    assert {error[-16:] for error in errors} == {"nothing was done"}


@pytest.mark.usefixtures("opened")
def test_an_order_whose_sender_has_gone_is_not_carried_out_later(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker that was stopped when it came; a script may let SIGPIPE end its process."""
    monkeypatch.setattr(worker_socket, "_ANSWER_S", 0.2)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:

        def script() -> str:
            answer: Future[str] = Future()
            with call.gate.atomic():
                order_from_a_thread(tmp_path, answer)
                until(answer.done)
            with pytest.raises(InputError, match="the order is withdrawn, nothing was done"):
                answer.result(LIMIT_S)
            again: Future[str] = Future()
            # The port takes the next order only when it is done with that one.
            order_from_a_thread(tmp_path, again, FaultOrder(id="89abcdef", kind="exception", rank=7))
            until(again.done)
            return str(again.exception(LIMIT_S))

        monkeypatch.setattr(port, "PATIENCE_S", LIMIT_S)
        outcome = call.run(script)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert outcome.error is None, outcome.error
    # It may not have been answered in that short time either.
    assert outcome.value is not None
    assert str(outcome.value).endswith("nothing was done")


@pytest.mark.usefixtures("opened")
def test_an_order_that_was_withdrawn_before_it_was_read_is_passed_over(tmp_path: Path, call: Call) -> None:
    def script() -> None:
        first = socket.socket(socket.AF_UNIX)
        with first, socket.socket(socket.AF_UNIX) as second:
            for client in (first, second):
                client.connect(str(tmp_path / socket_name(1)))
            # The port waits for the first one meanwhile.
            second.sendall(write_order(EXCEPTION).encode() + b"\n")
            second.close()
            first.sendall(b"{}\n")
            answer: Future[str] = Future()
            order_from_a_thread(tmp_path, answer, FaultOrder(id="89abcdef", kind="exception", rank=7))
            until(answer.done)

    assert call.run(script).error is None


def run_at(path: Path, is_over: Callable[[], bool], leave: Callable[[], None] = lambda: None) -> None:
    """Leave an atomic section, and run lines until `is_over`, all in a file of this name."""
    code = "leave()\nwhile not is_over():\n    sleep(0.005)\n"
    exec(compile(code, str(path), "exec"), {"sleep": time.sleep, "is_over": is_over, "leave": leave})


@pytest.mark.usefixtures("opened")
def test_a_script_in_a_folder_named_torch_is_broken_and_the_core_of_the_library_is_not(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ordered_at(path: Path, answer: "Future[str]", order: FaultOrder) -> FunctionOutcome:
        def script() -> None:
            call.gate.begin_atomic()
            order_from_a_thread(tmp_path, answer, order)
            run_at(path, answer.done, call.gate.end_atomic)

        return call.run(script)

    answer: Future[str] = Future()
    outcome = run_ordered_at(tmp_path / "torch" / "train.py", answer, EXCEPTION)
    assert isinstance(outcome.error, InjectedFault), answer.exception()
    monkeypatch.setattr(port, "PATIENCE_S", 0.3)
    refused: Future[str] = Future()
    core = Path(fault_orders.__file__).parents[1] / "some.py"
    assert run_ordered_at(core, refused, FaultOrder(id="89abcdef", kind="exception")).error is None
    with pytest.raises(InputError, match="ran no line of the script"):
        refused.result(LIMIT_S)


def test_a_script_that_takes_or_blocks_the_signal_is_not_ended_by_it_and_the_order_says_so(
    tmp_path: Path, call: Call, opened: FaultPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = opened._signal_number

    def order_with(change: Callable[[], object]) -> str:
        answer: Future[str] = Future()

        def script() -> None:
            change()
            order_from_a_thread(tmp_path, answer)
            until(answer.done)

        assert call.run(script).error is None
        return str(answer.exception(LIMIT_S))

    taken = f"worker 1: the script has taken signal {number}, by which the main thread of this worker is told; nothing"
    seen: list[int] = []
    for action in (lambda number, _frame: seen.append(number), signal.SIG_DFL):
        before = signal.getsignal(number)
        said = order_with(partial(signal.signal, number, action))
        signal.signal(number, before)
        assert said.startswith(taken), said
    assert not seen
    monkeypatch.setattr(port, "PATIENCE_S", 0.3)
    blocked = order_with(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [number]))
    assert f"blocks signal {number}, by which it is told; nothing was done" in blocked
    opened.close()
    # What was sent waits for this moment; without a handler it would end the process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def test_a_process_without_a_free_signal_goes_on_and_takes_no_faults(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise InternalError("real-time signals: want one without a handler, all are taken")

    monkeypatch.setattr(port, "unused_signal", none)
    made = FaultPort(
        PodContext(tmp_path, 1, 0, 2, "127.0.0.1", allows_faults=True), call, call.gate, ProgressSlot(1, 0)
    )
    made.open()
    with pytest.raises(InputError, match="no process of it takes faults now"):
        deliver(tmp_path, 1, EXCEPTION)
    made.close()


@pytest.mark.usefixtures("opened")
def test_another_user_is_refused_even_where_the_file_lets_everybody_in(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    tmp_path.chmod(0o755)
    folder = os.open(tmp_path, os.O_PATH)
    code = (
        "import os, sys; from pathlib import Path; from unbroken.faults.worker_socket import deliver\n"
        "from unbroken_core.pod.fault_orders import read_order\n"
        f"os.fchdir({folder}); os.setuid(65534); deliver(Path('.'), 1, read_order(sys.argv[1]))"
    )
    for mode, said in ((0o777, "want an order of this worker's own user"), (0o600, "Permission denied; nothing was")):
        (tmp_path / socket_name(1)).chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", code, write_order(EXCEPTION)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            pass_fds=(folder,),
        )
        assert f"InputError: worker 1: {said}" in done.stderr, done.stderr
    os.close(folder)


@pytest.mark.usefixtures("opened")
def test_who_sends_no_order_is_told_so_and_keeps_nobody_else_waiting_for_good(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(LIMIT_S)
        silent.connect(str(tmp_path / socket_name(1)))
        with pytest.raises(InputError, match="not inside its training function now"):
            deliver(tmp_path, 1, EXCEPTION)
        assert b"want an order within 5 s, got none; nothing was done" in silent.recv(4096)


@pytest.mark.usefixtures("opened")
def test_garbage_is_refused_and_leaves_the_port_open(tmp_path: Path) -> None:
    for data in (b"\n", b"{}\n", b"x" * 10_000 + b"\n", b'{"id": "0123456789", "kind": ["exit"]}\n', b""):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / socket_name(1)))
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = client.recv(4096)
            except ConnectionError:
                answer = b""
        assert b"done" not in answer
    with pytest.raises(InputError, match="not inside its training function now"):
        deliver(tmp_path, 1, EXCEPTION)


def test_memory_is_taken_only_below_a_limit_of_the_container_itself(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "root"
    (root / "pod").mkdir(parents=True)
    own.write_text("0::/pod\n")
    for text in ("max\n", "9223372036854771712\n"):
        (root / "pod" / "memory.max").write_text(text)
        with pytest.raises(InputError, match="oom: want a limit of memory on this container"):
            acts.memory_limit(own, root)
    (root / "pod" / "memory.max").write_text("67108864\n")
    assert acts.memory_limit(own, root) == 64 << 20
    own.write_text("4:memory:/kubepods/x\n0::/pod\n")
    with pytest.raises(InputError, match=r"no such file.*memory/memory\.limit_in_bytes"):
        acts.memory_limit(own, root)
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text("33554432\n")
    assert acts.memory_limit(own, root) == 32 << 20, "in a container the group is the root"
    own.write_text("garbage\n")
    with pytest.raises(InputError, match=r"no such file.*memory\.max"):
        acts.memory_limit(own, root)


def test_memory_that_nobody_is_ended_for_is_given_back_with_the_score() -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    acts.take_memory(0, LIMIT_S)
    assert score.read_text() == before


def test_a_held_gil_lets_no_other_thread_run_and_ends_in_time() -> None:
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(tick)
        wait_until(lambda: len(ticks) > 2, "the other thread")
        acts.hold_gil(0.5)
        num_before = len(ticks)
        wait_until(lambda: len(ticks) > num_before, "the other thread again")
        is_over.set()
    # A machine that is busy only makes pauses longer.
    assert max(later - earlier for earlier, later in pairwise(ticks)) > 0.49


def test_nothing_of_it_is_loaded_where_no_faults_are_allowed() -> None:
    code = (
        "import sys; import unbroken.inprocess, unbroken.inprocess.loop.call\n"
        "print([name for name in sys.modules if name.startswith('unbroken') and name.endswith(('faults', 'port'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
