"""A keeper that ends under a request is asked again, but not for ever."""

import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.memory.client import KeeperClient
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, Find, Found
from unbroken_core.protocol import wire


class Breaking:
    """Listens where a keeper would, and ends each connection at its first request, but for the last one."""

    def __init__(self, folder: Path, answers_at: int) -> None:
        self.num_asked = 0
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
