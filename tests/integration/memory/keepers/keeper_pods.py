"""Pods with real keepers, each on a host of its own: the test is their agents and the rendezvous, and one worker."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_until

from unbroken.memory import Checkpointer, Saved, arena
from unbroken.network.pod_certificates import PodAuthority
from unbroken_core.pod.memory_messages import Copying, Counted, Holds, OfAgent, ToAgent
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Buddies, Certificate, CertificateRequest
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.checkpoints import Candidate, Held, Peer, Restore

JOB = "job-uid"
AUTHORITY = PodAuthority("a job's key of any length", JOB)
BREAKING = str(Path(__file__).with_name("breaking_keeper.py"))


class KeeperPod:
    """One pod."""

    def __init__(self, uid: str, host: str, limit_bytes: int = 64 << 20) -> None:
        self.uid, self.host, self.limit_bytes = uid, host, limit_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="ubm-", dir="/tmp"))
        self.root = Path(tempfile.mkdtemp(prefix="ubm-", dir="/dev/shm"))
        self.authority, self.named = AUTHORITY, uid
        self.held = Held("")
        self.counted = Counted()
        self.buddies = Buddies(1)
        self.keeper: subprocess.Popen[bytes] | None = None

    def start(self, point: str = "") -> None:
        """Start a keeper, one that dies at a point if it is named, and tell it what an agent would."""
        environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": settings_to_json(JobSettings(job="j", uid=JOB, ranks_per_pod=2)),
            "UNBROKEN_POD_UID": self.uid,
            "UNBROKEN_POD_IP": self.host,
            "UNBROKEN_DIR": str(self.folder),
            "UNBROKEN_MEMORY_DIR": str(self.root),
            "UNBROKEN_MEMORY_LIMIT": str(self.limit_bytes),
            "UNBROKEN_MEMORY_PORT": str(self.held.port),
        }
        command = [BREAKING, point] if point else ["-m", "unbroken.keeper"]
        with (self.folder / "stderr").open("ab") as errors:
            keeper = subprocess.Popen(
                [sys.executable, "-P", *command, "--tell"], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self.keeper = keeper
        self._listener = threading.Thread(target=self._listen, args=(keeper,), daemon=True)
        self._listener.start()
        self.send(Copying(1))
        self.send(self.buddies)

    def _listen(self, keeper: "subprocess.Popen[bytes]") -> None:
        assert keeper.stdout is not None
        for line in keeper.stdout:
            message = wire.decode(line, ToAgent)
            if isinstance(message, Holds):
                self.held = replace(message.held, host=self.host, port=message.held.port or self.held.port)
            if isinstance(message, Counted):
                self.counted = message
            if isinstance(message, CertificateRequest):
                issued = self.authority.issue(message.request, self.named)
                self.send(Certificate(1, issued, self.authority.certificate))

    def send(self, message: OfAgent) -> None:
        """Say something to the keeper, if it lives."""
        assert self.keeper is not None
        assert self.keeper.stdin is not None
        try:
            self.keeper.stdin.write(wire.encode(message).encode() + b"\n")
            self.keeper.stdin.flush()
        except BrokenPipeError:
            pass

    def tell(self, *keepers: "KeeperPod", owners: tuple[str, ...] = (), drop: tuple[str, ...] = ()) -> None:
        """Say who keeps whose copies, now and to each later keeper."""
        for one in keepers:
            one.wait_reachable()
        self.buddies = Buddies(1, tuple(one.peer for one in keepers), owners, drop)
        self.send(self.buddies)

    @property
    def peer(self) -> Peer:
        """Where others reach it."""
        return Peer(self.uid, self.host, self.held.port)

    def wait_reachable(self) -> None:
        """Wait until the keeper says where."""
        wait_until(lambda: self.held.port, f"a port of {self.uid}", describe=self.errors)

    def kept(self, owner: str) -> set[int]:
        """Return the steps of an owner of which there is a whole copy here, as the keeper tells."""
        return {copy.step for copy in self.held.copies if copy.owner == owner}

    def wait_kept(self, owner: "KeeperPod", step: int) -> None:
        """Wait until the keeper tells of a copy."""
        wait_until(
            lambda: step in self.kept(owner.uid),
            f"a copy of step {step}",
            describe=lambda: f"{self.held}\n{self.errors()}\n{owner.held}\n{owner.errors()}",
        )

    def wait_dead(self) -> None:
        """Wait until the keeper has died at its point."""
        assert self.keeper is not None
        keeper = self.keeper
        wait_until(lambda: keeper.poll() is not None, "a keeper that dies", describe=self.errors)
        self._close()

    def kill(self) -> None:
        """Kill the keeper: the pod is lost with its host unless it is started again."""
        if self.keeper is not None:
            self.keeper.kill()
            self._close()

    def _close(self) -> None:
        keeper, self.keeper = self.keeper, None
        assert keeper is not None
        keeper.wait()
        self._listener.join()
        # What is known of it is what the next one says, but for where that is.
        self.held = Held("", port=self.held.port)
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdout.close()
        try:
            keeper.stdin.close()
        except BrokenPipeError:
            pass

    def errors(self) -> str:
        """Return what the keepers have logged."""
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        """End it, and free its memory."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def worker_of(
    patch: pytest.MonkeyPatch, pod: KeeperPod, iteration: int = 0, restore: Restore | None = None, **world: int
) -> Iterator[None]:
    """Be a worker of this pod, which has never been one before."""
    values: dict[str, Any] = {
        "UNBROKEN_DIR": pod.folder,
        "UNBROKEN_MEMORY_LIMIT": pod.limit_bytes,
        "UNBROKEN_LOCAL_RANK": world.get("local_rank", 0),
        "UNBROKEN_TERM": 1,
        "TORCHELASTIC_RESTART_COUNT": iteration,
        "RANK": world.get("rank", 0),
        "WORLD_SIZE": world.get("world_size", 1),
        "UNBROKEN_RESTORE": "" if restore is None else wire.encode(restore),
    }
    with patch.context() as context:
        for name, value in values.items():
            context.setenv(name, str(value))
        context.delenv("UNBROKEN_POD_FOLDER", raising=False)
        context.setattr(arena, "_arena", None)
        try:
            yield
        finally:
            if arena._arena is not None:
                arena._arena.close()


