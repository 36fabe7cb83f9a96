"""The page of stamps is written by the trainer: whatever is in it, the agent reads on, and believes no nonsense."""

import os
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.agent.adapters.clearing import clear
from unbroken.agent.adapters.stamp_page import StampPage
from unbroken_core.pod.liveness import ages, find_hangs, next_check_s
from unbroken_core.pod.stamps import FLAGS, SLOT_BYTES, STEP, WorkerStamps, pack_header, page_bytes, slot_offset
from unbroken_core.protocol.bounds import MAX_NUMBER, MAX_SECONDS
from unbroken_core.protocol.settings import Timeouts

NEVER = WorkerStamps(0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("size", [0, 1, 64, 100, page_bytes(2) - 1])
def test_a_page_that_was_cut_off_is_mended_in_place(tmp_path: Path, size: int) -> None:
    """In place: running workers have it mapped."""
    path = tmp_path / "stamps"
    page = StampPage(path, 2)
    inode = path.stat().st_ino
    os.truncate(path, size)
    assert page.read() == (NEVER, NEVER)
    assert (path.stat().st_ino, path.stat().st_size) == (inode, page_bytes(2))
    assert path.read_bytes().startswith(pack_header(2))
    os.truncate(path, size)
    assert page.read() == (NEVER, NEVER)
    page.close()


def test_a_page_whose_head_was_overwritten_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    page = StampPage(path, 1)
    with path.open("r+b") as file:
        file.write(b"x" * 64)
    page.read()
    assert path.read_bytes().startswith(pack_header(1))
    page.close()


@pytest.mark.parametrize("what", ["folder", "fifo", "link", "another layout", "empty", "full folder"])
def test_whatever_has_the_name_of_the_page_at_the_start_is_replaced(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "stamps", tmp_path / "other"
    other.write_bytes(b"not a page")
    if what in ("folder", "full folder"):
        path.mkdir()
        if what == "full folder":
            (path / "file").touch()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(other)
    else:
        path.write_bytes(pack_header(9) if what == "another layout" else b"")
    page = StampPage(path, 2)
    assert page.read() == (NEVER, NEVER)
    assert path.stat().st_size == page_bytes(2)
    assert other.read_bytes() == b"not a page"
    page.close()


def test_a_page_that_is_there_is_kept_with_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    StampPage(path, 1).close()
    with path.open("r+b") as file:
        file.seek(slot_offset(0))
        file.write(struct.pack("<9q", 7, 3, 1, 2, 3, 4, 1, 0, 5))
    page = StampPage(path, 1)
    assert page.read() == (WorkerStamps(7, 3, 1, 2, 3, 4, 1, 0, 5),)
    page.close()


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=9, max_size=9), flags=st.integers(0, 7))
def test_forged_stamps_are_bounded(numbers: list[int], flags: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "stamps"
    page = StampPage(path, 1)
    numbers[FLAGS] = flags
    with path.open("r+b") as file:
        file.seek(slot_offset(0))
        file.write(struct.pack("<9q", *numbers))
    (slot,) = page.read()
    page.close()
    assert slot.step == min(max(numbers[STEP], -1), MAX_NUMBER)
    assert 0 <= slot.checkpoint_ns / 1e9 <= MAX_SECONDS
    timeouts, now_ns = Timeouts(), 10**15
    assert 0 <= ages(slot, now_ns).oldest_s <= now_ns / 1e9 <= MAX_SECONDS
    assert 0 <= next_check_s((slot,), now_ns, timeouts) <= timeouts.soft_s
    for hang in find_hangs({0: slot}, now_ns, timeouts):
        assert len(hang.detail) < 200


def test_a_slot_has_room_for_what_a_worker_writes() -> None:
    assert struct.calcsize("<9q") <= SLOT_BYTES


def test_a_folder_of_any_depth_gives_way_to_the_agents_own_files(tmp_path: Path) -> None:
    deep = tmp_path / "agent.sock"
    place = os.open(tmp_path, os.O_RDONLY)
    for name in ["agent.sock", *["a"] * 3000]:
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    clear(deep)
    assert not deep.exists()
    for made in (
        deep.mkdir,
        lambda: deep.write_bytes(b""),
        lambda: deep.symlink_to(deep),
        lambda: os.mkfifo(deep),
    ):
        made()
        clear(deep)
        assert not os.path.lexists(deep)
    # For whoever removes the test's folder afterwards.
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)
