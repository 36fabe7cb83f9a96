"""A function in a child process, and what it says: one JSON value a line. It can be killed, whatever it waits for."""

import contextlib
import functools
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unbroken.launch.process_tree import die_with

_MAX_LINE_BYTES = 64 << 20
_MAX_ENDING_S = 2.0
"""For a child that was killed: one that waits in the kernel is left alone."""

Tell = Callable[[Any], None]


class EndedError(Exception):
    """The child has ended without a word; the message says how."""

    def __init__(self, how: str, number: int = 0) -> None:
        """`number`: of the signal that has ended it; 0: none."""
        super().__init__(how)
        self.number = number


class StarvedError(TimeoutError):
    """No word in time, and no core either: for a quarter of the time and more a child has waited for one."""


class Forked:
    """One child. It ends with its parent."""

    def __init__(self, function: Callable[[Tell], None]) -> None:
        """Start it; `function` gets what it may tell with."""
        parent = os.getpid()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        with warnings.catch_warnings():
            # torch has threads when it has been imported; none of them holds what the child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _be_child(function, writer, parent)
        os.close(writer)
        self._unread = b""
        self._is_reaped = False

    def fileno(self) -> int:
        """Return what to wait for until it says something, or ends."""
        return self._reader

    def read(self, until_s: float) -> Any:
        """Return what it says next. Raises TimeoutError at this instant of the monotonic clock, and EndedError."""
        while b"\n" not in self._unread:
            rest_s = max(until_s - time.monotonic(), 0.0)
            if not select.select([self._reader], [], [], rest_s)[0]:
                raise TimeoutError
            data = os.read(self._reader, 1 << 20)
            if not data or len(self._unread) > _MAX_LINE_BYTES:
                raise self._ending()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def waited_s(self) -> float:
        """Return for how many seconds one of its threads has waited for a core; 0 where Linux does not say."""
        waited_ns = 0
        for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                waited_ns = max(waited_ns, int(path.read_text().split()[1]))
        return waited_ns * 1e-9

    def end(self) -> None:
        """Kill it, if it has not ended."""
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()
        os.close(self._reader)

    def _ending(self) -> EndedError:
        status = self._wait()
        if status is None:
            return EndedError("has closed its end, and lives")
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return EndedError(f"was ended by {signal.Signals(-code).name}", -code)
        return EndedError(f"ended with exit code {code}")

    def _wait(self) -> int | None:
        until_s = time.monotonic() + _MAX_ENDING_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._is_reaped = True
                return status
            if time.monotonic() > until_s:
                return None
            time.sleep(0.005)


def _be_child(function: Callable[[Tell], None], writer: int, parent: int) -> None:
    code = 1
    try:
        die_with(parent)
        # Pipes of others, which would not end while this process has them, and the parent's connections.
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))

        def tell(value: Any) -> None:
            data = memoryview(json.dumps(value).encode() + b"\n")
            while data:
                data = data[os.write(writer, data) :]

        function(tell)
        code = 0
    except KeyboardInterrupt:
        code = 130
    finally:
        # No handler of the parent's runs here, and no thread that torch has started is waited for.
        os._exit(code)


def answer_of(function: Callable[[], Any], limit_s: float) -> Any:
    """Return what a function returns, run in a child. Raises TimeoutError and EndedError."""
    return answers_of([function], limit_s)[0].get()


class ChildAnswer:
    """What one child has said, or how it ended."""

    def __init__(self, value: Any, error: Exception | None = None) -> None:
        self.value = value
        self.error = error

    def get(self) -> Any:
        """Return the value. Raises TimeoutError and EndedError."""
        if self.error is not None:
            raise self.error
        return self.value


def _tell_result(function: Callable[[], Any], tell: Tell) -> None:
    tell(function())


def answers_of(functions: list[Callable[[], Any]], limit_s: float) -> list[ChildAnswer]:
    """Run functions at the same time, each in a child; none lives for longer than the limit."""
    until_s = time.monotonic() + limit_s
    children = [Forked(functools.partial(_tell_result, function)) for function in functions]
    try:
        answers = []
        for child in children:
            try:
                answers.append(ChildAnswer(child.read(until_s)))
            except TimeoutError as error:
                # Whom this one waits for may be the one that has waited for a core.
                is_starved = any(4 * each.waited_s() >= limit_s for each in children)
                answers.append(ChildAnswer(None, StarvedError() if is_starved else error))
            except EndedError as error:
                answers.append(ChildAnswer(None, error))
        return answers
    finally:
        for child in children:
            child.end()
