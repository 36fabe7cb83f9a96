"""Copies of checkpoints between the keepers of pods: whole, verified, of the right pod, and no wait without an end."""

import fcntl
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.keeper import copy_sender, fetching, peer_link
from unbroken.keeper.arena import FETCHED, Arena
from unbroken.keeper.copy_reader import Fetching, MissingError
from unbroken.keeper.copy_server import CopyServer
from unbroken.keeper.peer_link import Link, LinkError, connect
from unbroken.keeper.reading import ReadLock
from unbroken.keeper.replication import listen
from unbroken.keeper.telling import Telling
from unbroken.memory.sources import open_source
from unbroken.network.pod_certificates import PodAuthority
from unbroken_core.pod.memory_messages import Fetched, FetchShard, NotFetched, Reserved
from unbroken_core.pod.memory_slots import (
    BLOCK_BYTES,
    CONTENT_OFFSET,
    Moment,
    digests_name,
    num_blocks,
    pack_head,
    voided,
)
from unbroken_core.pod.replica_messages import Declined, Fetch, Kept, Missing, Offer, Sending, ToOwner, ToReader, Wanted
from unbroken_core.vocabulary.checkpoints import Load, LoadSource

from .copying import CopyPod, identity, make_pods


@pytest.fixture
def pods() -> Iterator[Callable[..., list[CopyPod]]]:
    made: list[CopyPod] = []

    def make(*uids: str, limit_bytes: int = 256 << 20) -> list[CopyPod]:
        fresh = make_pods(*uids, limit_bytes=limit_bytes)
        made.extend(fresh)
        return fresh

    yield make
    for pod in made:
        pod.close()
        shutil.rmtree(pod.root)


def pair(pods: Callable[..., list[CopyPod]], **kwargs: int) -> tuple[CopyPod, CopyPod]:
    owner, holder = pods("owner", "holder", **kwargs)
    holder.copies.keep_for([owner.uid])
    return owner, holder


def offer_of(owner: CopyPod, local_rank: int = 0) -> tuple[Offer, bytes]:
    """Return what the owner would send now."""
    sealed = next(one for one in owner.arena.sealed() if one.path.name.startswith(f"{local_rank}-"))
    checksums = copy_sender.CopySender(
        owner.peer, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), owner.arena, ranks_per_pod=2
    )._checksums(sealed.path, sealed.head)
    assert checksums is not None
    with ReadLock(sealed.path, sealed.head) as slot:
        content = b"".join(bytes(chunk) for block in range(len(checksums)) for chunk in slot.chunks(block))
        return Offer(local_rank, slot.packed_head.hex(), checksums), content


def has_kept(sender: copy_sender.CopySender, step: int) -> bool:
    return sender.progress.get(0, copy_sender.CopyProgress()).kept == Moment(1, 0, step)


# ---------------------------------------------------------------------------------------------------------- what works


def test_a_holder_has_the_same_bytes_as_the_owner(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    first, second = owner.save(1, rank=2), owner.save(1, local_rank=1, rank=3, size=1000)
    wait_until(lambda: len(sender.progress) == 2, "two copies")
    assert {rank: one.kept for rank, one in sender.progress.items()} == {0: Moment(1, 0, 1), 1: Moment(1, 0, 1)}
    assert holder.copied() == {(0, 1, 2): first, (0, 1, 3): second}


def test_the_newest_whole_copy_stays_while_the_next_comes(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    contents = {}
    for step in range(1, 6):
        contents[step] = owner.save(step)
        wait_until(partial(has_kept, sender, step), "a copy")
        assert holder.copied()[0, step, 0] == contents[step]
    assert holder.copied() == {(0, 4, 0): contents[4], (0, 5, 0): contents[5]}


def test_what_is_told_of_a_copy_is_of_that_copy(pods: Callable[..., list[CopyPod]]) -> None:
    """Each of the owner's slots counts for itself. Seen before: the digest of an earlier copy with the same number."""
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    telling = Telling(holder.arena, holder.root)
    for step, serial in ((1, 5), (2, 4), (4, 5)):
        owner.save(step, serial=serial, size=1000)
        wait_until(partial(has_kept, sender, step), "a copy")
        told = {copy.step: copy.shards for copy in telling.held().copies}
        wanted = {one.step: one.shards for one in Telling(owner.arena, owner.root).held().holdings}
        assert told[step] == wanted[step]


def test_an_owner_that_has_forgotten_everything_sends_nothing_twice(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0), "a copy")
    link = owner.connect(holder)
    link.send(offer_of(owner)[0])
    assert link.receive(ToOwner) == Kept()
    link.close()


def test_a_holder_that_starts_late_gets_what_was_sealed_before(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    content = owner.save(1)
    port = holder.peer.port
    holder.server.close()
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).problem, "a problem that is told")
    listener = socket.create_server(("127.0.0.1", port))
    holder.server = copy_server(holder, listener)
    wait_until(lambda: sender.progress[0].kept, "a copy")
    assert sender.progress[0].problem == ""
    assert holder.copied() == {(0, 1, 0): content}


