"""A keeper that ends under a request is asked again, but not for ever."""

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.memory import client as client_module
from unbroken.memory.client import AWAY_S, KeeperClient
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, Find, Found
from unbroken_core.protocol import wire


class Breaking:
    """Listens where a keeper would, and ends each connection at its first request, but for the last one."""

    def __init__(self, folder: Path, answers_at: int, on_asked: Callable[[], None] = lambda: None) -> None:
        """`on_asked`: called for each request, before its connection is ended."""
        self.num_asked = 0
        self._on_asked = on_asked
        self._answers_at = answers_at
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / KEEPER_SOCKET))
        self.listener.listen()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _address = self.listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                self.num_asked += 1
                self._on_asked()
                if self.num_asked == self._answers_at:
                    connection.sendall(wire.encode(Found(())).encode() + b"\n")

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ubk-") as made:
        yield Path(made)


def test_a_request_that_always_ends_the_connection_is_given_up(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before, it was asked 18 times a second for the whole limit, an hour for what is fetched from others."""
    keeper = Breaking(folder, answers_at=-1)
    client = KeeperClient(folder)
    with caplog.at_level(logging.WARNING):
        assert client.ask(Find(), Found, 3600.0) is None
    client.close()
    keeper.close()
    assert keeper.num_asked == 9
    assert "keeper does not answer: Find: given up after 9 times" in caplog.text


def test_a_request_is_repeated_while_keepers_end_under_it(folder: Path) -> None:
    keeper = Breaking(folder, answers_at=5)
    client = KeeperClient(folder)
    assert client.ask(Find(), Found, 3600.0) == Found(())
    client.close()
    keeper.close()


def test_a_keeper_that_stood_still_for_long_and_ends_then_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the time with the first keeper counted as time without one: ranks went back to nothing at once."""
    passed_s = [0.0]

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + passed_s[0]

    def stand_still() -> None:
        passed_s[0] += AWAY_S + 1

    monkeypatch.setattr(client_module, "time", Clock)
    keeper = Breaking(folder, answers_at=3, on_asked=stand_still)
    client = KeeperClient(folder)
    assert client.ask(Find(), Found, 3600.0) == Found(())
    client.close()
    keeper.close()
