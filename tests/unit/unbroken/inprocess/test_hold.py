"""While collectives are aborted, nothing of the function runs on what they leave, and nothing of it is saved."""

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tests.waiting import wait_until

from unbroken.inprocess.interruption import gate as gates
from unbroken.inprocess.interruption.gate import FunctionOutcome, Gate, RankShouldRestart
from unbroken.inprocess.interruption.main_thread import _others
from unbroken.standstill import Standstill


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    gate.install()
    gate.reset()
    yield gate
    gate.uninstall()


def beside(work: Callable[[], None]) -> threading.Thread:
    """Do it in another thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_function_stands_still_during_an_abort_and_cleans_up_after_it(gate: Gate) -> None:
    """In this order: what cleans up may destroy groups, which waits for what the abort ends."""
    seen: list[tuple[str, int]] = []
    rounds = 0

    def abort() -> None:
        wait_until(lambda: rounds > 10, "the function to run")
        gate.leave("over")
        gate.hold()
        wait_until(lambda: gate.is_held, "the main thread to stand still")
        seen.append(("aborted", rounds))
        gate.force_out(lambda: True)

    def train() -> None:
        nonlocal rounds
        try:
            while True:
                rounds += 1
        finally:
            seen.append(("cleaned up", rounds))

    thread = beside(abort)
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert seen == [("aborted", rounds), ("cleaned up", rounds)]
    assert not gate.swallowed_at


def test_function_that_is_freed_by_the_abort_does_not_go_on(gate: Gate) -> None:
    """It waited in C++, where no signal reaches it: a mutex of the C library stands for a device."""
    seen: list[str] = []
    library, device = ctypes.CDLL(None), ctypes.create_string_buffer(64)

    def abort() -> None:
        library.pthread_mutex_lock(device)
        seen.append("works")
        wait_until(lambda: "waits" in seen, "the function to wait")
        try:
            gate.leave("over")
            gate.hold()
        finally:
            # Nothing else ends that wait, no timeout of a test either.
            library.pthread_mutex_unlock(device)
        wait_until(lambda: gate.is_held, "the main thread to stand still")
        seen.append("aborted")
        gate.force_out(lambda: True)

    def train() -> None:
        seen.append("waits")
        library.pthread_mutex_lock(device)
        seen.append("went on")

    thread = beside(abort)
    wait_until(lambda: seen, "the device to work")
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert seen == ["works", "waits", "aborted"]


@pytest.mark.parametrize("num_lost", [0, 3])
def test_function_that_holds_what_the_abort_needs_is_let_go(
    gate: Gate, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if signals come just before it blocks, which do not wake it: the abort would wait for its lock for ever."""
    monkeypatch.setattr(gates, "HOLD_S", 0.1)
    lost = iter(range(num_lost))

    def pthread_kill(thread: int, number: int) -> None:
        if next(lost, None) is None:
            signal.pthread_kill(thread, number)

    monkeypatch.setattr(gates, "signal", SimpleNamespace(pthread_kill=pthread_kill))
    logging_lock, has_lock = threading.Lock(), threading.Event()

    def abort() -> None:
        has_lock.wait()
        gate.leave("over")
        gate.hold()
        with logging_lock:
            gate.force_out(lambda: True)

    def train() -> None:
        with logging_lock:
            has_lock.set()
            # Not an event's wait: a raise between two of its lines leaves it with an error of its own.
            queue.SimpleQueue[None]().get()

    thread = beside(abort)
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert next(lost, None) is None


