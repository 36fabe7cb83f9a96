"""The keepers' port while strangers hold it: real sockets and TLS, no job."""

import contextlib
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.waiting import wait_until

from unbroken.keeper import copy_server
from unbroken.keeper.peer_link import LinkError
from unbroken.keeper.peer_places import MAX_MEMBERS, MAX_STRANGERS, PeerPlace, PeerPlaces
from unbroken_core.pod.memory_slots import num_blocks
from unbroken_core.pod.replica_messages import Fetch, Missing, Sending, ToReader

from .copying import CopyPod, make_pods

STRANGER = "127.0.0.2"


@pytest.fixture
def pair() -> Iterator[tuple[CopyPod, CopyPod]]:
    owner, holder = make_pods("owner", "holder")
    yield owner, holder
    for pod in (owner, holder):
        pod.close()
        shutil.rmtree(pod.root)


def is_answered(owner: CopyPod, holder: CopyPod) -> bool:
    try:
        link = owner.connect(holder)
    except LinkError:
        return False
    with contextlib.closing(link):
        link.send(Fetch(0, 4, 1, 0, 1, 0, 1))
        return isinstance(link.receive(ToReader), Missing)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_free(path: str) -> bool:
    """Whether a worker may save into a slot."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.mark.parametrize("kind", ["blocks", "ranges"])
def test_a_reader_that_is_slow_but_never_silent_keeps_no_worker_from_saving_for_ever(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before, it held the slot for as long as it read 256 KiB in 20 s: a day, for a gigabyte."""
    monkeypatch.setattr(copy_server, "PATIENCE_S", 0.2)
    owner, reader = pair
    size = 60 << 20
    owner.save(1, size=size)
    (sealed,) = owner.arena.sealed()
    link = reader.connect(owner)
    wanted = {"num_blocks": num_blocks(size)} if kind == "blocks" else {"ranges": ((0, size),)}
    link.send(Fetch(0, 4, 1, 0, 1, **wanted))
    assert isinstance(link.receive(ToReader), Sending)
    assert not is_free(str(sealed.path))
    buffer, num_read = memoryview(bytearray(64 << 10)), [0]

    def read_a_little() -> bool:
        with contextlib.suppress(LinkError):
            link.receive_into(buffer)
            num_read[0] += len(buffer)
        return is_free(str(sealed.path))

    wait_until(read_a_little, "a slot that is free")
    assert num_read[0] < size // 2, "all of it was read"
    link.close()


def test_strangers_that_hold_the_port_keep_no_pod_of_the_job_out(pair: tuple[CopyPod, CopyPod]) -> None:
    """Seen before: with 300 silent connections, renewed as they were closed, 2 of 40 of a peer got through."""
    owner, holder = pair
    before = owner.connect(holder)
    is_over, num_made = threading.Event(), [0]

    def hold() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            for one in [one for one in held if is_closed(one)]:
                one.close()
                held.remove(one)
            while len(held) < 300 and not is_over.is_set():
                with contextlib.suppress(OSError):
                    held.append(
                        socket.create_connection(
                            (holder.peer.host, holder.peer.port), 5.0, source_address=(STRANGER, 0)
                        )
                    )
                    num_made[0] += 1
            is_over.wait(0.01)
        for one in held:
            one.close()

    flood = threading.Thread(target=hold)
    flood.start()
    try:
        wait_until(lambda: num_made[0] > 2 * MAX_STRANGERS, "a full port")
        assert [is_answered(owner, holder) for _ in range(20)] == [True] * 20
        before.send(Fetch(0, 4, 1, 0, 1, 0, 1))
        assert isinstance(before.receive(ToReader), Missing), "nobody displaces who has shown a certificate"
    finally:
        is_over.set()
        flood.join()
        before.close()


def test_a_pod_of_the_job_that_opens_too_many_takes_only_its_own_places() -> None:
    refused: list[str] = []
    places = PeerPlaces(refused.append)
    mine, other = socket.socketpair()

    def comes(pod: str) -> tuple[PeerPlace, bool]:
        place = places.come(mine, "10.0.0.1")
        assert place is not None
        return place, places.admit(place, pod)

    honest = comes("honest")
    greedy = [comes("greedy") for _ in range(MAX_MEMBERS + 2)]
    assert [is_in for _, is_in in greedy] == [True] * (MAX_MEMBERS - 1) + [False] * 3
    late = comes("late")
    assert (honest[1], late[1]) == (True, True)
    assert greedy[0][0].is_lost, "the oldest of the pod that holds most goes"
    assert not honest[0].is_lost
    assert not places.admit(greedy[0][0], "greedy"), "what has lost its place is not served"
    assert len(refused) == 4
    for place, _ in (honest, late, *greedy):
        places.leave(place)
    mine.close()
    other.close()


def test_without_descriptors_a_stranger_goes_and_never_a_pod_of_the_job() -> None:
    refused: list[str] = []
    places = PeerPlaces(refused.append)
    mine, other = socket.socketpair()
    member, stranger = places.come(mine, "10.0.0.1"), places.come(mine, "10.0.0.2")
    assert isinstance(member, PeerPlace)
    assert isinstance(stranger, PeerPlace)
    assert places.admit(member, "owner")
    places.spare_a_descriptor()
    places.spare_a_descriptor()
    assert (stranger.is_lost, member.is_lost, len(refused)) == (True, False, 1)
    for place in (member, stranger):
        places.leave(place)
    mine.close()
    other.close()
