"""The port of an iteration's store, and those above it."""

import socket

import pytest

from unbroken.inprocess.connections import endpoint
from unbroken.inprocess.connections.endpoint import NUM_ABOVE, Endpoint

HOST = "127.0.0.1"


def can_bind(port: int) -> bool:
    """Return whether a script could make a store there."""
    with socket.socket() as tried:
        try:
            tried.bind((HOST, port))
        except OSError:
            return False
        return True


def _bind_above_a_free_port(taken: socket.socket) -> int:
    """Bind a socket; return the port below, which is free."""
    for port in range(20001, 30000, 7):
        if can_bind(port - 1) and can_bind(port):
            taken.bind((HOST, port))
            return port - 1
    raise AssertionError("no two free ports in a row")


def test_ports_above_are_the_scripts_and_nobody_elses() -> None:
    """A script's own store on MASTER_PORT + 1 met a stranger's port, and its clients waited in it for good."""
    made = Endpoint(HOST)
    above = [made.port + number for number in range(1, NUM_ABOVE + 1)]
    assert not any(map(can_bind, above))
    made.close()
    assert all(map(can_bind, above))


def test_port_below_one_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        below = _bind_above_a_free_port(taken)
        bind = endpoint._bind
        asked = iter([below])

        def choose(host: str, port: int) -> socket.socket:
            return bind(host, next(asked, 0) if port == 0 else port)

        monkeypatch.setattr(endpoint, "_bind", choose)
        made = Endpoint(HOST)
    assert made.port != below
    assert len(made._above) == NUM_ABOVE
    made.close()


def test_without_room_anywhere_a_port_alone_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = endpoint._bind

    def refuse(host: str, port: int) -> socket.socket:
        if port:
            raise OSError("taken")
        return bind(host, 0)

    monkeypatch.setattr(endpoint, "_bind", refuse)
    made = Endpoint(HOST)
    assert made.port
    assert made._above == []
    made.close()


def test_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        Endpoint("192.0.2.1")