def copy_server(pod: CopyPod, listener: socket.socket) -> CopyServer:
    server = CopyServer(listener, pod.identity.server_context(), pod.arena, pod.copies)
    server.start()
    return server


def ask(reader: CopyPod, holder: CopyPod, rank: int, step: int, *runs: tuple[int, int]) -> Fetched | NotFetched:
    """Have the reader's keeper fetch blocks of a checkpoint."""
    wanted = FetchShard(holder.peer, rank, 4, 1, 0, step, runs)
    return reader.fetcher.fetch(wanted, reader.identity.client_context())


def test_a_reader_gets_layout_and_objects_and_then_what_it_wants(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder, reader = pods("owner", "holder", "reader")
    holder.copies.keep_for([owner.uid])
    sender = owner.send_to(holder)
    content = owner.save(7, rank=3, size=5 * BLOCK_BYTES + 1000)
    wait_until(lambda: sender.progress.get(0), "a copy")
    first = ask(reader, holder, 3, 7)
    assert isinstance(first, Fetched)
    # Its layout and its objects lie in the first block.
    assert first.num_bytes == BLOCK_BYTES
    path = Path(first.slot.path)
    assert (first.slot.rank, first.slot.step) == (3, 7)
    second = ask(reader, holder, 3, 7, (1, 2), (5, 9))
    assert isinstance(second, Fetched)
    assert (second.slot, second.inode, second.num_bytes) == (first.slot, first.inode, 3 * BLOCK_BYTES)
    got = path.read_bytes()[CONTENT_OFFSET:]
    assert got[: 3 * BLOCK_BYTES] == content[: 3 * BLOCK_BYTES]
    assert got[5 * BLOCK_BYTES :] == content[5 * BLOCK_BYTES :]
    assert got[3 * BLOCK_BYTES : 5 * BLOCK_BYTES] == bytes(2 * BLOCK_BYTES), "more was fetched than was wanted"
    # What is not there takes no memory, and is no checkpoint that anybody finds.
    assert reader.arena.used_bytes() < 5 * BLOCK_BYTES
    assert reader.arena.sealed() == []
    reader.fetcher.clear()
    wait_until(lambda: reader.arena.used_bytes() == 0, "memory that is given back")


def test_what_is_fetched_next_does_not_go_with_what_is_given_back(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next iteration may restore the same step before the memory of this one is free."""
    owner, reader = pods("owner", "reader")
    content = owner.save(1)
    held: list[Path] = []
    monkeypatch.setattr(fetching, "_remove", held.extend)
    first = ask(reader, owner, 0, 1, (0, 9))
    assert isinstance(first, Fetched)
    reader.fetcher.clear()
    wait_until(lambda: held, "a file that is put aside")
    assert not Path(first.slot.path).exists()
    assert reader.arena.used_bytes() > 9 * BLOCK_BYTES, "it is not free yet, and counts"
    second = ask(reader, owner, 0, 1, (0, 9))
    assert isinstance(second, Fetched)
    assert second.inode != first.inode
    monkeypatch.undo()
    fetching._remove(held)
    assert Path(second.slot.path).read_bytes()[CONTENT_OFFSET:][: 9 * BLOCK_BYTES] == content[: 9 * BLOCK_BYTES]


def test_a_pod_is_dropped_with_all_of_its_copies(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0), "a copy")
    holder.copies.drop("somebody")
    assert len(holder.copied()) == 1
    holder.copies.drop(owner.uid)
    assert holder.copied() == {}
    assert list((holder.arena.folder / "copies").iterdir()) == []


# -------------------------------------------------------------------------------------------- who may do what to whom


def test_a_pod_of_another_job_gets_no_connection(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    stranger = PodAuthority("a job's key of any length", "another-job")
    ours = PodAuthority("a job's key of any length", "job-uid")
    context = identity(stranger, owner.uid, trusted=ours).client_context()
    link: Link | None = None
    with pytest.raises(LinkError):
        link = connect((holder.peer.host, holder.peer.port), context, holder.uid)
        # With TLS 1.3 a client learns that its certificate was refused when it reads.
        link.receive(ToReader)
    if link is not None:
        link.close()


def test_a_pod_without_a_certificate_gets_no_connection(pods: Callable[..., list[CopyPod]]) -> None:
    _, holder = pair(pods)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=holder.identity.authority)
    with (
        socket.create_connection((holder.peer.host, holder.peer.port), timeout=60) as plain,
        context.wrap_socket(plain) as connection,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        connection.sendall(b"x")
        if connection.recv(1) == b"":
            raise ConnectionResetError


def test_an_owner_refuses_another_pod_in_the_place_of_its_buddy(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder, peer=replace(holder.peer, uid="buddy"))
    owner.save(1)
    problem = wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).problem, "a problem that is told")
    assert problem == "want the keeper of pod buddy, got that of 'holder'"
    assert holder.copied() == {}


def test_a_pod_keeps_copies_of_its_buddies_alone(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    holder.copies.keep_for(["somebody"])
    sender = owner.send_to(holder)
    owner.save(1)
    problem = wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).problem, "a problem that is told")
    assert problem == "this pod is not to keep your copies"
    assert holder.copied() == {}
    holder.copies.keep_for(["somebody", owner.uid])
    wait_until(lambda: sender.progress[0].kept, "a copy, once it is")


def test_a_copy_that_is_declined_once_is_not_worth_a_warning(
    pods: Callable[..., list[CopyPod]], caplog: pytest.LogCaptureFixture
) -> None:
    """A buddy that was just chosen may hear of it a moment after the owner."""
    owner, holder = pair(pods)
    holder.copies.keep_for(["somebody"])
    owner.save(1)
    sender = copy_sender.CopySender(holder.peer, owner.identity.client_context(), owner.arena, ranks_per_pod=1)
    with closing(owner.connect(holder)) as link:
        logged = []
        for _ in range(3):
            assert [sender._send(link, *one) for one in sender._due()] == [False]
            assert sender.progress[0].problem == "this pod is not to keep your copies"
            logged.append(caplog.text.count("copy declined: to=holder step=1: this pod is not to keep your copies"))
        assert logged == [0, 1, 1]
        holder.copies.keep_for([owner.uid])
        assert [sender._send(link, *one) for one in sender._due()] == [True]
        # Later it is news again.
        holder.copies.keep_for(["somebody"])
        owner.save(2)
        assert [sender._send(link, *one) for _ in range(2) for one in sender._due()] == [False, False]
    assert caplog.text.count("copy declined") == 2


def test_an_older_checkpoint_never_replaces_a_newer_one(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    owner.save(6, iteration=1)
    old, _ = offer_of(owner)
    owner.save(3, iteration=2)
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0), "a copy")
    link = owner.connect(holder)
    link.send(old)
    assert link.receive(ToOwner) == Declined("step 3 of iteration 2 is here, and not older")
    link.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"head": "zz"}, None, id="no digits"),
        pytest.param({"head": "00" * 4096}, "head: want one of a slot, got another", id="no head"),
        pytest.param({"head": ""}, "head: want one of a slot, got another", id="nothing"),
        pytest.param({"checksums": ()}, f"checksums: want {num_blocks(9 << 20)}, got 0", id="no digests"),
        pytest.param({"checksums": (1, 2, 3, 4)}, f"checksums: want {num_blocks(9 << 20)}, got 4", id="more digests"),
        pytest.param({"local_rank": 8}, "local_rank: want 0 to 7, got 8", id="local rank"),
        pytest.param({"local_rank": 2**70}, None, id="absurd local rank"),
        pytest.param({"checksums": (-1, 2, 3)}, None, id="absurd digests"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(
    pods: Callable[..., list[CopyPod]], change: dict[str, Any], reason: str | None
) -> None:
    owner, holder = pair(pods)
    owner.save(1)
    link = owner.connect(holder)
    link.send(replace(offer_of(owner)[0], **change))
    if reason is None:
        with pytest.raises(LinkError, match=r"closed|reset|EOF"):
            link.receive(ToOwner)
    else:
        assert link.receive(ToOwner) == Declined(reason)
    link.close()
    assert holder.copied() == {}
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0), "a copy all the same")


def test_the_copy_of_another_jobs_checkpoint_is_refused(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    owner.save(1)
    (sealed,) = owner.arena.sealed()
    offer, _ = offer_of(owner)
    link = owner.connect(holder)
    for other in (replace(sealed.head, job=b"x" * 16), voided(sealed.head)):
        link.send(replace(offer, head=pack_head(other).rstrip(b"\0").hex()))
        assert link.receive(ToOwner) == Declined("head: want a sealed checkpoint of this job")
    link.close()


def test_a_frame_without_an_end_is_refused(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    link = owner.connect(holder)
    link.send_content(b"\xff\xff\xff\xff")
    with pytest.raises(LinkError):
        while True:
            link.send_content(b"x" * (1 << 20))
    link.close()
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0), "a copy all the same")


def test_connections_without_a_handshake_do_not_keep_others_out(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "HANDSHAKE_S", 0.5)
    owner, holder = pair(pods)
    silent = [socket.create_connection((holder.peer.host, holder.peer.port)) for _ in range(300)]
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).kept, "a copy")
    for one in silent:
        one.close()


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_a_block_that_differs_is_never_kept(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    before = owner.save(1)
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0), "a copy")
    sender.close()
    owner.save(2)
    offer, content = offer_of(owner)
    link = owner.connect(holder)
    link.send(offer)
    assert link.receive(ToOwner) == Wanted()
    link.send_content(content[:5_000_000] + bytes([content[5_000_000] ^ 1]) + content[5_000_001:])
    assert link.receive(ToOwner) == Declined(f"block {5_000_000 // BLOCK_BYTES} differs from what its owner digested")
    assert holder.copied() == {(0, 1, 0): before}
    assert holder.spoilt == ["copy"]
    # The connection is still of use.
    link.send(offer)
    assert link.receive(ToOwner) == Wanted()
    link.send_content(content)
    assert link.receive(ToOwner | Kept) == Kept()
    assert holder.copied() == {(0, 1, 0): before, (0, 2, 0): content}
    link.close()


@pytest.mark.parametrize("sent", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, (9 << 20) - 1])
def test_a_copy_that_breaks_off_leaves_the_older_one(pods: Callable[..., list[CopyPod]], sent: int) -> None:
    owner, holder = pair(pods)
    before = owner.save(1)
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0), "a copy")
    sender.close()
    after = owner.save(2)
    offer, content = offer_of(owner)
    link = owner.connect(holder)
    link.send(offer)
    assert link.receive(ToOwner) == Wanted()
    link.send_content(content[:sent])
    link.close()
    assert holder.copied() == {(0, 1, 0): before}
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).kept, "the copy, sent again")
    assert holder.copied() == {(0, 1, 0): before, (0, 2, 0): after}


def test_a_peer_that_stalls_is_cut_off_and_frees_the_slot(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "STALL_S", 0.5)
    owner, holder = pair(pods)
    owner.save(1)
    offer, content = offer_of(owner)
    link = owner.connect(holder)
    link.send(offer)
    assert link.receive(ToOwner) == Wanted()
    # The holder waits for content, and gives up; then the same copy can be made over another connection.
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).kept, "a copy")
    assert holder.copied() == {(0, 1, 0): content}
    link.close()


def test_a_holder_that_never_answers_does_not_hold_the_slot_for_ever(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "STALL_S", 0.5)
    owner, holder = pair(pods)
    begun = threading.Event()
    original = type(holder.server)._take

    def silent(server: object, link: Link, offer: Offer) -> None:
        begun.set()
        link.receive(ToOwner)

    monkeypatch.setattr(type(holder.server), "_take", silent)
    owner.save(1)
    sender = owner.send_to(holder)
    assert begun.wait(60)
    problem = wait_until(lambda: sender.progress.get(0, copy_sender.CopyProgress()).problem, "a problem that is told")
    assert "timed out" in problem or "closed" in problem
    monkeypatch.setattr(type(holder.server), "_take", original)
    wait_until(lambda: sender.progress[0].kept, "a copy, once it answers")


def test_no_room_is_told_with_numbers_and_keeps_what_is_there(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    small = owner.save(1, size=1 << 20)
    sender = owner.send_to(holder)
    wait_until(lambda: sender.progress.get(0), "a copy")
    holder.arena._config = replace(holder.arena._config, limit_bytes=4 << 20)
    owner.save(2, size=6 << 20)
    problem = wait_until(lambda: sender.progress[0].problem, "a problem that is told")
    assert problem.startswith("no room: its slots have 10")
    assert "more are wanted" in problem
    assert sender.progress[0].kept == Moment(1, 0, 1)
    assert holder.copied() == {(0, 1, 0): small}


def test_a_slot_that_is_being_sent_cannot_be_overwritten_and_is_free_afterwards(
    pods: Callable[..., list[CopyPod]],
) -> None:
    owner, _ = pair(pods)
    owner.save(1)
    (sealed,) = owner.arena.sealed()

    def may_write() -> bool:
        descriptor = os.open(sealed.path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    with ReadLock(sealed.path, sealed.head):
        assert not may_write()
    assert may_write()


def test_a_trainer_that_truncates_its_slot_ends_the_copy_alone(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    owner.save(1)
    (sealed,) = owner.arena.sealed()
    os.truncate(sealed.path, CONTENT_OFFSET + 1000)
    sender = owner.send_to(holder)
    other = owner.save(1, local_rank=1, rank=1)
    wait_until(lambda: sender.progress.get(1, copy_sender.CopyProgress()).kept, "the copy of another worker")
    assert holder.copied() == {(0, 1, 1): other}


def test_what_a_holder_does_not_have_is_missing(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0), "a copy")
    link = owner.connect(holder)
    for rank, size, moment in [(1, 4, Moment(1, 0, 1)), (0, 3, Moment(1, 0, 1)), (0, 4, Moment(1, 0, 2))]:
        with pytest.raises(MissingError, match="is not here"):
            Fetching(link, rank, size, moment)
    assert Fetching(link, 0, 4, Moment(1, 0, 1)).head.rank == 0
    link.send(Fetch(0, 4, 1, 0, 1, first_block=1 << 17, num_blocks=1 << 17))
    assert isinstance(link.receive(ToReader), Sending)
    link.send(Fetch(9, 9, 9, 9, 9))
    assert isinstance(link.receive(ToReader), Missing)
    link.close()


def test_a_copy_that_has_changed_in_memory_is_not_handed_out_as_right(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    owner.save(1)
    wait_until(lambda: sender.progress.get(0), "a copy")
    (copy,) = (one for one in holder.arena.sealed() if one.path.parent.name == "copies")
    with copy.path.open("r+b") as file:
        file.seek(CONTENT_OFFSET + 6_000_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    (reader,) = pods("reader")
    answer = ask(reader, holder, 0, 1, (0, 9))
    assert isinstance(answer, NotFetched)
    assert answer.reason == f"pod holder: block {6_000_000 // BLOCK_BYTES} differs from what its owner digested"
    assert reader.arena.sealed() == []


def test_what_is_fetched_stays_within_the_limit(pods: Callable[..., list[CopyPod]]) -> None:
    (owner,) = pods("owner")
    (reader,) = pods("reader", limit_bytes=4 << 20)
    owner.save(1)
    assert isinstance(ask(reader, owner, 0, 1), Fetched)
    answer = ask(reader, owner, 0, 1, (0, 9))
    assert isinstance(answer, NotFetched)
    assert answer.reason.startswith("no room for what is fetched from other pods: its slots have 10")
    reader.fetcher.clear()
    wait_until(lambda: reader.arena.used_bytes() == 0, "memory that is given back")


def test_a_fetch_waits_for_the_memory_that_is_being_given_back(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: a restore soon after another was refused, since files that nobody looks for still counted."""
    (owner,) = pods("owner")
    (reader,) = pods("reader", limit_bytes=14 << 20)
    owner.save(1)
    asks_again, original = threading.Event(), fetching._remove

    def remove_late(paths: Sequence[Path]) -> None:
        assert asks_again.wait(60.0)
        original(paths)

    monkeypatch.setattr(fetching, "_remove", remove_late)
    assert isinstance(ask(reader, owner, 0, 1, (0, 9)), Fetched)
    reader.fetcher.clear()
    refusals: list[str] = []
    why_no_room = reader.arena._why_no_room

    def note(growth: int) -> str:
        refusals.append(why_no_room(growth))
        asks_again.set()
        return refusals[-1]

    monkeypatch.setattr(reader.arena, "_why_no_room", note)
    assert isinstance(ask(reader, owner, 0, 1, (0, 9)), Fetched)
    assert [bool(refusal) for refusal in refusals] == [True, False]


def test_a_fetch_does_not_wait_without_an_end_for_memory_that_is_being_given_back(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner,) = pods("owner")
    (reader,) = pods("reader", limit_bytes=14 << 20)
    owner.save(1)
    is_over = threading.Event()
    monkeypatch.setattr(fetching, "_remove", lambda _paths: is_over.wait())
    monkeypatch.setattr(fetching, "_REMOVAL_S", 0.2)
    assert isinstance(ask(reader, owner, 0, 1, (0, 9)), Fetched)
    reader.fetcher.clear()
    answer = ask(reader, owner, 0, 1, (0, 9))
    is_over.set()
    assert isinstance(answer, NotFetched)
    assert answer.reason.startswith("no room for what is fetched from other pods")


def test_what_an_earlier_keeper_had_fetched_is_gone_before_anything_is_reserved(
    pods: Callable[..., list[CopyPod]],
) -> None:
    """Seen before: until the first fetch nobody saw it, and the pod took more than its limit."""
    (pod,) = pods("pod", limit_bytes=4 << 20)
    pod.arena.open_fetched()
    folder = pod.arena.folder / FETCHED
    pod.arena.close()
    (folder / "noise").mkdir()  # By a trainer that is root: it takes the keeper nothing.
    for name in ("gone-1.slot", "0123456789abcdef.slot", digests_name("0123456789abcdef.slot")):
        (folder / name).write_bytes(bytes(1 << 20))
    pod.arena = Arena(pod.arena._config)
    assert [path.name for path in folder.iterdir()] == ["noise"]
    assert isinstance(pod.arena.reserve(0, 1 << 20), Reserved)


def test_a_pod_that_hands_out_a_little_at_a_time_is_given_up(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PATIENCE_S", 0.2)
    monkeypatch.setattr(fetching, "LEAST_BYTES_PER_S", 1e12)
    owner, reader = pods("owner", "reader")
    owner.save(1)
    original = Link.send_content

    def trickle(link: Link, content: bytes | memoryview) -> None:
        for at in range(0, len(content), 64):
            original(link, content[at : at + 64])
            threading.Event().wait(0.001)

    monkeypatch.setattr(Link, "send_content", trickle)
    answer = ask(reader, owner, 0, 1, (0, 9))
    assert isinstance(answer, NotFetched)
    assert "takes too long" in answer.reason


def test_a_copy_of_a_timeline_that_is_over_is_overwritten_first(pods: Callable[..., list[CopyPod]]) -> None:
    """Before, what was restored was overwritten, since a later step of the old timeline seemed to be newer."""
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    contents = {}
    for step in (5, 6):
        contents[step] = owner.save(step)
        wait_until(partial(has_kept, sender, step), "a copy")
    sender.close()
    # All ranks went back to step 5; step 6 is void.
    load = Load(1, 1, LoadSource.MEMORY, 1, 0, 5)
    contents[7] = owner.save(6, iteration=1)
    offer, _ = offer_of(owner)
    link = owner.connect(holder)
    link.send(replace(offer, began_with=load))
    assert link.receive(ToOwner) == Wanted()
    # While the next one comes, the one that was restored is there.
    assert holder.copied() == {(0, 5, 0): contents[5]}
    link.close()


def test_a_copy_that_a_worker_reads_is_not_overwritten_until_it_lets_go(pods: Callable[..., list[CopyPod]]) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    contents = {}
    for step in (5, 6):
        contents[step] = owner.save(step)
        wait_until(partial(has_kept, sender, step), "a copy")
    older = next(one for one in holder.arena.find().slots if one.step == 5)
    source = open_source(older)
    contents[7] = owner.save(7)
    problem = wait_until(lambda: sender.progress[0].problem, "a problem that is told")
    assert problem == "the older copy is being read"
    assert bytes(source.content.numpy()) == contents[5]
    # Nobody closes it: it goes when nobody has it any more.
    del source
    wait_until(partial(has_kept, sender, 7), "a copy")
    assert holder.copied() == {(0, 6, 0): contents[6], (0, 7, 0): contents[7]}


def test_a_keeper_listens_elsewhere_where_its_port_is_taken_or_its_address_is_not_of_this_host() -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = listen("127.0.0.1", port)
    # An address that is for documents, and no host's.
    third = listen("192.0.2.1", 0)
    names = [one.getsockname() for one in (first, second, third)]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.1", "0.0.0.0"]
    assert len({name[1] for name in names}) == 3
    for one in (first, second, third):
        one.close()


def test_a_sender_with_a_rate_waits_for_what_it_is_ahead(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still it is ahead by all that it has sent."""
    owner, holder = pair(pods)
    content = owner.save(1, size=3 * peer_link.CHUNK_BYTES)
    monkeypatch.setattr(copy_sender, "time", Standing())
    sender = copy_sender.CopySender(
        holder.peer, owner.identity.client_context(), owner.arena, ranks_per_pod=2, bytes_per_s=1e9
    )
    waits: list[float | None] = []
    monkeypatch.setattr(sender, "_over", Impatient(waits))
    owner.senders.append(sender)
    sender.start()
    wait_until(partial(has_kept, sender, 1), "a copy")
    assert holder.copied() == {(0, 1, 0): content}
    # A block is a chunk; the last one has what is left.
    sizes = [BLOCK_BYTES] * 3 + [len(content) - 3 * BLOCK_BYTES]
    assert waits == [pytest.approx(sum(sizes[: number + 1]) / 1e9) for number in range(len(sizes))]


class Standing:
    """A clock that stands still."""

    @staticmethod
    def monotonic() -> float:
        """Return the time."""
        return 5.0


class Impatient(threading.Event):
    """Notes how long it should wait, and does not."""

    def __init__(self, waits: list[float | None]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        """Do not wait."""
        self._waits.append(timeout)
        return self.is_set()


# -------------------------------------------------------------------------------------------------------------- pinned


def send_first(owner: CopyPod, holder: CopyPod, first: Callable[[], tuple[int, int, int] | None]) -> None:
    """Send to a holder until the owner is closed, one step before all others."""
    sender = copy_sender.CopySender(
        holder.peer, owner.identity.client_context(), owner.arena, ranks_per_pod=2, first=first
    )
    owner.senders.append(sender)
    sender.start()


def test_a_pinned_copy_stays_whatever_comes_after_it(pods: Callable[..., list[CopyPod]]) -> None:
    """Also after several: else what a lost owner was promised would be gone."""
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    contents = {}
    for step in range(1, 6):
        contents[step] = owner.save(step, size=1000)
        wait_until(partial(has_kept, sender, step), "a copy")
        holder.copies.pin([(0, 2, 1)] if step == 1 else [(0, 1, 2)])
    assert holder.copied() == {(0, 2, 0): contents[2], (0, 5, 0): contents[5]}


def test_a_copy_waits_while_both_that_are_there_are_pinned_and_is_no_problem(
    pods: Callable[..., list[CopyPod]],
) -> None:
    owner, holder = pair(pods)
    sender = owner.send_to(holder)
    contents = {}
    for step in (1, 2):
        contents[step] = owner.save(step, size=1000)
        wait_until(partial(has_kept, sender, step), "a copy")
    holder.copies.pin([(0, 1, 1), (0, 1, 2)])
    contents[3] = owner.save(3, size=1000)
    link = owner.connect(holder)
    offer, _ = offer_of(owner)
    link.send(offer)
    answer = link.receive(ToOwner)
    link.close()
    assert answer == Declined("the copies that are here are needed until another step is protected", is_soon=True)
    assert sender.progress[0] == copy_sender.CopyProgress(Moment(1, 0, 2))
    holder.copies.pin([(0, 1, 2)])
    wait_until(partial(has_kept, sender, 3), "a copy once one is free")
    assert holder.copied() == {(0, 2, 0): contents[2], (0, 3, 0): contents[3]}


def test_the_step_that_is_to_be_protected_goes_first_though_a_newer_one_was_kept(
    pods: Callable[..., list[CopyPod]],
) -> None:
    owner, holder = pair(pods)
    wanted: list[tuple[int, int, int]] = []
    send_first(owner, holder, lambda: wanted[0] if wanted else None)
    sender = owner.senders[0]
    contents = {step: owner.save(step, size=1000) for step in (1, 2)}
    wait_until(partial(has_kept, sender, 2), "a copy of the newest")
    wanted.append((0, 1, 1))
    holder.copies.pin([(0, 1, 1)])
    sender.note()
    wait_until(partial(has_kept, sender, 1), "a copy of the older one")
    assert holder.copied() == {(0, step, 0): content for step, content in contents.items()}


def test_a_fetch_makes_a_file_anew_that_its_own_trainer_has_removed(pods: Callable[..., list[CopyPod]]) -> None:
    """Seen before: each later fetch of it failed, until all ranks had restored without it."""
    owner, reader = pods("owner", "reader")
    content = owner.save(1)
    first = ask(reader, owner, 0, 1, (0, 2))
    assert isinstance(first, Fetched)
    path = Path(first.slot.path)
    for removed in (path, path.with_name(digests_name(path.name))):
        removed.unlink()
        answer = ask(reader, owner, 0, 1, (0, 9))
        assert isinstance(answer, Fetched)
        # All of it: what was here before is gone.
        assert answer.num_bytes == 9 * BLOCK_BYTES
        assert path.read_bytes()[CONTENT_OFFSET:][: 9 * BLOCK_BYTES] == content[: 9 * BLOCK_BYTES]
        assert path.with_name(digests_name(path.name)).exists()


def test_a_fetch_does_not_write_into_a_file_that_its_own_trainer_has_put_there(
    pods: Callable[..., list[CopyPod]],
) -> None:
    owner, reader = pods("owner", "reader")
    content = owner.save(1)
    first = ask(reader, owner, 0, 1, (0, 2))
    assert isinstance(first, Fetched)
    path = Path(first.slot.path)
    other = path.with_name("other")
    other.write_bytes(b"mine")
    other.replace(path)
    kept = path.with_name("kept")
    kept.hardlink_to(path)
    answer = ask(reader, owner, 0, 1, (0, 9))
    assert isinstance(answer, Fetched)
    assert kept.read_bytes() == b"mine"
    assert path.read_bytes()[CONTENT_OFFSET:][: 9 * BLOCK_BYTES] == content[: 9 * BLOCK_BYTES]


def test_nothing_stays_of_fetches_that_are_over_whatever_a_worker_asks_for(
    pods: Callable[..., list[CopyPod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: one lock for each name, until all ranks had restored."""
    owner, reader = pods("owner", "reader")
    owner.save(1)
    for step in range(2, 12):
        assert isinstance(ask(reader, owner, 0, step), NotFetched)
    assert reader.fetcher._locks == {}
    # Those who ask for the same at once still take turns, and leave nothing either.
    at_once, most, guard = [0], [0], threading.Lock()
    original = fetching.Fetcher._fetch

    def noting(*arguments: Any) -> Any:
        with guard:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        try:
            return original(*arguments)
        finally:
            with guard:
                at_once[0] -= 1

    monkeypatch.setattr(fetching.Fetcher, "_fetch", noting)
    threads = [threading.Thread(target=ask, args=(reader, owner, 0, 1, (0, 9))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert most == [1]
    assert reader.fetcher._locks == {}
