"""How soon health is known, what it costs, and how often it is right: the figures of docs/health.md.

    python benchmarks/health.py [--parts xid,ports,checks,heartbeat,cost,hangs,preflight] [--samples 200]

Rendezvous, agent and watch are real processes on this machine. GPUs are a driver's library that is compiled here, which
reads a file at each call; adapters are files as /sys has them. Both are those of the tests.

- xid: from the event until whoever waits at the rendezvous' API has the finding.
- ports: from the state of an adapter's port until the same.
- checks: one call of the checks of GPUs and NVLinks between two iterations, of the worker's own GPU.
- heartbeat: how late an agent's heartbeats are, with eight probes that hang, and without any.
- cost: of a watch with 8 GPUs and 8 adapters, by what the kernel has counted.
- hangs: from what 1,024 ranks say to the verdict; and 400 random hangs.
- preflight: 256 simulated hosts, three of them bad, 1 % of all tests wrong by chance, in virtual time.
"""

import argparse
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.devices import Gpus, System, compile_library
from tests.simulation.test_preflight import BUSY_SHARE, SHORT_S, fly
from tests.unit.unbroken_core.recovery.test_collectives import big_world
from tests.unit.unbroken_core.recovery.test_hang_accuracy import told

from footprint import TOKEN, answers, free_port, memory_mib, started, wait_for
from unbroken.inprocess.state import FrozenState
from unbroken.nvrx.inprocess.health_check import ChainedGPUHealthCheck, ChainedNVLHealthCheck
from unbroken.preflight.options import PAIR_S
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.recovery.hangs import judge

NUM_DEVICES = 8
LIMIT_S = 60.0
SOFT_S = 60.0
XIDS_A_WATCH = 40
"""A pod tells 64 findings at most."""
HEARTBEAT_S = 1.0
Key = tuple[str, str, str]
"""Check, entity and code of a finding."""
LOOKED: Key = ("", "", "")
"""In place of a finding: a watch has said something. That all is well is no finding."""