def test_an_abort_goes_on_where_no_thread_can_be_started(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processes and threads in a container has a limit."""

    def start_new_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gates, "_thread", SimpleNamespace(start_new_thread=start_new_thread))
    gate.left.clear()
    gate.leave("over")
    gate.hold()
    assert gate.run(lambda: None).value is None


class CountingGate(Gate):
    """Counts the signals that its handler has seen the end of."""

    num_handled = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            super()._on_signal(number, frame)
        finally:
            self.num_handled += 1


def test_signals_that_come_while_the_function_stands_still_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HOLD_S", 60.0)
    gate, rounds = CountingGate(), 0
    gate.install()
    gate.reset()
    main = threading.main_thread().ident
    assert main is not None

    def has_handled(number: int) -> bool:
        return gate.num_handled >= number

    def abort() -> None:
        wait_until(lambda: rounds > 10, "the function to run")
        gate.leave("over")
        gate.hold()
        wait_until(lambda: gate.is_held, "the main thread to stand still")
        for number in range(1, 4):
            signal.pthread_kill(main, gate._signal_number)
            wait_until(partial(has_handled, number), "a signal to be handled")
        assert gate.is_held
        gate.force_out(lambda: True)

    def train() -> None:
        nonlocal rounds
        while True:
            rounds += 1

    thread = beside(abort)
    try:
        outcome = gate.run(train)
        thread.join()
    finally:
        gate.uninstall()
    assert isinstance(outcome.error, RankShouldRestart)
    assert gate._num_raised == 1


def test_function_whose_own_handler_blocks_while_it_stands_still_is_forced_out(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM during an abort: a script may save in its handler, with a collective."""
    monkeypatch.setattr(gates, "HOLD_S", 60.0)
    blocked = threading.Event()

    def on_signal(*_: object) -> None:
        blocked.set()
        queue.SimpleQueue[None]().get()

    def abort() -> None:
        has_begun.wait()
        gate.leave("over")
        gate.hold()
        wait_until(lambda: gate.is_held, "the main thread to stand still")
        os.kill(os.getpid(), signal.SIGUSR1)
        blocked.wait()
        gate.force_out(lambda: True)

    def train() -> None:
        has_begun.set()
        while True:
            pass

    has_begun, before = threading.Event(), signal.signal(signal.SIGUSR1, on_signal)
    thread = beside(abort)
    try:
        outcome = gate.run(train)
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)


def test_function_that_swallows_and_blocks_again_with_what_the_abort_needs_is_let_go(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "HOLD_S", 0.1)
    logging_lock, has_lock, seen = threading.Lock(), threading.Event(), []

    def abort() -> None:
        has_lock.wait()
        gate.leave("over")
        gate.hold()
        with logging_lock:
            seen.append(gate._num_raised)
            gate.force_out(lambda: True)

    def train() -> None:
        with logging_lock:
            has_lock.set()
            with contextlib.suppress(BaseException):
                queue.SimpleQueue[None]().get()
            queue.SimpleQueue[None]().get()

    thread = beside(abort)
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert seen == [2]


def test_the_thread_that_signals_is_none_of_the_engine_s(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that `threading` does not know is torch's, which runs hooks of the script: it hid a main thread."""
    monkeypatch.setattr(gates, "HOLD_S", 60.0)
    seen: list[FrameType | None] = []
    # What runs the tests may have such threads as well.
    before = set(sys._current_frames())

    def frames_of_unknown() -> dict[int, FrameType]:
        known = {thread.ident for thread in threading.enumerate()} | before
        return {ident: frame for ident, frame in sys._current_frames().items() if ident not in known}

    def abort() -> None:
        has_begun.wait()
        gate.leave("over")
        gate.hold()
        frames = wait_until(frames_of_unknown, "the thread that signals")
        seen.append(_others(frames, 0)[1])
        gate.force_out(lambda: True)

    def train() -> None:
        has_begun.set()
        while True:
            pass

    has_begun = threading.Event()
    thread = beside(abort)
    gate.run(train)
    thread.join()
    assert seen == [None]


def test_function_that_has_left_by_itself_is_not_held(gate: Gate) -> None:
    assert gate.run(lambda: 1).value == 1
    gate.leave("over")
    gate.hold()
    assert not gate.is_held
    gate.force_out(lambda: True)
    gate.reset()
    assert gate.run(lambda: 2).value == 2


class Stream:
    """A device's, on which a collective waits for another rank until it is aborted."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.is_aborted = threading.Event()

    def synchronize(self) -> None:
        self.waits.set()
        self.is_aborted.wait()


def test_section_begins_when_the_device_has_done_what_may_wait_for_others(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.7: no abort comes into a section, so a save in it would wait for a failed rank until the hard timeout."""
    stream, seen = Stream(), []
    device = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: stream)
    monkeypatch.setattr(torch, "cuda", device)

    def abort() -> None:
        stream.waits.wait()
        gate.leave("over")
        with gate.atomic_lock:
            seen.append("the lock is free")
            gate.hold()
            stream.is_aborted.set()
            wait_until(lambda: gate.is_held, "the main thread to stand still")
            gate.force_out(lambda: True)

    def train() -> None:
        with gate.atomic():
            seen.append("inside")

    thread = beside(abort)
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert seen == ["the lock is free"]


def test_section_within_a_section_does_not_wait_again(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(gate.num_atomic))
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: stream))
    with gate.atomic(), gate.atomic():
        pass
    assert waited == [0]


def test_device_that_is_not_in_use_is_left_alone(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_initialized=lambda: False))
    with gate.atomic():
        pass


