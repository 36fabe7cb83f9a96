"""What a broken or hostile trainer may send to its keeper: refused, bounded, and forgotten."""

import json
import socket

import pytest
import torch
from tests.waiting import wait_until

from unbroken.memory import Checkpointer
from unbroken.memory.client import KeeperClient
from unbroken_core import wire
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, MAX_LINE_BYTES, Counted, Find, Found

from .conftest import LivePod


def connect(pod: LivePod) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    # Without a time limit Linux waits for room among those that are not accepted yet.
    connection.connect(str(pod.folder / KEEPER_SOCKET))
    connection.settimeout(60)
    return connection


def assert_well(pod: LivePod) -> None:
    client = KeeperClient(pod.folder)
    assert client.ask(Find(), Found, 60) == Found(())
    client.close()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"noise", id="noise"),
        pytest.param(b"\xff" * 100, id="no text"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"type":"Found","slots":[]}', id="an answer"),
        pytest.param(json.dumps({"type": "Reserve", "local_rank": 2, "num_bytes": 1 << 20}).encode(), id="rank"),
        pytest.param(json.dumps({"type": "Reserve", "local_rank": -1, "num_bytes": 1 << 20}).encode(), id="rank < 0"),
        pytest.param(json.dumps({"type": "Reserve", "local_rank": "../0", "num_bytes": 1 << 20}).encode(), id="path"),
        pytest.param(json.dumps({"type": "Reserve", "local_rank": 0, "num_bytes": -5}).encode(), id="bytes < 0"),
        pytest.param(json.dumps({"type": "Reserve", "local_rank": 0, "num_bytes": 1 << 70}).encode(), id="huge"),
        pytest.param(json.dumps({"type": "Sealed", "local_rank": 0, "index": 2}).encode(), id="slot"),
    ],
)
def test_a_message_that_is_none_ends_its_connection_alone(pod: LivePod, line: bytes) -> None:
    pod.start()
    with connect(pod) as connection:
        connection.sendall(line + b"\n")
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            # It has not read the rest of a long line.
            pass
    assert_well(pod)


def test_a_line_without_an_end_is_refused(pod: LivePod) -> None:
    pod.start()
    with connect(pod) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        while True:
            connection.sendall(b"x" * (MAX_LINE_BYTES // 4))
    assert_well(pod)


def test_many_connections_are_refused_and_leave_room_once_they_end(pod: LivePod) -> None:
    pod.start()
    many = [connect(pod) for _ in range(300)]
    refused = wait_until(lambda: [one for one in many if is_ended(one)], "refused connections")
    assert len(refused) <= 300 - 256
    for one in many:
        one.close()
    assert_well(pod)


def is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_asking_for_more_again_and_again_never_exceeds_the_limit(pod: LivePod) -> None:
    pod.limit_bytes = 1 << 20
    pod.start()
    with connect(pod) as connection, connection.makefile("rwb") as lines:
        for size in range(100_000, 1 << 20, 100_000):
            lines.write(json.dumps({"type": "Reserve", "local_rank": size % 2, "num_bytes": size}).encode() + b"\n")
            lines.flush()
            assert json.loads(lines.readline())["type"] in ("Reserved", "NoRoom")
            used = sum(path.stat().st_size for path in pod.root.rglob("*.slot"))
            assert used <= pod.limit_bytes
    assert Checkpointer().load({}) is None


def test_what_a_worker_measures_reaches_the_agent_on_a_pipe(pod: LivePod) -> None:
    keeper = pod.start(tells=True)
    state = {"x": torch.zeros(100)}
    checkpoints = Checkpointer(every=2)
    for step in range(6):
        checkpoints.save(state, step)
    assert Checkpointer().load(state) == 4
    assert Checkpointer().save({"x": torch.zeros(100 << 20)}, 5).step == 5
    assert keeper.stdout is not None
    for line in keeper.stdout:
        counted = wire.decode(line, Counted)
        if sum(counted.saves) == 3 and counted.skips[0] == 1 and counted.loads[0] == 1:
            break
    assert (counted.steps_redone, counted.digest_failures, counted.limit_bytes) == (1, 0, pod.limit_bytes)
    assert counted.used_bytes == sum(path.stat().st_size for path in pod.root.rglob("*.slot"))
    assert counted.save_seconds > 0 < counted.load_seconds[0]


@pytest.mark.parametrize("seconds", ["-1", "1e300", "NaN", "Infinity"])
def test_seconds_out_of_bounds_are_refused(pod: LivePod, seconds: str) -> None:
    pod.start()
    with connect(pod) as connection:
        connection.sendall(f'{{"type":"Measured","what":"saved","seconds":{seconds}}}\n'.encode())
        assert connection.recv(1) == b""
    assert_well(pod)
