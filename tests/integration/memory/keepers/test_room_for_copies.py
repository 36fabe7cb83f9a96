"""A pod was lost, and its copies stay until a newer step is protected: those of its successor need room beside them."""

import itertools
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from tests.integration.memory.copying import JOB, CopyPod, make_pods

from unbroken.keeper.arena import COPIES
from unbroken.keeper.copies import Copies, NotKeptError
from unbroken.keeper.reading import ReadLock
from unbroken_core.pod.memory_messages import NoRoom, Reserved
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, Head, Moment, SlotState

SIZE = 1 << 20
SHARD_BYTES = SIZE + CONTENT_OFFSET + (64 << 10)
"""More than the slot of one shard takes."""


@pytest.fixture
def make() -> Iterator[Callable[[int], CopyPod]]:
    """Return a pod with room for so many shards, of which two are its own."""
    made: list[CopyPod] = []

    def make_one(num_shards: int) -> CopyPod:
        (pod,) = make_pods("holder", limit_bytes=num_shards * SHARD_BYTES)
        made.append(pod)
        pod.copies.keep_for(["lost"])
        assert isinstance(pod.arena.reserve(0, CONTENT_OFFSET + SIZE), Reserved)
        return pod

    yield make_one
    for pod in made:
        pod.close()
        shutil.rmtree(pod.root)


def keep(pod: CopyPod, owner: str, step: int, rank: int = 1) -> None:
    """Take a copy, as from a connection. Raises NotKeptError."""
    content = secrets.token_bytes(SIZE)
    head = Head(SlotState.SEALED, step, JOB, Moment(1, 0, step), rank, 4, b"l" * 16, 10, 10, 20, SIZE, ())
    receiving = pod.copies.begin(owner, 0, head, [zlib.crc32(content[:BLOCK_BYTES]), zlib.crc32(content[BLOCK_BYTES:])])
    assert receiving is not None
    with closing(receiving):
        receiving.write(0, content[:BLOCK_BYTES])
        receiving.write(1, content[BLOCK_BYTES:])
        receiving.seal()


def steps(pod: CopyPod) -> list[int]:
    """Return the steps of all whole copies."""
    return sorted(step for _iteration, step, _rank in pod.copied())


def lose(pod: CopyPod, pinned: int | None, *saved: int) -> None:
    """Keep copies of a pod that is lost then, and shall have a successor."""
    for step in saved:
        keep(pod, "lost", step)
    pod.copies.pin([] if pinned is None else [(0, 1, pinned)])
    pod.copies.keep_for(["successor"])


def test_room_for_a_restore_is_enough_for_the_copies_of_a_successor(make: Callable[[int], CopyPod]) -> None:
    """Seen before: with the memory that the docs ask for, nothing was protected any more once a pod had been lost."""
    pod = make(5)
    lose(pod, 6, 6, 8)
    keep(pod, "successor", 9)
    assert steps(pod) == [6, 8, 9], "nothing is given up while there is room"
    keep(pod, "successor", 10)
    assert steps(pod) == [6, 9, 10], "what was told protected stays"
    pod.copies.keep_for(["successor", "another"])
    with pytest.raises(NotKeptError, match="no room: its slots have"):
        keep(pod, "another", 1)
    assert steps(pod) == [6, 9, 10], "nor does it go for a third pod"


@pytest.mark.parametrize(("pinned", "left"), [(6, [6]), (None, [8]), (3, [])])
def test_what_is_of_use_stays_and_without_a_protected_step_that_is_the_newest(
    make: Callable[[int], CopyPod], pinned: int | None, left: list[int]
) -> None:
    pod = make(5)
    lose(pod, pinned, 6, 8)
    while pod.copies.give_way():
        pass
    assert steps(pod) == left
    assert bool(list(pod.root.rglob("*.owner"))) == bool(left), "its name goes with the last of them"
    assert len(list(pod.root.rglob("copies/*"))) == 3 * len(left), "slot, digests, and whose they are"


def test_copies_of_pods_for_which_they_are_kept_never_give_way(make: Callable[[int], CopyPod]) -> None:
    pod = make(5)
    lose(pod, 20, 6, 8)
    pod.copies.keep_for(["lost"])
    assert not pod.copies.give_way()
    assert steps(pod) == [6, 8]