def test_iteration_is_spoilt_by_an_abort_until_the_next_begins() -> None:
    standstill = Standstill()
    seen = []
    for _ in range(2):
        standstill.begin(lambda _: None)
        seen.append(standstill.is_spoilt)
        standstill.spoil()
        seen.append(standstill.is_spoilt)
    assert seen == [False, True, False, True]


class SlowPackage(NamedTuple):
    """A package whose import waits, after it has imported a module of its own that refers to it."""

    name: str
    folder: Path
    begun: threading.Event
    go: threading.Event


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPackage]:
    folder = tmp_path / "slow_import"
    folder.mkdir()
    (folder / "inner.py").write_text("import slow_import\n")
    (folder / "__init__.py").write_text(
        "import slow_import.inner, slow_import_events\n"
        "slow_import_events.begun.set()\n"
        "slow_import_events.go.wait()\n"
        "ready = slow_import.inner\n"
    )
    made = SlowPackage(folder.name, folder, threading.Event(), threading.Event())
    events = ModuleType("slow_import_events")
    vars(events).update(begun=made.begun, go=made.go)
    monkeypatch.setitem(sys.modules, events.__name__, events)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def end_amid_import(gate: Gate, package: SlowPackage, num_signals: int) -> None:
    """End the iteration while the package is imported; let the import go on after so many signals."""
    wait_until(package.begun.is_set, "an import to begin")
    gate.leave("over")
    left = iter(range(num_signals))

    def free() -> bool:
        if next(left, None) is None:
            package.go.set()
        return True

    gate.force_out(free)


def test_an_import_is_not_interrupted_and_the_function_leaves_after_it(
    gate: Gate, package: SlowPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's compiler, which `fully_shard` imports: half imported, it failed for good."""
    monkeypatch.setattr(gates, "IMPORT_S", 300.0)
    rounds = 0

    def train() -> None:
        nonlocal rounds
        importlib.import_module(package.name)
        while True:
            rounds += 1

    thread = beside(lambda: end_amid_import(gate, package, 3))
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    package.go.set()
    assert importlib.import_module(package.name).ready
    assert not gate.swallowed_at


def test_a_training_that_is_an_import_is_interrupted_after_a_while(
    gate: Gate, package: SlowPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "IMPORT_S", 0.1)
    thread = beside(lambda: end_amid_import(gate, package, 1_000_000))
    outcome = gate.run(lambda: importlib.import_module(package.name))
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)


def test_a_training_that_an_import_began_is_interrupted_at_once(gate: Gate, package: SlowPackage) -> None:
    """A script that is imported calls the wrapped function."""
    (package.folder / "inner.py").write_text("import gate_of_test\ngate_of_test.run()\n")
    seen: list[FunctionOutcome] = []

    def train() -> None:
        package.begun.set()
        while True:
            pass

    script = ModuleType("gate_of_test")
    script.__dict__["run"] = lambda: seen.append(gate.run(train))
    sys.modules[script.__name__] = script
    package.go.set()
    thread = beside(lambda: end_amid_import(gate, package, 0))
    try:
        importlib.import_module(package.name)
    finally:
        del sys.modules[script.__name__]
    thread.join()
    assert isinstance(seen[0].error, RankShouldRestart)


def test_an_import_stands_still_once_however_long_an_abort_takes(
    gate: Gate, package: SlowPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held again and again it came to the end of its time, was interrupted, and failed for good."""
    monkeypatch.setattr(gates, "HOLD_S", 0.05)
    monkeypatch.setattr(gates, "IMPORT_S", 300.0)
    holds: list[None] = []
    wait_for_abort = gate._wait_for_abort

    def counted() -> None:
        holds.append(None)
        wait_for_abort()

    monkeypatch.setattr(gate, "_wait_for_abort", counted)
    main = threading.main_thread().ident
    assert main is not None

    def abort() -> None:
        wait_until(package.begun.is_set, "an import to begin")
        gate.leave("over")
        gate.hold()
        wait_until(lambda: gate._is_importing, "the import to go on")
        for _ in range(5):
            signal.pthread_kill(main, gate._signal_number)
        # Its end needs the import: as an abort's that imports the module itself.
        package.go.set()
        wait_until(lambda: hasattr(sys.modules.get(package.name), "ready"), "the import to end")
        gate.force_out(lambda: True)

    def train() -> None:
        importlib.import_module(package.name)
        while True:
            pass

    thread = beside(abort)
    outcome = gate.run(train)
    thread.join()
    assert isinstance(outcome.error, RankShouldRestart)
    assert importlib.import_module(package.name).ready
    assert len(holds) <= 2, "once in the import, and once behind it"
