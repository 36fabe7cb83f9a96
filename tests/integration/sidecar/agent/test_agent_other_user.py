"""The trainer runs as another user than the agent, as in pods whose sidecar is not root."""

import asyncio
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.agent.adapters.local_server import LocalServer
from unbroken.agent.adapters.stamp_page import StampPage

USE_BOTH = """
import mmap, os, socket, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
with open(sys.argv[2], "r+b") as file:
    mmap.mmap(file.fileno(), 0)[0:1]
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder as an emptyDir of Kubernetes is: everyone may write into it. Its path is short."""
    path = Path(tempfile.mkdtemp(prefix="ubt-", dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def use_both(folder: Path) -> str:
    """Use socket and page as another user, where this one may become another; return what went wrong."""
    command = [sys.executable, "-c", USE_BOTH, str(folder / "agent.sock"), str(folder / "stamps")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def test_another_user_of_the_pod_can_use_socket_and_page(folder: Path) -> None:
    async def serve() -> None:
        server = LocalServer(folder / "agent.sock", 2, lambda _event: None)
        await server.start()
        try:
            assert stat.S_IMODE((folder / "agent.sock").stat().st_mode) == 0o666
            assert await asyncio.to_thread(use_both, folder) == ""
        finally:
            await server.stop()

    page = StampPage(folder / "stamps", 2)
    asyncio.run(serve())
    page.close()
