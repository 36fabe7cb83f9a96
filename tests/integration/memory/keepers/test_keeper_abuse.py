"""What a broken or hostile trainer may send to its keeper: refused, bounded, and forgotten."""

import contextlib
import hashlib
import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.integration.memory.conftest import LivePod
from tests.waiting import wait_until

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.digests import Digests, digest_slot
from unbroken.memory import Checkpointer, Saved
from unbroken.memory.client import KeeperClient
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, MAX_LINE_BYTES, Counted, Find, Found, Holds, ToAgent
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, Moment, digests_name, pack_head
from unbroken_core.protocol import wire

PEER = {"uid": "u", "host": "127.0.0.1", "port": 1}
SHARD = {"peer": PEER, "rank": 0, "world_size": 1, "term": 1, "iteration": 0, "step": 1}

DISK = {"term": 1, "iteration": 0, "every": 10}


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
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "blocks": [[-1, 2]]}).encode(), id="block < 0"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "blocks": [[0, 1 << 60]]}).encode(), id="many blocks"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "ranges": [[-1, 2]]}).encode(), id="range < 0"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "ranges": [[0, 0]]}).encode(), id="empty range"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "ranges": [[0, 1 << 60]]}).encode(), id="long range"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "ranges": [[1]]}).encode(), id="half a range"),
        pytest.param(json.dumps({"type": "FetchShard", **SHARD, "peer": {}}).encode(), id="nobody"),
        pytest.param(json.dumps({"type": "Written", "disk": DISK, "age_s": -5}).encode(), id="age < 0"),
        pytest.param(json.dumps({"type": "Written", "disk": {**DISK, "every": 0}}).encode(), id="no interval"),
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


def test_only_the_thread_that_digests_in_the_background_stands_back(pod: LivePod) -> None:
    """Before, all of the keeper did, and after a fault all ranks wait for its answer."""
    keeper = pod.start()
    Checkpointer().save({"a": torch.ones(4)}, 0)
    pod.wait_digested(0)
    assert_found(pod, 1)
    niceness = {}
    for task in Path(f"/proc/{keeper.pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread that served the request has ended meanwhile
            niceness[task.name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
    assert niceness.pop(str(keeper.pid)) == os.getpriority(os.PRIO_PROCESS, 0)
    assert sorted(niceness.values(), reverse=True)[0] == 19
    assert list(niceness.values()).count(19) == 1


def test_a_restore_does_not_wait_for_a_digest_that_has_begun_in_the_background(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it did: that thread stands back, and may have no processor for seconds."""
    keeper = pod.start()
    Checkpointer().save({"a": torch.ones(4)}, 0)
    path = pod.wait_digested(0)
    keeper.kill()
    keeper.wait()
    digests = path.with_name(digests_name(path.name))
    digests.rename(digests.with_name(f".{digests.name}.1"))
    keeper_arena = Arena(
        KeeperConfig(pod.folder, pod.root, "pod", pod.limit_bytes, 2, hashlib.sha256(b"job-uid").digest()[:16])
    )
    entered, go_on = threading.Event(), threading.Event()

    def digest_slowly(slot: Path) -> Digests | None:
        if threading.current_thread() is background:
            entered.set()
            assert go_on.wait(60)
        return digest_slot(slot)

    monkeypatch.setattr("unbroken.keeper.arena.digest_slot", digest_slowly)
    background = threading.Thread(target=keeper_arena.digest, args=(path,))
    found: list[Found] = []
    restore = threading.Thread(target=lambda: found.append(keeper_arena.find()), daemon=True)
    try:
        background.start()
        assert entered.wait(60)
        restore.start()
        restore.join(60)
        assert [one.step for answer in found for one in answer.slots] == [0]
    finally:
        go_on.set()
        background.join(60)
        keeper_arena.close()
    assert sorted(one.name for one in path.parent.iterdir()) == ["0-0.slot", "0-0.slot.digests", "0-1.slot"]


def assert_found(pod: LivePod, count: int) -> None:
    client = KeeperClient(pod.folder)
    found = client.ask(Find(), Found, 60)
    client.close()
    assert found is not None
    assert len(found.slots) == count


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
        counted = wire.decode(line, ToAgent)
        if not isinstance(counted, Counted):
            continue
        if sum(counted.saves) == 3 and counted.skips[0] == 1 and counted.loads[0] == 1:
            break
    assert (counted.steps_redone, counted.digest_failures, counted.limit_bytes) == (1, 0, pod.limit_bytes)
    assert counted.used_bytes == sum(path.stat().st_size for path in pod.root.rglob("*.slot"))
    assert counted.save_seconds > 0 < counted.load_seconds[0]


def test_what_differs_from_its_digests_is_counted_once_a_load(pod: LivePod) -> None:
    keeper = pod.start(tells=True)
    assert isinstance(Checkpointer().save({"x": torch.zeros(100)}, 3), Saved)
    with pod.wait_digested(3).open("r+b") as file:
        file.seek(CONTENT_OFFSET)
        byte = file.read(1)
        file.seek(CONTENT_OFFSET)
        file.write(bytes([byte[0] ^ 1]))
    assert Checkpointer().load({"x": torch.zeros(100)}) is None
    assert keeper.stdout is not None
    counts = (told for line in keeper.stdout if isinstance(told := wire.decode(line, ToAgent), Counted))
    # Told of the load last, on the same connection.
    assert next(told for told in counts if sum(told.loads)).digest_failures == 1


def test_what_the_keeper_refuses_is_counted(pod: LivePod) -> None:
    keeper = pod.start(tells=True)
    for _ in range(3):
        with connect(pod) as connection:
            connection.sendall(b"noise\n")
            assert connection.recv(1) == b""
    assert keeper.stdout is not None
    for line in keeper.stdout:
        told = wire.decode(line, ToAgent)
        if isinstance(told, Counted) and told.num_refused == 3:
            break
    else:
        raise AssertionError("the keeper ended without telling of it")


@pytest.mark.parametrize("moment", [Moment(1, 0, 1 << 60), Moment(1, 1 << 60, 1)], ids=["step", "iteration"])
def test_a_forged_head_does_not_end_what_the_keeper_tells_its_agent(pod: LivePod, moment: Moment) -> None:
    keeper = pod.start(tells=True)
    assert isinstance(Checkpointer().save({"x": torch.zeros(100)}, 3), Saved)
    slot = pod.wait_digested(3)
    with slot.open("r+b") as file:
        file.write(pack_head(replace(pod.slots()[slot], serial=9, moment=moment)) * 2)
    assert isinstance(Checkpointer().save({"x": torch.zeros(100)}, 4), Saved)
    assert keeper.stdout is not None
    # An agent reads no further than what it cannot decode: this raises WireError there.
    told = (wire.decode(line, ToAgent) for line in keeper.stdout)
    held = (one.held for one in told if isinstance(one, Holds))
    assert any(4 in [holding.step for holding in one.holdings] for one in held)


@pytest.mark.parametrize("seconds", ["-1", "1e300", "NaN", "Infinity"])
def test_seconds_out_of_bounds_are_refused(pod: LivePod, seconds: str) -> None:
    pod.start()
    with connect(pod) as connection:
        connection.sendall(f'{{"type":"Measured","what":"saved","seconds":{seconds}}}\n'.encode())
        assert connection.recv(1) == b""
    assert_well(pod)
