"""A real keeper for the process of a test, which is its worker."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from unbroken.keeper.digests import read_digests, read_slot_head
from unbroken.memory import arena, checkpointer
from unbroken.memory.background import handover
from unbroken.standstill import standstill
from unbroken_core.pod.memory_messages import KEEPER_SOCKET
from unbroken_core.pod.memory_slots import Head, SlotState, digests_name
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json


@pytest.fixture
def own_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the process that writes to the disk be this test's alone, and end with it."""
    monkeypatch.setattr(handover._Process, "child", None)
    monkeypatch.setattr(handover._Process, "num_quick", 0)
    yield
    child = handover._Process.child
    if child is not None:
        child.close()
        child._process.kill()
        child._process.wait()


class LivePod:
    """One pod with a keeper; this process is one of its workers at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, ranks_per_pod: int = 2, limit_bytes: int = 64 << 20) -> None:
        self._patch = patch
        self.ranks_per_pod, self.limit_bytes = ranks_per_pod, limit_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="ubm-", dir="/tmp"))
        self.root = Path(tempfile.mkdtemp(prefix="ubm-", dir="/dev/shm"))
        self.job = "job-uid"
        self.keepers: list[subprocess.Popen[bytes]] = []
        self.be()

    def be(self, local_rank: int = 0, iteration: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Be this worker in this iteration."""
        values = {
            "UNBROKEN_DIR": str(self.folder),
            "UNBROKEN_MEMORY_LIMIT": str(self.limit_bytes),
            "UNBROKEN_LOCAL_RANK": str(local_rank),
            "UNBROKEN_TERM": "1",
            "TORCHELASTIC_RESTART_COUNT": str(iteration),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }
        for name, value in values.items():
            self._patch.setenv(name, value)
        self._patch.delenv("UNBROKEN_POD_FOLDER", raising=False)

    def be_outside(self) -> None:
        """Be a worker of a job without memory."""
        self._patch.delenv("UNBROKEN_MEMORY_LIMIT")

    def be_new_process(self) -> None:
        """Forget all that this process knows of its memory."""
        if arena._arena is not None:
            arena._arena.close()
        self._patch.setattr(arena, "_arena", None)

    def start(self, uid: str = "pod", root: Path | None = None, *, tells: bool = False) -> subprocess.Popen[bytes]:
        """Start a keeper, and wait until it listens."""
        environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": settings_to_json(JobSettings(job="j", uid=self.job, ranks_per_pod=self.ranks_per_pod)),
            "UNBROKEN_POD_UID": uid,
            "UNBROKEN_MEMORY_DIR": str(root or self.root),
            "UNBROKEN_MEMORY_LIMIT": str(self.limit_bytes),
        }
        socket = self.folder / KEEPER_SOCKET
        socket.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "unbroken.keeper", *(["--tell"] if tells else [])]
        # Not a pipe, which would fill up.
        with (self.folder / "stderr").open("ab") as errors:
            keeper = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE if tells else None, stderr=errors
            )
        self.keepers.append(keeper)
        wait_until(lambda: socket.exists() or keeper.poll() is not None, "a keeper that listens")
        return keeper

    def slots(self) -> dict[Path, Head]:
        """Return all slots that say something whole."""
        found = {path: read_slot_head(path) for path in sorted(self.root.rglob("*.slot"))}
        return {path: head for path, head in found.items() if head is not None}

    def sealed(self) -> dict[int, Path]:
        """Return the slot of each step."""
        return {head.moment.step: path for path, head in self.slots().items() if head.state is SlotState.SEALED}

    def wait_digested(self, step: int) -> Path:
        """Return the slot of a step, once the keeper has digested it."""

        def digested() -> Path | None:
            path = self.sealed().get(step)
            head = None if path is None else read_slot_head(path)
            if path is None or head is None:
                return None
            return path if read_digests(path.with_name(digests_name(path.name)), head) is not None else None

        return wait_until(digested, f"digests of step {step}", describe=lambda: str(self.sealed()))

    def close(self) -> None:
        """End the keepers and free the memory."""
        self.be_new_process()
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()
            if keeper.stdout is not None:
                keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(autouse=True)
def sound_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests of aborts leave behind in this process: no iteration begins here that would end it.

    Nor has this process made any step.
    """
    monkeypatch.setattr(standstill, "is_spoilt", False)
    monkeypatch.setattr(checkpointer, "_progress", checkpointer._Progress())


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePod]:
    """A pod without a keeper."""
    monkeypatch.setattr(arena, "_arena", None)
    live = LivePod(monkeypatch)
    yield live
    live.close()