def state_of(step: int, num_values: int = 1 << 20) -> dict[str, Any]:
    """Return a state that is another one at each step."""
    values = torch.arange(num_values, dtype=torch.float32) * (step + 1)
    return {"weights": values, "bias": torch.full((7,), float(step)), "epoch": step}


def save(patch: pytest.MonkeyPatch, pod: KeeperPod, step: int, iteration: int = 0, **world: int) -> None:
    """Save a step in this pod, as a worker that skips none because it is being copied."""

    def saved() -> bool:
        return isinstance(Checkpointer().save(state_of(step), step), Saved)

    with worker_of(patch, pod, iteration, None, **world):
        wait_until(saved, f"step {step} that is saved")


def load(
    patch: pytest.MonkeyPatch, pod: KeeperPod, step: int, *holders: KeeperPod, iteration: int = 1, older: int = -1
) -> tuple[int | None, dict[str, Any]]:
    """Restore in this pod what a plan names, from whom it names; return the step and the state.

    `older`: a step that it names behind the other one.
    """
    fetches = tuple((0, 1, 0, one.uid) for one in holders)
    candidates = tuple(Candidate(1, 0, one, 1, fetches=fetches) for one in (step, older) if one >= 0)
    restore = Restore(candidates, peers=tuple(one.peer for one in holders))
    state = state_of(0)
    with worker_of(patch, pod, iteration, restore):
        return Checkpointer().load(state), state


def assert_is(state: dict[str, Any], step: int) -> None:
    """Compare each bit."""
    wanted = state_of(step)
    assert torch.equal(state["weights"], wanted["weights"])
    assert torch.equal(state["bias"], wanted["bias"])
    assert json.dumps(state["epoch"]) == json.dumps(step)
