"""A world of another size reads ranges of other pods' shards: no byte more comes, and each is compared all the same."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from unbroken.keeper.copy_server import CopyServer
from unbroken.keeper.peer_link import LinkError
from unbroken.memory.arena import WorkerSlots
from unbroken.memory.choosing import ReadableCheckpoint
from unbroken.memory.remote import Holders, Remote, RemoteSource
from unbroken.memory.sources import UnreadableError
from unbroken_core.pod.memory_messages import MAX_RUNS, Fetched, FetchShard, NotFetched
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, Moment
from unbroken_core.pod.replica_messages import Fetch, ToReader
from unbroken_core.vocabulary.checkpoints import MAX_RANGES, Candidate, Restore

from .copying import make_pods

SIZE = 5 * BLOCK_BYTES + 1000
STEP = 1


class Pods:
    """A pod that has a checkpoint, another one, and what a worker of that one does."""

    def __init__(self) -> None:
        self.owner, self.reader = make_pods("owner", "reader")
        self.content = self.owner.save(STEP, size=SIZE)
        self.asked: list[FetchShard] = []

    def fetch(self, wanted: FetchShard) -> Fetched | NotFetched:
        """As WorkerSlots.fetch."""
        self.asked.append(wanted)
        return self.reader.fetcher.fetch(wanted, self.reader.identity.client_context())

    def open(self, iteration: int = 1) -> RemoteSource:
        """Return the shard, as a worker of the reader opens it."""
        candidate = Candidate(1, 0, STEP, 4, fetches=((0, 1, 0, self.owner.uid),))
        holders = Holders(Restore((candidate,), peers=(self.owner.peer,)))
        arena: Any = self
        assert callable(WorkerSlots.fetch)
        return Remote(arena, holders, iteration).open(ReadableCheckpoint(Moment(1, 0, STEP), 4), 0)

    def flip(self, path: Path, offset: int) -> None:
        """Change a bit of the content of a slot."""
        descriptor = os.open(path, os.O_RDWR)
        (byte,) = os.pread(descriptor, 1, CONTENT_OFFSET + offset)
        os.pwrite(descriptor, bytes([byte ^ 4]), CONTENT_OFFSET + offset)
        os.close(descriptor)

    def is_right(self, source: RemoteSource, start: int, length: int) -> bool:
        """Whether a part of the shard is here."""
        return bytes(source.content[start : start + length].numpy()) == self.content[start : start + length]


@pytest.fixture
def pods() -> Iterator[Pods]:
    made = Pods()
    yield made
    for pod in (made.owner, made.reader):
        pod.close()
        shutil.rmtree(pod.root)


WITHIN = (2 * BLOCK_BYTES + 100_000, 50_000)
ACROSS = (3 * BLOCK_BYTES - 30_000, BLOCK_BYTES + 40_000)
LAST = (SIZE - 500, 500)


def test_no_more_comes_than_is_wanted(pods: Pods) -> None:
    source = pods.open()
    before = source.num_bytes
    source.verify([WITHIN, ACROSS, LAST])
    # What is left of the last block is too small to be left out. It counts as any whole one.
    wanted = WITHIN[1] + ACROSS[1] + BLOCK_BYTES
    assert source.num_bytes - before == wanted
    assert all(pods.is_right(source, *one) for one in (WITHIN, ACROSS, LAST))
    # Before a look at what is not there, which would allocate it.
    assert pods.reader.arena.used_bytes() < 3 * BLOCK_BYTES
    assert bytes(source.content[BLOCK_BYTES : 2 * BLOCK_BYTES].numpy()) == bytes(BLOCK_BYTES)
    source.verify([WITHIN, (WITHIN[0] + 5, 10), LAST])
    assert source.num_bytes - before == wanted, "what is here was fetched again"
    source.close()


def test_what_is_wanted_later_joins_what_is_here(pods: Pods) -> None:
    source = pods.open()
    start = 2 * BLOCK_BYTES
    for first in (600_000, 100_000, 90_000, 0):
        source.verify([(start + first, 50_000)])
        assert pods.is_right(source, start + first, 50_000)
    source.verify([(start, BLOCK_BYTES)])
    assert pods.is_right(source, start, BLOCK_BYTES)
    source.verify([(start + 600_000, 50_000)])
    assert pods.is_right(source, start + 600_000, 50_000)
    # Another worker of the pod, or the same one in its next attempt.
    other = pods.open()
    other.verify([(start + 1000, 10), ACROSS])
    assert pods.is_right(other, *ACROSS)
    source.close()
    other.close()


def test_more_ranges_than_one_message_has(pods: Pods) -> None:
    source = pods.open()
    ranges = [(BLOCK_BYTES + number * 13_000, 5_000) for number in range(3 * MAX_RUNS)]
    source.verify(ranges)
    assert all(pods.is_right(source, *one) for one in ranges)
    assert all(len(one.ranges) <= MAX_RUNS for one in pods.asked)
    # So many pieces of a block are not worth it.
    assert source.num_bytes <= 5 * BLOCK_BYTES
    source.close()


@pytest.mark.parametrize("offset", [WITHIN[0] + 49_999, WITHIN[0] - 1, 2 * BLOCK_BYTES], ids=["piece", "gap", "begin"])
def test_a_block_that_has_changed_at_its_holder_is_refused(pods: Pods, offset: int) -> None:
    """Also if the wrong bit lies in what is not sent: nobody knows what else is wrong there."""
    source = pods.open()
    (sealed,) = pods.owner.arena.sealed()
    pods.flip(sealed.path, offset)
    with pytest.raises(UnreadableError, match="pod owner: block 2 differs from what its owner digested"):
        source.verify([WITHIN])
    assert not pods.is_right(source, *WITHIN)
    source.close()


def test_a_piece_that_has_changed_since_it_was_fetched_is_refused(pods: Pods) -> None:
    source = pods.open()
    pods.fetch(replace(pods.asked[0], ranges=(WITHIN,)))
    pods.flip(Path(source.path), WITHIN[0] + 7)
    with pytest.raises(UnreadableError, match="block 2 differs from what was sealed"):
        source.verify([WITHIN])
    source.close()


@pytest.mark.parametrize("wanted", [(SIZE - 10, 11), (SIZE + BLOCK_BYTES, 5)])
def test_what_is_behind_the_content_cannot_be_read(pods: Pods, wanted: tuple[int, int]) -> None:
    source = pods.open()
    with pytest.raises(UnreadableError, match=f"has {SIZE} bytes, and a part behind them is wanted"):
        source.verify([wanted])
    source.close()


def test_a_holder_of_an_earlier_release_sends_whole_blocks(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_out = CopyServer._hand_out
    monkeypatch.setattr(
        CopyServer, "_hand_out", lambda server, link, wanted: hand_out(server, link, replace(wanted, ranges=()))
    )
    source = pods.open()
    before = source.num_bytes
    source.verify([WITHIN, ACROSS])
    assert pods.is_right(source, *WITHIN)
    assert pods.is_right(source, *ACROSS)
    assert source.num_bytes - before >= 3 * BLOCK_BYTES
    source.close()


def test_a_keeper_of_an_earlier_release_is_asked_for_blocks(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = pods.fetch

    def earlier(wanted: FetchShard) -> Fetched | NotFetched:
        answer = fetch(replace(wanted, ranges=()))
        return replace(answer, takes_ranges=False, parts=()) if isinstance(answer, Fetched) else answer

    monkeypatch.setattr(pods, "fetch", earlier)
    source = pods.open()
    source.verify([WITHIN, ACROSS])
    assert pods.is_right(source, *WITHIN)
    assert pods.is_right(source, *ACROSS)
    assert not any(one.ranges for one in pods.asked)
    source.close()


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(((0, SIZE + 1),), id="behind the end"),
        pytest.param(((-1, 5),), id="before the beginning"),
        pytest.param(((5, 0),), id="nothing"),
        pytest.param(((5, -5),), id="less than nothing"),
        pytest.param(((1 << 70, 1),), id="absurd"),
        pytest.param(((0, 1),) * (MAX_RANGES + 1), id="too many"),
    ],
)
def test_ranges_that_make_no_sense_end_the_connection_alone(pods: Pods, ranges: tuple[tuple[int, int], ...]) -> None:
    link = pods.reader.connect(pods.owner)
    link.send(Fetch(0, 4, 1, 0, STEP, ranges=ranges))
    with pytest.raises(LinkError, match=r"closed|reset|EOF"):
        link.receive(ToReader)
    link.close()
    source = pods.open()
    source.verify([WITHIN])
    assert pods.is_right(source, *WITHIN)
    source.close()


def test_pieces_that_are_not_all_that_was_wanted_are_refused(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = pods.fetch

    def less(wanted: FetchShard) -> Fetched | NotFetched:
        return fetch(replace(wanted, ranges=tuple((start, length - 1) for start, length in wanted.ranges)))

    monkeypatch.setattr(pods, "fetch", less)
    source = pods.open()
    with pytest.raises(UnreadableError, match="the keeper has not fetched all of block 2"):
        source.verify([WITHIN])
    source.close()


@pytest.mark.parametrize("host", ["10..1", "a" * 64, "."])
def test_a_host_that_is_no_name_is_a_holder_that_is_not_reached(pods: Pods, host: str) -> None:
    """Before, the thread of whoever copied or restored ended with it."""
    peer = replace(pods.owner.peer, host=host)
    answer = pods.fetch(FetchShard(peer, 0, 4, 1, 0, STEP, restored_in=0))
    assert isinstance(answer, NotFetched)
    assert answer.reason.startswith("pod owner: cannot connect: ")
    sender = pods.owner.send_to(pods.reader, peer=replace(pods.reader.peer, host=host))
    wait_until(lambda: 0 in sender.progress and sender.progress[0].problem, "a problem that is told")
    assert sender._thread.is_alive()


def test_what_a_worker_is_not_told_of_a_block_does_not_make_it_right(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = pods.fetch

    def without_gaps(wanted: FetchShard) -> Fetched | NotFetched:
        answer = fetch(wanted)
        assert isinstance(answer, Fetched)
        return replace(answer, parts=tuple((block, pieces, gaps[1:]) for block, pieces, gaps in answer.parts))

    monkeypatch.setattr(pods, "fetch", without_gaps)
    source = pods.open()
    with pytest.raises(UnreadableError, match="block 2 differs from what was sealed"):
        source.verify([WITHIN])
    source.close()
