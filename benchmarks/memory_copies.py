"""How fast checkpoints are copied to another pod's keeper, and restored from it, beside the floors of the machine.

    python benchmarks/memory_copies.py --mib 256 --runs 5

In turn, in each run, over 127.0.0.1: the same bytes through a plain blocking TLS 1.3 connection in chunks of 1 MiB,
from warm memory into warm memory; a copy from one keeper to another; a restore of a worker from another pod's keeper,
which is another process; and a copy out of warm memory. Ratios are of medians:

    replication_ratio     bytes a second of a copy / of the plain connection        (wanted: 0.85)
    replication_cpu       CPU seconds of both sides of a copy / of the plain connection (wanted: at most 1.15)
    restore_ratio         seconds of a restore / (plain connection + copy out)      (wanted: at most 1.2)

All senders stand back (nice 19), as the keeper's does. Each copy goes into a slot that was written before, as all but
the first two do; each restore into fresh memory, as all do.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.copies import Copies
from unbroken.keeper.copy_sender import CopySender
from unbroken.keeper.copy_server import CopyServer
from unbroken.keeper.peer_link import CHUNK_BYTES, Identity
from unbroken.memory import Checkpointer, Saved, arena
from unbroken.network.pod_certificates import PodAuthority, make_pod_key
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, Copying, ToAgent
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Certificate, CertificateRequest
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.checkpoints import Candidate, Peer, Restore

LIMIT_S = 300.0
AUTHORITY = PodAuthority("a job's key of any length", "benchmark")
SETTINGS = settings_to_json(JobSettings(job="benchmark", uid="benchmark", ranks_per_pod=1))


def identity(uid: str) -> Identity:
    """Return what a pod shows."""
    made = make_pod_key()
    return Identity(made.key, AUTHORITY.issue(made.request, uid), AUTHORITY.certificate)


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def hold(root: Path, num_bytes: int) -> None:
    """Be the holder: a server for copies, and one that throws away what comes through a plain connection."""
    pod = KeeperConfig(root, root, "holder", 8 * num_bytes, 1, _job())
    place, shown = Arena(pod), identity("holder")
    copies = Copies(place, 1)
    copies.keep_for(["owner"])
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    CopyServer(listeners[0], shown.server_context(), place, copies).start()
    threading.Thread(target=_swallow, args=(listeners[1], shown.server_context(), num_bytes), daemon=True).start()
    print(json.dumps([one.getsockname()[1] for one in listeners]), flush=True)
    for _ in sys.stdin:
        print(json.dumps(cpu_s()), flush=True)


def _swallow(listener: socket.socket, context: ssl.SSLContext, num_bytes: int) -> None:
    warm = memoryview(bytearray(CHUNK_BYTES))
    while True:
        plain, _ = listener.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with closing(context.wrap_socket(plain, server_side=True)) as link:
            left = num_bytes
            while left:
                left -= link.recv_into(warm[: min(left, len(warm))])
            link.sendall(b"!")


def _job() -> bytes:
    from unbroken.keeper.config import read_config

    values = {"UNBROKEN_DIR": "/", "UNBROKEN_MEMORY_DIR": "/", "UNBROKEN_MEMORY_LIMIT": "1", "UNBROKEN_POD_UID": "p"}
    return read_config({**values, "UNBROKEN_SETTINGS": SETTINGS}).job


class Holder:
    """The other side, in a process of its own."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--hold", str(root), "--bytes", str(num_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.port, self.plain_port = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def cpu_s(self) -> float:
        """Return its CPU seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._read())


class KeeperOf:
    """A real keeper of one pod; this process is its agent and its worker."""

    def __init__(self, uid: str, limit_bytes: int) -> None:
        self.uid = uid
        self.folder, self.root = Path(tempfile.mkdtemp(prefix="ubm-")), Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.values = {
            "UNBROKEN_SETTINGS": SETTINGS, "UNBROKEN_POD_UID": uid, "UNBROKEN_POD_IP": "127.0.0.1",
            "UNBROKEN_DIR": str(self.folder), "UNBROKEN_MEMORY_DIR": str(self.root), "UNBROKEN_LOCAL_RANK": "0",
            "UNBROKEN_MEMORY_LIMIT": str(limit_bytes), "RANK": "0", "WORLD_SIZE": "1", "UNBROKEN_TERM": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "unbroken.keeper", "--tell"], env={**os.environ, **self.values},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._tell(Copying(1))
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = wire.decode(line, ToAgent)
            if isinstance(message, CertificateRequest):
                self._tell(Certificate(1, AUTHORITY.issue(message.request, uid), AUTHORITY.certificate))
                break
        until((self.folder / KEEPER_SOCKET).exists, "a keeper that listens")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def _tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(wire.encode(message).encode() + b"\n")
        self.process.stdin.flush()

    def be(self, iteration: int, restore: Restore | None = None) -> None:
        """Be its worker in this iteration."""
        if arena._arena is not None:
            arena._arena.close()
            arena._arena = None
        told = "" if restore is None else wire.encode(restore)
        os.environ.update(self.values, TORCHELASTIC_RESTART_COUNT=str(iteration), UNBROKEN_RESTORE=told)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for folder in (self.folder, self.root):
            shutil.rmtree(folder, ignore_errors=True)


def until(is_true: Callable[[], Any], what: str) -> None:
    """Wait, but not for ever."""
    end_s = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > end_s:
            raise RuntimeError(f"want {what} within {LIMIT_S:g} s")
        time.sleep(0.002)


class Bench:
    """An owner in this process, a holder in another, and a pod that restores."""

    def __init__(self, num_bytes: int) -> None:
        self.state = {f"layer.{index}": torch.ones(num_bytes // 400) * index for index in range(100)}
        self.warm = {name: one.clone() for name, one in self.state.items()}
        self.owner = KeeperOf("owner", 3 * num_bytes)
        self.reader = KeeperOf("reader", 3 * num_bytes)
        self.holder_root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.context = identity("owner").client_context()
        self.step = 0
        self.save()
        self.num_bytes = self._content_bytes()
        self.holder = Holder(self.holder_root, self.num_bytes)

    def _content_bytes(self) -> int:
        sender = self._sender(0)
        until(lambda: sender._newest(0), "digests")
        newest = sender._newest(0)
        assert newest is not None
        return newest[1].content_bytes

    def _sender(self, port: int, on_progress: Callable[[], None] = lambda: None) -> CopySender:
        # The arena of the owner's keeper, which only its keeper locks: it is read here.
        pod = KeeperConfig(self.owner.root, self.owner.root, "owner", 1, 1, _job())
        place = Arena.__new__(Arena)
        place.folder, place.job, place._lock, place._folders = pod.root / "owner", pod.job, None, {}
        place._inside = place.folder
        return CopySender(
            Peer("holder", "127.0.0.1", port), self.context, place, ranks_per_pod=1, on_progress=on_progress
        )

    def save(self) -> None:
        """Save the next step, and wait for its digests."""
        self.owner.be(0)
        self.step += 1
        result = Checkpointer().save(dict(self.state), self.step)
        if not isinstance(result, Saved):
            raise RuntimeError(result.reason)
        sender = self._sender(0)

        def is_digested() -> bool:
            newest = sender._newest(0)
            return newest is not None and newest[1].moment.step == self.step

        until(is_digested, "digests")

    def measured(self, function: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds and the CPU seconds, of both sides, of what runs in a thread that stands back."""
        before_s = cpu_s() + self.holder.cpu_s()
        seconds: list[float] = []

        def run() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            start_s = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start_s)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return seconds[0], cpu_s() + self.holder.cpu_s() - before_s

    def plain(self) -> None:
        """Send as many bytes through a plain connection: sockets of Python's ssl alone, nothing of ours."""
        plain = socket.create_connection(("127.0.0.1", self.holder.plain_port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with closing(self.context.wrap_socket(plain)) as link:
            chunk, left = memoryview(bytearray(CHUNK_BYTES)), self.num_bytes
            while left:
                link.sendall(chunk[: min(left, CHUNK_BYTES)])
                left -= min(left, CHUNK_BYTES)
            if link.recv(1) != b"!":
                raise RuntimeError("plain connection: want an answer, got its end")

    def copy(self) -> None:
        """Copy the newest checkpoint to the holder's keeper."""
        kept = threading.Event()
        sender = self._sender(self.holder.port, kept.set)
        sender.start()
        kept.wait(LIMIT_S)
        sender.close()
        progress = sender.progress[0]
        if progress.kept != Moment(1, 0, self.step):
            raise RuntimeError(progress.problem)

    def restore(self, iteration: int) -> float:
        """Restore in a pod that has nothing; return the seconds."""
        peer = Peer("holder", "127.0.0.1", self.holder.port)
        told = Restore((Candidate(1, 0, self.step, 1, fetches=((0, 1, 0, "holder"),)),), peers=(peer,))
        self.reader.be(iteration, told)
        start_s = time.perf_counter()
        found = Checkpointer().load(dict(self.state))
        seconds = time.perf_counter() - start_s
        if found != self.step:
            raise RuntimeError(f"want step {self.step}, got {found}")
        return seconds

    def copy_out(self) -> float:
        """Copy warm memory; return the seconds."""
        start_s = time.perf_counter()
        for name, one in self.state.items():
            one.copy_(self.warm[name])
        return time.perf_counter() - start_s

    def close(self) -> None:
        """End all processes."""
        self.holder.process.kill()
        self.holder.process.wait()
        self.owner.close()
        self.reader.close()
        shutil.rmtree(self.holder_root, ignore_errors=True)


def measure(num_bytes: int, num_runs: int) -> dict[str, Any]:
    """Return medians in seconds and their ratios."""
    bench = Bench(num_bytes)
    times: dict[str, list[float]] = {
        name: [] for name in ("plain", "plain_cpu", "copy", "copy_cpu", "restore", "copy_out")
    }
    try:
        for run in range(num_runs + 2):
            plain, copy = bench.measured(bench.plain), bench.measured(bench.copy)
            found = (*plain, *copy, bench.restore(run + 1), bench.copy_out())
            if run >= 2:
                # Before that, the holder's slots have no memory yet.
                for values, value in zip(times.values(), found, strict=True):
                    values.append(value)
            bench.save()
    finally:
        bench.close()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "bytes": bench.num_bytes,
        "runs": num_runs,
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
        "replication_ratio": round(seconds["plain"] / seconds["copy"], 2),
        "replication_cpu": round(seconds["copy_cpu"] / seconds["plain_cpu"], 2),
        "restore_ratio": round(seconds["restore"] / (seconds["plain"] + seconds["copy_out"]), 2),
    }


def main() -> int:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the shard (256)")
    parser.add_argument("--runs", type=int, default=5, help="runs (5)")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold(Path(options.hold), options.bytes)
        return 0
    # Threads of torch meet after each tensor: on a busy machine that takes longer than the copy.
    torch.set_num_threads(1)
    print(json.dumps(measure(options.mib << 20, options.runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
