"""A file of `unbroken.integrations.whole_files` is the old one or the new one, whatever ends in the middle."""

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.integrations import whole_files

OLD, NEW = b"old" * 1000, os.urandom(3 << 20)
STAGES = ("open", "write", "fsync", "pread", "replace")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "last.ckpt"
    whole_files.write(path, OLD)
    return path


def broken_at(monkeypatch: pytest.MonkeyPatch, stage: str, fail: Callable[[], object]) -> None:
    """Do something else in place of the last part of a write, and before each other stage."""
    function = getattr(os, stage)

    def call(*args: Any, **kwargs: Any) -> Any:
        if stage == "write" and len(args[1]) > 1:
            # Half of it is there by then.
            return function(args[0], args[1][: len(args[1]) // 2])
        return fail()

    monkeypatch.setattr(os, stage, call)


def names(file: Path) -> list[str]:
    return sorted(one.name for one in file.parent.iterdir())


def test_a_file_is_replaced_and_can_be_read_by_those_who_could_read_any(file: Path) -> None:
    mask = os.umask(0o022)
    try:
        whole_files.write(file, NEW)
    finally:
        os.umask(mask)
    assert file.read_bytes() == NEW
    assert file.stat().st_mode & 0o777 == 0o644
    assert names(file) == ["last.ckpt"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_a_write_that_fails_or_is_interrupted_leaves_the_old_file_and_no_other(
    file: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        broken_at(patch, stage, fail)
        whole_files.write(file, NEW)
    assert (file.read_bytes(), names(file)) == (OLD, ["last.ckpt"])


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_killed_writer_leaves_the_old_file_and_the_next_write_removes_its_part(
    file: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    child = os.fork()
    if child == 0:
        broken_at(monkeypatch, stage, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            whole_files.write(file, NEW)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert file.read_bytes() == OLD
    assert len(names(file)) == 2
    whole_files.write(file, NEW)
    assert (file.read_bytes(), names(file)) == (NEW, ["last.ckpt"])


def test_what_another_process_is_writing_stays(file: Path) -> None:
    part = file.with_name(".other.ckpt.1.part")
    with part.open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        whole_files.write(file, NEW)
        assert names(file) == [".other.ckpt.1.part", "last.ckpt"]


@pytest.mark.parametrize("moment", ["locked", "removed"])
def test_a_writer_whose_part_is_taken_for_a_left_one_begins_another(
    file: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Ranks that write into one folder at once: one looks for parts before the other has locked its own."""
    flock = fcntl.flock
    others: list[Any] = []

    def late(descriptor: int, flags: int) -> None:
        if not others:
            part = next(file.parent.glob(".*.part"))
            others.append(part.open("rb"))
            flock(others[0], fcntl.LOCK_EX)
            if moment == "removed":
                part.unlink()
                others[0].close()
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    whole_files.write(file, NEW)
    assert file.read_bytes() == NEW
    if moment == "locked":
        Path(others[0].name).unlink()
        others[0].close()
    assert names(file) == ["last.ckpt"]


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:]])
def test_what_does_not_read_as_it_was_written_replaces_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, spoil(bytes(data))) and len(data))
    with pytest.raises(OSError, match=r"not what is read again: .*last.ckpt"):
        whole_files.write(file, NEW)
    assert (file.read_bytes(), names(file)) == (OLD, ["last.ckpt"])


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_write_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().suffix or "folder")
        fsync(descriptor)

    def replaced(*args: Any) -> None:
        order.append("name")
        replace(*args)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    whole_files.write(file, NEW)
    assert order == [".part", "name", "folder"]