def spread(values: Sequence[float]) -> str:
    """Return median, p99 and maximum of seconds, in milliseconds."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    median = ordered[len(ordered) // 2]
    return f"median {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, most {ordered[-1] * 1e3:.1f} ms, n={len(ordered)}"


class Follower:
    """Waits at the rendezvous' API, as the operator does, and notes when each finding came."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._seen: dict[Key, float] = {}
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        revision = -1
        while True:
            query = f"{self._url}/v1/status?after={revision}&timeout=20&term=1"
            request = urllib.request.Request(query, headers={"Authorization": f"Bearer {TOKEN}"})
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    status = json.loads(answer.read() or b"{}")
            except (OSError, ValueError):
                return  # The rendezvous has ended.
            now_s, revision = time.monotonic(), status.get("revision", revision)
            health = status.get("health") or {}
            found = [item["finding"] for item in health.get("findings", ())]
            keys = {(each["check"], each["entity"], each["code"]) for each in found}
            keys |= {LOOKED} if health.get("num_pods") else set()
            with self._changed:
                self._seen = {key: self._seen.get(key, now_s) for key in keys}
                self._changed.notify_all()

    def wait(self, is_met: Callable[[dict[Key, float]], bool], what: str) -> dict[Key, float]:
        """Return when each finding that there is came. Raises RuntimeError after LIMIT_S."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_met(self._seen), LIMIT_S):
                raise RuntimeError(f"want {what} within {LIMIT_S:g} s, got {self._seen}")
            return dict(self._seen)


class Relay:
    """Between an agent and its rendezvous: notes when the agent says something."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._target = port
        self.heard_s: list[float] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            agent, _ = self._listener.accept()
            rendezvous = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pump, args=(agent, rendezvous, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(rendezvous, agent, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_agent: bool) -> None:
        while data := source.recv(65536):
            if is_agent:
                self.heard_s.append(time.monotonic())
            target.sendall(data)


class Rig:
    """A rendezvous, an agent, and what a watch looks at."""

    def __init__(self, folder: Path, stack: ExitStack, timeouts: Timeouts) -> None:
        self.folder = folder
        self.gpus = Gpus(compile_library(folder / "library"), folder / "gpus", count=NUM_DEVICES)
        self.system = System(folder / "root")
        for number in range(NUM_DEVICES):
            address = f"0000:{number:02x}:00.0"
            self.system.add_adapter(f"mlx5_{number}", number, address)
            self.system.set_errors(address)
        self.system.set_pressure(0.0)
        self.system.set_kills(0)
        (folder / "token").write_text(TOKEN)
        settings = JobSettings("health", replicas=1, ranks_per_pod=NUM_DEVICES, timeouts=timeouts)
        common = {
            "UNBROKEN_SETTINGS": settings_to_json(settings),
            "UNBROKEN_TOKEN_FILE": str(folder / "token"),
            "UNBROKEN_METRICS_LISTEN": "127.0.0.1:0",
        }
        port = free_port()
        listen = {"UNBROKEN_LISTEN": f"127.0.0.1:{port}"}
        rendezvous = stack.enter_context(started("unbroken.rendezvous", common | listen, folder / "rendezvous.log"))
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v1/status"), rendezvous)
        self.relay = Relay(port)
        pod = {
            "UNBROKEN_RENDEZVOUS_URL": f"http://127.0.0.1:{self.relay.port}",
            "UNBROKEN_POD": "health-0",
            "UNBROKEN_POD_UID": "uid",
            "UNBROKEN_POD_IP": "127.0.0.1",
            "UNBROKEN_DIR": str(folder),
        }
        log = folder / "agent.log"
        agent = stack.enter_context(started("unbroken.agent", common | pod, log))
        wait_for(lambda: b"accepted by the rendezvous" in log.read_bytes(), agent)
        self.follower = Follower(f"http://127.0.0.1:{port}")

    @contextmanager
    def watch(self, probes: Sequence[object] = ()) -> "Iterator[subprocess.Popen[bytes]]":
        """Run a watch, as the launcher would."""
        environment = {
            **self.gpus.environment,
            "UNBROKEN_DIR": str(self.folder),
            "UNBROKEN_WATCH_ROOT": str(self.system.root),
            "UNBROKEN_WATCH_STORAGE": str(self.folder),
            "UNBROKEN_WATCH_PROBES": json.dumps(probes),
            "NVIDIA_VISIBLE_DEVICES": "all",
        }
        with started("unbroken.watch", environment, self.folder / "watch.log") as process:
            yield process


@contextmanager
def a_rig(timeouts: Timeouts | None = None) -> Iterator[Rig]:
    """Make one, and end all of it."""
    with tempfile.TemporaryDirectory(prefix="health-") as folder, ExitStack() as stack:
        yield Rig(Path(folder), stack, timeouts or Timeouts())


def measure_xids(num: int) -> Iterator[str]:
    """Emit events at random times, each of its own kind, and wait for each."""
    chance = random.Random(1)
    took_s: list[float] = []
    with a_rig() as rig:
        while len(took_s) < num:
            with rig.watch():
                rig.follower.wait(lambda seen: LOOKED in seen and not _xids(seen), "a new watch")
                time.sleep(2.0)  # Until it listens.
                for code in range(200, 200 + min(XIDS_A_WATCH, num - len(took_s))):
                    time.sleep(chance.random() / 2)
                    before_s = time.monotonic()
                    rig.gpus.emit(code % NUM_DEVICES, code)
                    wanted = f"xid-{code}"
                    seen = rig.follower.wait(partial(_has_code, wanted), wanted)
                    took_s.append(next(at_s for key, at_s in seen.items() if key[2] == wanted) - before_s)
    yield f"XID to coordinator (want p99 1 s): {spread(took_s)}"


def _has_code(code: str, seen: dict[Key, float]) -> bool:
    return any(key[2] == code for key in seen)


def _xids(seen: dict[Key, float]) -> list[Key]:
    return [key for key in seen if key[2].startswith("xid-")]


def measure_ports(num: int) -> Iterator[str]:
    """Take ports down at random times, and wait for each."""
    chance = random.Random(1)
    took_s: list[float] = []
    names = [f"mlx5_{number}/1" for number in range(NUM_DEVICES)]
    with a_rig() as rig, rig.watch():
        rig.follower.wait(lambda seen: LOOKED in seen, "a look at the ports")
        while len(took_s) < num:
            down_s = {}
            for name in chance.sample(names, NUM_DEVICES):
                time.sleep(chance.random())
                down_s[name] = time.monotonic()
                rig.system.set_port(name, "1: DOWN")
            seen = rig.follower.wait(lambda seen: all(("ports", name, "link-down") in seen for name in names), "links")
            took_s += [seen["ports", name, "link-down"] - at_s for name, at_s in down_s.items()]
            for name in names:
                rig.system.set_port(name, "4: ACTIVE")
            rig.follower.wait(lambda seen: not any(key[2] == "link-down" for key in seen), "no links")
    yield f"port down to suspect (want 5 s): {spread(took_s)}"


def measure_checks(num: int) -> Iterator[str]:
    """Call the checks in a process of its own, which loads the compiled library."""
    with tempfile.TemporaryDirectory(prefix="health-") as folder:
        gpus = Gpus(compile_library(Path(folder) / "library"), Path(folder) / "gpus", count=NUM_DEVICES)
        words = [sys.executable, __file__, "--call-checks", str(num)]
        done = subprocess.run(words, env={**os.environ, **gpus.environment}, capture_output=True, text=True, check=True)
    yield from done.stdout.splitlines()


def call_checks(num: int) -> None:
    """Call each of them, a moment apart, as between iterations."""
    state = FrozenState(rank=0, world_size=8, iteration=0)
    for check in (ChainedGPUHealthCheck(0), ChainedNVLHealthCheck(0)):
        took_s = []
        for _ in range(num):
            time.sleep(0.01)
            before_s = time.monotonic()
            check(state)
            took_s.append(time.monotonic() - before_s)
        if not check.has_checked:
            raise RuntimeError(f"{type(check).__name__}: want it to look at GPUs, and it looked at none")
        print(f"{type(check).__name__} of a worker's GPU (want p99 20 ms): {spread(took_s)}")


def measure_heartbeats(num: int) -> Iterator[str]:
    """Watch the agent's heartbeats, without probes and with eight that hang, in turn."""
    interval_s = HEARTBEAT_S / 5
    probe = {"command": ["sleep", "1000"], "periodSeconds": 1, "timeoutSeconds": 2}
    hanging = [{"name": f"hangs-{number}", **probe} for number in range(8)]
    late_s: dict[str, list[float]] = {"no probe": [], "8 probes that hang": []}
    with a_rig(Timeouts(heartbeat_s=HEARTBEAT_S)) as rig:
        for _ in range(3):
            for name, probes in zip(late_s, ([], hanging), strict=True):
                with rig.watch(probes):
                    first = len(rig.relay.heard_s)
                    time.sleep(interval_s * num / 3)
                    heard_s = rig.relay.heard_s[first:]
                late_s[name] += [max(b - a - interval_s, 0.0) for a, b in itertools.pairwise(heard_s)]
    for name, values in late_s.items():
        yield f"heartbeats of an agent, later than each {interval_s:g} s, {name}: {spread(values)}"


def measure_cost(num: int) -> Iterator[str]:
    """Let a watch run, and ask the kernel."""
    seconds = max(60.0, num * 0.6)
    with a_rig() as rig, rig.watch() as process:
        rig.follower.wait(lambda seen: LOOKED in seen, "a look at the ports")
        time.sleep(10.0)  # What a start costs is paid once.
        before_s, began_s = _cpu_s(process.pid), time.monotonic()
        time.sleep(seconds)
        share = (_cpu_s(process.pid) - before_s) / (time.monotonic() - began_s)
        pss, rss = memory_mib(process.pid, "Pss"), memory_mib(process.pid, "Rss")
    text = f"{share:.3%} of a core in {seconds:.0f} s; PSS {pss:.1f} MiB, RSS {rss:.1f} MiB"
    yield f"a watch with {NUM_DEVICES} GPUs and {NUM_DEVICES} adapters (want 0.1 %, 25 MB): {text}"


def _cpu_s(pid: int) -> float:
    """Return the CPU time of all threads that a process has."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure_hangs(num: int) -> Iterator[str]:
    """Judge hangs of 1,024 ranks, and of random ones."""
    chance, took_s, wrong = random.Random(1), [], 0
    for _ in range(max(1, num // 4)):
        culprit = chance.randrange(1024)
        witnesses = big_world(culprit, chance.randrange(4))
        before_s = time.monotonic()
        wrong += judge(witnesses, SOFT_S).ranks != (culprit,)
        took_s.append(time.monotonic() - before_s)
    yield f"culprit among 1,024 ranks (want 1 s): {wrong} wrong, {spread(took_s)}"
    for share in (0.0, 0.02):
        of_all, right, blamed = told(share)
        text = f"{right.total()} of {of_all.total()} right, {len(blamed)} blamed wrongly"
        yield f"random hangs, {share:.0%} of ranks silent (want 95 %, 0): {text}"


def measure_preflights(num: int) -> Iterator[str]:
    """Fly preflights in virtual time."""
    for limit_s, busy_share in ((SHORT_S, 0.0), (PAIR_S, 0.0), (PAIR_S, BUSY_SHARE), (SHORT_S, BUSY_SHARE)):
        count = fly(256, 3, range(num), limit_s=limit_s, busy_share=busy_share)
        what = f"tests of {limit_s:g} s, {busy_share:.0%} of the hosts busy for a while, {num} seeds"
        text = f"{len(count.innocents)} innocents, {count.recall:.1%} of bad hosts, {count.longest_s:.0f} s at most"
        yield f"preflight of 256 hosts, {what} (want 0 innocents, 60 s): {text}"


PARTS: dict[str, Callable[[int], Iterator[str]]] = {
    "xid": measure_xids,
    "ports": measure_ports,
    "checks": measure_checks,
    "heartbeat": measure_heartbeats,
    "cost": measure_cost,
    "hangs": measure_hangs,
    "preflight": measure_preflights,
}


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: all)")
    parser.add_argument("--samples", type=int, default=200, help="of each (default: %(default)s)")
    parser.add_argument("--call-checks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call_checks:
        call_checks(arguments.call_checks)
        return
    parts = arguments.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--parts: want some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for part in parts:
        for line in PARTS[part](arguments.samples):
            print(f"- {line}", flush=True)


if __name__ == "__main__":
    main()
