"""A fetch receives the next blocks while those before are compared and written, and leaves no thread behind.

Nobody waits until what was restored is unmapped: neither the rank nor, without an end, the next fetch.
"""

import errno
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.keeper import arena, copy_reader, fetching
from unbroken.keeper.fetching import PartialShard
from unbroken.keeper.peer_link import Link, LinkError
from unbroken.memory import sources
from unbroken_core.pod.memory_messages import Fetched, FetchShard, NotFetched
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET

from .copying import CopyPod, make_pods

NUM_BLOCKS = 10


@pytest.fixture
def pair() -> Iterator[tuple[CopyPod, CopyPod]]:
    owner, reader = pods = make_pods("owner", "reader")
    yield owner, reader
    for pod in pods:
        pod.close()
        shutil.rmtree(pod.root)


def ask(reader: CopyPod, owner: CopyPod, *runs: tuple[int, int]) -> Any:
    return reader.fetcher.fetch(FetchShard(owner.peer, 0, 4, 1, 0, 1, runs), reader.identity.client_context())


def content_of(answer: Fetched) -> bytes:
    return Path(answer.slot.path).read_bytes()[CONTENT_OFFSET:]


def writers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "writes"]


def test_a_few_blocks_are_received_while_one_is_written_and_no_more(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    content = owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    assert isinstance(ask(reader, owner), Fetched)
    may_write = threading.Event()
    received: list[int] = []
    write, receive_into = PartialShard.write, Link.receive_into

    def slow(part: PartialShard, block: int, view: bytes | memoryview) -> None:
        may_write.wait(LIMIT_S)
        write(part, block, view)

    def counted(link: Link, view: memoryview) -> None:
        receive_into(link, view)
        received.append(len(view))

    monkeypatch.setattr(PartialShard, "write", slow)
    monkeypatch.setattr(Link, "receive_into", counted)
    answers: list[Any] = []
    fetching = threading.Thread(target=lambda: answers.append(ask(reader, owner, (0, NUM_BLOCKS))))
    fetching.start()
    most = copy_reader._NUM_BUFFERS
    wait_until(lambda: sum(received) >= most * BLOCK_BYTES, "blocks that are received while none is written")
    (writer,) = writers()
    assert sum(received) < (most + 1) * BLOCK_BYTES, "more are held in memory than there are buffers"
    may_write.set()
    fetching.join(LIMIT_S)
    writer.join(LIMIT_S)
    assert isinstance(answers[0], Fetched)
    assert content_of(answers[0]) == content
    assert writers() == []


def test_what_cannot_be_written_ends_the_fetch_and_its_thread(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    content = owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    write = PartialShard.write
    tried: list[int] = []

    def full(part: PartialShard, block: int, view: bytes | memoryview) -> None:
        tried.append(block)
        if block == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(part, block, view)

    monkeypatch.setattr(PartialShard, "write", full)
    answer = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(answer, NotFetched)
    assert answer.reason == "pod owner: [Errno 28] No space left on device"
    assert (tried, writers()) == ([0, 1, 2, 3], [])
    monkeypatch.undo()
    # What was written before is not fetched again.
    again = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(again, Fetched)
    assert (again.num_bytes, content_of(again)) == ((NUM_BLOCKS - 3) * BLOCK_BYTES, content)


def test_a_connection_that_breaks_leaves_nobody_who_writes(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    content = owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    assert isinstance(ask(reader, owner), Fetched)
    receive_into = Link.receive_into
    received: list[int] = []

    def breaks(link: Link, view: memoryview) -> None:
        if sum(received) > 4 * BLOCK_BYTES:
            raise LinkError("cannot receive: connection reset")
        receive_into(link, view)
        received.append(len(view))

    monkeypatch.setattr(Link, "receive_into", breaks)
    answer = ask(reader, owner, (0, NUM_BLOCKS))
    assert answer == NotFetched("pod owner: cannot receive: connection reset")
    assert writers() == []
    monkeypatch.undo()
    again = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(again, Fetched)
    assert content_of(again) == content


def test_a_pod_without_another_thread_fetches_all_the_same(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may use up the pod's limit on processes."""
    owner, reader = pair
    content = owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "writes":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    answer = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(answer, Fetched)
    assert content_of(answer) == content


def mappings_of(path: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if path in line]


@pytest.mark.parametrize("may_start", [True, False])
def test_a_rank_does_not_wait_until_what_it_has_restored_is_unmapped(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch, may_start: bool
) -> None:
    owner, reader = pair
    owner.save(1, size=20 * BLOCK_BYTES)
    answer = ask(reader, owner)
    assert isinstance(answer, Fetched)
    source = sources.open_source(answer.slot)
    assert mappings_of(answer.slot.path)
    start, held = threading.Thread.start, []

    def hold(thread: threading.Thread) -> None:
        if not may_start:
            raise RuntimeError("can't start new thread")
        held.append(thread)

    monkeypatch.setattr(threading.Thread, "start", hold)
    source.close()
    assert bool(mappings_of(answer.slot.path)) == may_start
    for thread in held:
        start(thread)
        thread.join(LIMIT_S)
    assert mappings_of(answer.slot.path) == []


def test_a_process_that_ends_while_it_unmaps_ends_well() -> None:
    """A rank that finds its last step restored returns at once; torch ends a process that leaves such a thread."""
    script = """if True:
        import mmap, threading, time
        import torch
        from unbroken.memory.sources import _LARGE_BYTES, _let_go

        begun = threading.Event()

        class Slow(mmap.mmap):
            def __del__(self):
                begun.set()
                # As long as a large one takes, in parts: the main thread ends the interpreter meanwhile.
                for _ in range(1000):
                    time.sleep(0.001)

        mapped = Slow(-1, _LARGE_BYTES)
        gone = [torch.frombuffer(mapped, dtype=torch.uint8), mapped]
        del mapped
        _let_go(gone)
        begun.wait()
    """
    command = [sys.executable, "-P", "-c", script]
    ended = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_fetch_waits_for_pages_that_workers_have_not_unmapped_yet(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed by name still takes pages of the tmpfs: the limit is kept, and there is no room all the same."""
    owner, reader = pair
    content = owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    assert isinstance(ask(reader, owner, (0, NUM_BLOCKS)), Fetched)
    reader.fetcher.clear()
    looks: list[int] = []

    def free(_folder: Path) -> int:
        looks.append(0 if len(looks) < 3 else 1 << 30)
        return looks[-1]

    monkeypatch.setattr(arena, "_free_bytes", free)
    answer = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(answer, Fetched)
    assert content_of(answer) == content
    assert looks[:4] == [0, 0, 0, 1 << 30]


def test_a_fetch_waits_for_no_pages_where_nothing_was_given_back_or_the_limit_is_reached(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    monkeypatch.setattr(fetching, "_REMOVAL_S", 10 * LIMIT_S)
    monkeypatch.setattr(arena, "_free_bytes", lambda _folder: 0)
    assert isinstance(ask(reader, owner, (0, NUM_BLOCKS)), NotFetched)
    monkeypatch.undo()
    monkeypatch.setattr(fetching, "_REMOVAL_S", 10 * LIMIT_S)
    assert isinstance(ask(reader, owner, (0, NUM_BLOCKS)), Fetched)
    reader.fetcher.clear()
    monkeypatch.setattr(type(reader.arena), "is_over_limit", lambda _arena, _growth: True)
    monkeypatch.setattr(arena, "_free_bytes", lambda _folder: 0)
    assert isinstance(ask(reader, owner, (0, NUM_BLOCKS)), NotFetched)


def test_a_fetch_does_not_wait_without_an_end_for_pages(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    owner.save(1, size=NUM_BLOCKS * BLOCK_BYTES)
    assert isinstance(ask(reader, owner, (0, NUM_BLOCKS)), Fetched)
    monkeypatch.setattr(fetching, "_REMOVAL_S", 0.2)
    reader.fetcher.clear()
    left = arena._SPARE_BYTES + NUM_BLOCKS * BLOCK_BYTES - 1
    monkeypatch.setattr(arena, "_free_bytes", lambda _folder: left)
    answer = ask(reader, owner, (0, NUM_BLOCKS))
    assert isinstance(answer, NotFetched)
    said = re.search(r"has (\d+) bytes left, (\d+) wanted", answer.reason)
    assert said is not None
    assert int(said[1]) == left < int(said[2])
