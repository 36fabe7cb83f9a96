"""Calls with a timeout, each in a thread of its own."""

import datetime
import threading
from collections.abc import Callable

from unbroken.inprocess.exception import TimeoutError  # noqa: A004 - the reference's name


def call_bounded(function: Callable[[], object], timeout: datetime.timedelta, name: str, what: str) -> None:
    """Call a function in a thread of this name; its exception is raised here.

    Raises TimeoutError, which names what was wanted (`what`), when it still runs after the timeout; the thread is left.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{what} within {timeout.total_seconds():g} s, it still runs")
    if failures:
        raise failures.pop()
