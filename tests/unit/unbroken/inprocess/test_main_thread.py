"""Where the main thread stands, and what it calls outside of Python."""

import dis
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType

import pytest

from unbroken.inprocess.interruption import main_thread as module
from unbroken.inprocess.interruption.main_thread import main_thread
from unbroken_core.pod.pod_messages import MainThread

HERE = "in test_place_of_a_blocked_main_thread_is_told_from_another_thread"


class Work:
    """Something whose calls are C functions."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wait = self.lock.acquire


def call_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the name of the last call in a function's code."""
    code: CodeType = function.__code__
    calls = [each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL")]
    return module._called(code, calls[-1])


def sleeps() -> None:
    time.sleep(1000)


def waits(work: Work) -> None:
    work.wait()


def waits_with_arguments(work: Work, values: list[int]) -> None:
    work.wait(
        values[0] > len(values),
        timeout=max(values),
    )


def waits_for_an_operator(x: object) -> None:
    torch.ops._c10d_functional.wait_tensor.default(x)  # type: ignore[name-defined] # noqa: F821 - that is what is tested


@pytest.mark.parametrize(
    ("function", "name", "may_wait"),
    [
        pytest.param(sleeps, "sleep", False, id="time.sleep"),
        pytest.param(waits, "wait", True, id="work.wait"),
        pytest.param(waits_with_arguments, "wait", True, id="with arguments that call something themselves"),
        pytest.param(waits_for_an_operator, "wait_tensor", True, id="torch.ops"),
    ],
)
def test_what_is_called_is_read_from_the_bytecode(function: Callable[..., object], name: str, may_wait: bool) -> None:
    assert module._judge(call_of(function), False) == (name, may_wait)


def test_operator_may_wait_only_where_there_is_a_device() -> None:
    assert module._judge((), False) == ("", False)
    assert module._judge((), True) == ("", None)


def test_place_of_a_blocked_main_thread_is_told_from_another_thread() -> None:
    lock = threading.Lock()
    found: list[MainThread] = []
    lock.acquire()

    def look() -> None:
        # Until the main thread stands in the second call below.
        while not found:
            seen = main_thread(4, is_leaving=True)
            if seen is not None and seen.call == "acquire" and seen.stack[-1].endswith(HERE):
                found.append(seen)
        lock.release()

    threading.Thread(target=look).start()
    lock.acquire()
    seen = found[0]
    assert (seen.iteration, seen.is_leaving, seen.may_wait, seen.beside) == (4, True, False, "")
    assert not seen.is_raising


def test_main_thread_that_handles_an_exception_says_so() -> None:
    found = []
    try:
        raise OSError("closed by peer")
    except OSError:
        other = threading.Thread(target=lambda: found.append(main_thread(0, is_leaving=True)))
        other.start()
        other.join()
    assert found[0] is not None
    # Python 3.10 does not tell it of other threads.
    assert found[0].is_raising == hasattr(sys, "_current_exceptions")
