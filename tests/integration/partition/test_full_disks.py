"""A file system that is full on purpose: a small one in a namespace of its own, which needs root as partitions do."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import wait_until

from unbroken.faults.__main__ import obey
from unbroken.faults.disk import _fill
from unbroken_core.pod.fault_orders import ALLOW, FaultOrder, write_order
from unbroken_core.vocabulary.errors import InputError

from .partition_fixtures import find_missing

SCRIPT = """
import os, sys
from unbroken.faults.__main__ import main
arguments = sys.argv[2:]
for order in arguments:
    print(main([order], os.environ), flush=True)
    print("free", os.statvfs(sys.argv[1]).f_bavail, flush=True)
sys.stdin.read()
"""


def an_order(path: Path, **fields: object) -> FaultOrder:
    return FaultOrder(**{"id": "0123456789abcdef", "kind": "disk-full", "path": str(path), **fields})  # type: ignore[arg-type] # as the test says


@contextlib.contextmanager
def a_volume(folder: Path, *orders: FaultOrder) -> Iterator[tuple[list[str], Callable[[], int], Path]]:
    """Mount 8 MiB, and carry out orders there; yield what was said, what is free, and the pod's folder."""
    if missing := find_missing():
        pytest.skip(f"no network namespaces: {missing}")
    volume, pod = folder / "volume", folder / "pod"
    volume.mkdir()
    pod.mkdir()
    mounted = f'mount -t tmpfs -o size=8m volume {volume} && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", mounted, sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        [*words, str(volume), *map(write_order, orders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, ALLOW: "1", "UNBROKEN_DIR": str(pod), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(3 * len(orders))]
        seen = Path(f"/proc/{process.pid}/root{volume}")
        yield said, lambda: os.statvfs(seen).f_bavail * os.sysconf("SC_PAGE_SIZE"), pod


def test_a_volume_is_full_until_the_pod_is_over_and_the_same_order_is_one(tmp_path: Path) -> None:
    path = tmp_path / "volume"
    full = an_order(path, max_bytes=1 << 30, seconds=600)
    orders = (an_order(path, max_bytes=1 << 20), full, full, replace(full, id="00000000000000ff"))
    with a_volume(tmp_path, *orders) as (said, free, pod):
        assert said == [
            f"unbroken.faults: disk-full: {path} has {8 << 20} bytes free, want at most --max-bytes {1 << 20}; "
            "nothing was done",
            "2",
            f"free {(8 << 20) // os.sysconf('SC_PAGE_SIZE')}",
            f"disk-full: {path}: full, {8 << 20} bytes were written; free again in 600 s",
            "0",
            "free 0",
            "this order was carried out before; nothing was done again",
            "0",
            "free 0",
            f"unbroken.faults: disk-full: order {full.id} still fills a disk of this pod; nothing was done",
            "2",
            "free 0",
        ]
        shutil.rmtree(pod)
        wait_until(lambda: free() == 8 << 20, "the space")


def test_a_volume_is_free_again_when_the_time_is_over(tmp_path: Path) -> None:
    order = an_order(tmp_path / "volume", max_bytes=1 << 30, seconds=1)
    with a_volume(tmp_path, order) as (said, free, _pod):
        assert said[1] == "0"
        wait_until(lambda: free() == 8 << 20, "the space")


def test_a_disk_that_is_not_the_jobs_own_is_not_filled(tmp_path: Path) -> None:
    place = {ALLOW: "1", "UNBROKEN_DIR": str(tmp_path)}
    for path, message in {
        Path("/"): "is on the container's own file system, which is the node's",
        tmp_path / "nothing": "No such file or directory; nothing was done",
        Path("/dev/null"): "want a folder; nothing was done",
    }.items():
        with pytest.raises(InputError, match=message):
            obey([write_order(an_order(path, max_bytes=1 << 40))], place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        pytest.param(errno.ENOSPC, "full, 2000 bytes were written", id="full"),
        pytest.param(
            errno.EDQUOT,
            "a quota is used up, and the file system has room for who is not under it, 2000 bytes were written",
            id="quota",
        ),
        pytest.param(errno.EFBIG, "not full: a file may not be larger here, 2000 bytes were written", id="file limit"),
        pytest.param(errno.EIO, "not full: Input/output error, 2000 bytes were written", id="another error"),
    ],
)
def test_what_is_said_of_a_disk_is_what_ended_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, said: str
) -> None:
    room = 2000

    def write(_file: int, block: bytes) -> int:
        nonlocal room
        if len(block) > room:
            raise OSError(refused, os.strerror(refused))
        room -= len(block)
        return len(block)

    monkeypatch.setattr(os, "write", write)
    with (tmp_path / "file").open("wb") as file:
        assert _fill(file.fileno(), 1 << 30, float("inf")) == said


def test_a_disk_that_got_room_meanwhile_is_not_called_full(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        said = _fill(file.fileno(), 5000, float("inf"))
    assert re.fullmatch(r"not full: --max-bytes are written, [1-9]\d* bytes are free, 5000 bytes were written", said)