def test_a_keeper_that_was_started_again_gives_nothing_up_before_it_is_told_what_stays(
    make: Callable[[int], CopyPod],
) -> None:
    pod = make(4)
    lose(pod, 6, 6, 8)
    again = Copies(pod.arena, max_ranks_per_pod=8)
    assert isinstance(pod.arena.reserve(1, CONTENT_OFFSET + SIZE), NoRoom)
    assert steps(pod) == [6, 8]
    again.pin([(0, 1, 6)])
    again.keep_for(["successor"])
    assert again.give_way()
    assert steps(pod) == [6]


def test_a_copy_that_is_being_read_stays(make: Callable[[int], CopyPod]) -> None:
    pod = make(5)
    lose(pod, 6, 6, 8)
    newest = pod.arena.sealed()[0]
    with ReadLock(pod.arena.reached(newest.path), newest.head):
        assert not pod.copies.give_way()
    assert steps(pod) == [6, 8]
    assert pod.copies.give_way()


def test_slots_of_the_own_workers_and_what_is_fetched_need_the_room_as_well(make: Callable[[int], CopyPod]) -> None:
    pod = make(5)
    lose(pod, 6, 4, 6)
    assert isinstance(pod.arena.reserve(1, CONTENT_OFFSET + SIZE), Reserved), "a spare that takes over"
    assert steps(pod) == [6]

    pod = make(4)
    lose(pod, 6, 4, 6)
    with pod.arena.making(pod.arena.open_fetched() / "1.slot", SIZE) as problem:
        assert problem == ""
    assert steps(pod) == [6]


def test_what_was_given_up_is_told_before_the_room_is_used(make: Callable[[int], CopyPod]) -> None:
    """A plan that named it would send others to where it is not."""
    pod, told = make(5), list[list[int]]()
    again = Copies(pod.arena, max_ranks_per_pod=8, on_given_up=lambda: told.append(steps(pod)))
    pod.copies = again
    again.keep_for(["lost"])
    lose(pod, 6, 6, 8)
    keep(pod, "successor", 9)
    assert told == []
    keep(pod, "successor", 10)
    assert told == [[6, 9]]


def test_a_thread_finds_all_copies_while_another_one_looks_for_them(
    make: Callable[[int], CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: for a moment a pod told that it had no copies, and counted none of them towards its limit."""
    pod, found, scan = make(5), list[list[str]](), os.scandir
    keep(pod, "lost", 6)
    used, names = pod.arena.used_bytes(), pod.arena.names_in(COPIES)

    @contextmanager
    def scan_twice(folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(folder) as entries:
            first = next(entries)
            monkeypatch.setattr(os, "scandir", scan)
            found.append(pod.arena.names_in(COPIES))
            yield itertools.chain([first], entries)

    monkeypatch.setattr(os, "scandir", scan_twice)
    assert pod.arena.used_bytes() == used
    assert found == [names]


def limit(pod: CopyPod, problem: object) -> None:
    """Give a pod the limit that a problem names."""
    (enough,) = re.findall(r"(\d+) are enough", str(problem))
    pod.arena._config = replace(pod.arena._config, limit_bytes=int(enough))


def test_the_limit_that_a_refused_copy_names_is_enough_for_all_that_comes(make: Callable[[int], CopyPod]) -> None:
    """Seen before: the bytes that it named were those of this one copy, and so were those of the next refusal."""
    pod = make(2)
    pod.arena._config = replace(pod.arena._config, ranks_per_pod=1)
    with pytest.raises(NotKeptError, match="no room") as refused:
        keep(pod, "lost", 6)
    limit(pod, refused.value)
    lose(pod, 6, 6, 8)
    for step in (9, 10):
        keep(pod, "successor", step)
    assert steps(pod) == [6, 9, 10]


def test_the_limit_that_refused_slots_name_is_what_they_take(make: Callable[[int], CopyPod]) -> None:
    """Seen before: a MiB more, which a pod whose memory is no volume does not need."""
    pod = make(2)
    taken = pod.arena.used_bytes()
    pod.arena._config = replace(pod.arena._config, limit_bytes=taken, ranks_per_pod=2)
    refused = pod.arena.reserve(1, CONTENT_OFFSET + SIZE)
    assert isinstance(refused, NoRoom)
    assert (refused.needed_bytes, refused.limit_bytes) == (2 * taken, taken), "two slots for each of two workers"
    pod.arena._config = replace(pod.arena._config, limit_bytes=refused.needed_bytes)
    assert isinstance(pod.arena.reserve(1, CONTENT_OFFSET + SIZE), Reserved)
