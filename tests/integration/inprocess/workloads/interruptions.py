"""What an interruption must leave alone: clean-ups, atomic sections, what the user has started."""

import os
import signal
import socket
import threading
import time

from unbroken import inprocess
from unbroken.inprocess.interruption import gate

from .script import HANG_S, LIMIT_S, is_first, my_rank, note, one_fault, start, total, wait_for_file

CLEAN_UP_S = 0.4
"""Long enough for an interruption to come in between, if it could; no test asserts it."""


def cleans_up() -> None:
    """Rank 0 is interrupted inside two nested clean-ups, each of which takes a while."""
    # Longer than any machine takes for these: after it, handlers of errors are interrupted as well.
    gate.CLEAN_UP_S = LIMIT_S

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            wait_for_file("TEST_GO")
            raise ValueError("injected")
        try:
            try:
                note("blocks")
                total()
            finally:
                note("first begins")
                time.sleep(CLEAN_UP_S)
                note("first ends")
        finally:
            deadline_s = time.monotonic() + CLEAN_UP_S
            while time.monotonic() < deadline_s:
                sum(range(100))
            note("second ends")
        return -1

    note("returned", value=train())


def atomic() -> None:
    """Rank 0 is inside nested atomic sections when rank 1 raises."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            wait_for_file("TEST_GO")
            raise ValueError("injected")
        try:
            with call.atomic():
                with call.atomic():
                    note("enters")
                    wait_for_file("TEST_DONE")
                note("leaves", iteration=call.iteration)
            # From the end of the section on the interruption may strike anywhere, also before this sleeps.
            time.sleep(HANG_S)
        finally:
            try:
                with call.atomic():
                    note("entered again")
            except inprocess.RankShouldRestart:
                note("not entered again")
        return -1

    note("returned", value=train())


def bystanders() -> None:
    """A thread, a connection, a child and a signal handler of the user's live through a restart."""
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    ticks = [0]
    stop = threading.Event()

    ticked = threading.Condition()

    def tick() -> None:
        while not stop.wait(0.005):
            with ticked:
                ticks[0] += 1
                ticked.notify()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    value = train()
    with ticked:
        seen = ticks[0]
        ticked.wait_for(lambda: ticks[0] >= seen + 3, LIMIT_S)
    client.sendall(b"still")
    os.kill(os.getpid(), signal.SIGTERM)
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    note("returned", value=value, echo=served.recv(5).decode(), handled=handled, same=before == after)
    stop.set()
