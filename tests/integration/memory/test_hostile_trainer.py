"""In a pod the trainer writes the volume of the slots, as any user. It may spoil its own checkpoints, and nothing else.

Each test has a real keeper on a root that all may write, as an emptyDir is.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.waiting import inode_of, wait_until

from unbroken.keeper.digests import read_slot_head
from unbroken.memory import Checkpointer, Saved, Skipped
from unbroken.memory.client import KeeperClient
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, Find, Found
from unbroken_core.pod.memory_slots import HEAD_BYTES, Sample, SlotState, digests_name, pack_head

from .conftest import LivePod

ANSWER_S = 60.0


@pytest.fixture
def shared(pod: LivePod) -> LivePod:
    """A pod whose root all may write."""
    pod.root.chmod(0o777)
    pod.start()
    return pod


def find(pod: LivePod) -> Found:
    """Return what the keeper finds: it lives, and answers."""
    client = KeeperClient(pod.folder)
    found = client.ask(Find(), Found, ANSWER_S)
    client.close()
    assert found is not None, (pod.folder / "stderr").read_text()
    assert all(keeper.poll() is None for keeper in pod.keepers), "the keeper has ended"
    return found


def saved_slot(pod: LivePod, num_bytes: int = 1 << 20) -> Path:
    """Save a step, and return its digested slot."""
    assert isinstance(Checkpointer().save({"x": torch.arange(num_bytes, dtype=torch.uint8)}, 1), Saved)
    return pod.wait_digested(1)


def test_the_trainer_may_write_slots_and_make_nothing_beside_them(shared: LivePod) -> None:
    slot = saved_slot(shared)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    digests = slot.with_name(digests_name(slot.name))
    assert (mode(slot.parent), mode(slot), mode(digests)) == (0o755, 0o666, 0o644)


@contextmanager
def repeated(act: Callable[[], None]) -> Iterator[None]:
    """Do it again and again in a thread."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_slot_that_is_truncated_while_it_is_digested_kills_no_keeper(shared: LivePod) -> None:
    slot = saved_slot(shared, 24 << 20)
    size, head = slot.stat().st_size, read_slot_head(slot)
    assert head is not None

    def cut() -> None:
        os.truncate(slot, HEAD_BYTES * 2 + 100)
        os.truncate(slot, size)

    with repeated(cut):
        for serial in range(2, 40):
            # Not digested before.
            with slot.open("r+b") as file:
                file.write(pack_head(replace(head, serial=serial)) * 2)
            find(shared)
    found = find(shared)
    assert len(found.slots) + len(found.bad) == 1


