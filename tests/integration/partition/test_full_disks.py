"""A file system that is full on purpose: a small one in a namespace of its own, which needs root as partitions do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from unbroken.faults.__main__ import obey
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


def test_a_volume_is_full_until_its_time_is_over_and_the_same_order_is_one(tmp_path: Path) -> None:
    if missing := find_missing():
        pytest.skip(f"no network namespaces: {missing}")
    (tmp_path / "volume").mkdir()
    orders = [
        an_order(tmp_path / "volume", max_bytes=1 << 20, seconds=600),
        an_order(tmp_path / "volume", max_bytes=1 << 30, seconds=20),
        an_order(tmp_path / "volume", max_bytes=1 << 30, seconds=20),
        an_order(tmp_path / "volume", max_bytes=1 << 30, seconds=20, id="00000000000000ff"),
    ]
    volume = f"mount -t tmpfs -o size=8m volume {tmp_path / 'volume'}"
    words = ["unshare", "--mount", "sh", "-c", f'{volume} && exec "$0" "$@"', sys.executable, "-c", SCRIPT]
    environment = {**os.environ, ALLOW: "1", "UNBROKEN_DIR": str(tmp_path)}
    with subprocess.Popen(
        [*words, str(tmp_path / "volume"), *map(write_order, orders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        lines = [process.stdout.readline().strip() for _ in range(10)]
        seen = Path(f"/proc/{process.pid}/root{tmp_path}/volume")
        assert lines[:2] == ["2", f"free {(8 << 20) // os.sysconf('SC_PAGE_SIZE')}"]
        assert lines[2] == f"disk-full: {tmp_path}/volume: full, {8 << 20} bytes were written; free again in 20 s"
        assert lines[3:9] == [
            "0",
            "free 0",
            "this order was carried out before; nothing was done again",
            "0",
            "free 0",
            "2",
        ]
        wait_until(lambda: os.statvfs(seen).f_bavail * os.sysconf("SC_PAGE_SIZE") == 8 << 20, "the space")
        process.stdin.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "has 8388608 bytes free, want at most --max-bytes 1048576; nothing was done" in errors
    assert "order 0123456789abcdef still fills a disk of this pod; nothing was done" in errors


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