@pytest.mark.parametrize("name", ["slot", "digests", "unfinished digests"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket", "nothing"])
def test_something_else_in_the_place_of_a_file_is_not_followed_nor_waited_for(
    shared: LivePod, tmp_path: Path, name: str, kind: str
) -> None:
    treasure = tmp_path / "agent-0.memory"
    treasure.write_bytes(b"the agent's own")
    slot = saved_slot(shared)
    digests = slot.with_name(digests_name(slot.name))
    place = {"slot": slot, "digests": digests, "unfinished digests": digests.with_name(f".{digests.name}")}[name]
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    match kind:
        case "link":
            place.symlink_to(treasure)
        case "pipe":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
            (place / "inside").touch()
        case "socket":
            listener.bind(str(place))
    find(shared)
    shared.be_new_process()
    # Digested anew, whatever is there; a save may be refused, but each call ends.
    for step in (2, 3):
        result = Checkpointer().save({"x": torch.arange(1 << 20, dtype=torch.uint8)}, step)
        if kind != "folder":
            assert isinstance(result, Saved), result
    find(shared)
    listener.close()
    assert treasure.read_bytes() == b"the agent's own"
    assert stat.S_IMODE(treasure.stat().st_mode) & 0o111 == 0


@pytest.mark.parametrize("kind", ["nothing", "another socket", "link"])
def test_a_keeper_whose_socket_was_taken_away_is_found_by_the_next_worker(
    shared: LivePod, tmp_path: Path, kind: str
) -> None:
    path = shared.folder / KEEPER_SOCKET
    before = path.lstat().st_ino
    path.unlink()
    deaf = socket.socket(socket.AF_UNIX)
    if kind == "another socket":
        deaf.bind(str(path))
    if kind == "link":
        (tmp_path / "treasure").touch(mode=0o600)
        path.symlink_to(tmp_path / "treasure")
    wait_until(lambda: path.is_socket() and inode_of(path) not in (None, before), "a socket")
    assert find(shared) == Found(())
    deaf.close()
    if kind == "link":
        assert stat.S_IMODE((tmp_path / "treasure").stat().st_mode) == 0o600


def test_a_forged_head_makes_the_keeper_neither_read_nor_keep_more_than_its_limit(shared: LivePod) -> None:
    slot = saved_slot(shared)
    head = read_slot_head(slot)
    assert head is not None
    huge = 1 << 40
    os.truncate(slot, huge)
    forged = [
        replace(head, serial=2, content_bytes=huge - 2 * HEAD_BYTES),
        replace(head, serial=3, content_bytes=48 << 20, samples=(Sample(0, 48 << 20, 1),) * 8),
        replace(head, serial=4, layout_bytes=head.content_bytes),
        replace(head, serial=(1 << 64) - 1, state=SlotState.SEALED),
    ]
    for one in forged:
        with slot.open("r+b") as file:
            file.write(pack_head(one) * 2)
        found = find(shared)
        assert len(found.slots) + len(found.bad) == 1
    assert highest_bytes(shared.keepers[0].pid) < 200 << 20


def test_forged_digests_are_not_read_beyond_what_the_slot_can_have(shared: LivePod) -> None:
    slot = saved_slot(shared)
    digests = slot.with_name(digests_name(slot.name))
    for text in (b"[" * 100_000_000, b'{"serial":1,"problem":"","checksums":[' + b"1," * 20_000_000 + b"1]}", b"\xff"):
        digests.write_bytes(text)
        assert len(find(shared).slots) == 1
        assert digests.stat().st_size < 1000
    assert highest_bytes(shared.keepers[0].pid) < 200 << 20


def highest_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_a_folder_that_was_moved_away_takes_the_keeper_nowhere_else(shared: LivePod, tmp_path: Path) -> None:
    slot = saved_slot(shared)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    slot.parent.rename(shared.root / "away")
    slot.parent.symlink_to(private)
    find(shared)
    shared.be_new_process()
    result = Checkpointer().save({"x": torch.zeros(2 << 20)}, 2)
    assert isinstance(result, Skipped)
    assert "cannot be mapped" in result.reason
    find(shared)
    assert (list(private.iterdir()), stat.S_IMODE(private.stat().st_mode)) == ([], 0o700)


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_a_keeper_that_starts_follows_nothing_in_the_place_of_its_folder(
    pod: LivePod, tmp_path: Path, kind: str
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    pod.root.chmod(0o777)
    place = pod.root / "pod"
    match kind:
        case "link":
            place.symlink_to(private)
        case "file":
            place.write_text("mine")
        case "pipe":
            os.mkfifo(place)
    pod.start()
    assert saved_slot(pod).parent == place
    assert not place.is_symlink()
    assert (list(private.iterdir()), stat.S_IMODE(private.stat().st_mode)) == ([], 0o700)


def test_folders_that_a_trainer_makes_are_neither_searched_nor_removed(shared: LivePod) -> None:
    slot = saved_slot(shared)
    other = shared.root / "other"
    other.mkdir()
    (other / slot.name).write_bytes(slot.read_bytes())
    assert [one.path for one in find(shared).slots] == [str(slot)]
    Checkpointer().save({"x": torch.zeros(2)}, 2)
    shared.wait_digested(2)
    assert other.is_dir()


def test_a_slot_with_holes_is_filled_again_by_the_keeper(shared: LivePod) -> None:
    slot = saved_slot(shared)
    size = slot.stat().st_size
    os.truncate(slot, 100)
    os.truncate(slot, size)
    shared.be_new_process()
    assert isinstance(Checkpointer().save({"x": torch.arange(1 << 20, dtype=torch.uint8)}, 2), Saved)
    assert wait_until(lambda: slot.stat().st_blocks * 512 >= size, "all pages of the slot")


def test_a_flood_of_messages_takes_little_memory_and_few_lines(shared: LivePod) -> None:
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(shared.folder / "keeper.sock"))
            try:
                for _ in range(20):
                    connection.sendall(b"x" * 100_000)
            except (BrokenPipeError, ConnectionResetError):
                pass
    find(shared)
    assert highest_bytes(shared.keepers[0].pid) < 200 << 20
    assert (shared.folder / "stderr").read_text().count("worker refused") < 20
