"""The watch as a process of its own, on a driver's library compiled here and on files as /sys and /proc have them."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from tests.devices import Gpus, System, compile_library
from tests.integration.sidecar.probes.daemon import Daemon, response
from tests.processes import is_gone
from tests.waiting import wait_until

from unbroken.watch.checks.check import Check
from unbroken.watch.checks.gpu import GPU, judge_gpus
from unbroken.watch.child import CommandRunner
from unbroken.watch.gpus import GpuReader
from unbroken.watch.lane import Lane
from unbroken.watch.nvml import Nvml
from unbroken.watch.watch import PATIENCE_S, Board
from unbroken_core.pod.pod_messages import Attach
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.findings import STARTING, Health, Verdict

LIMIT_S = 60.0
WILD_WRITE = Path(__file__).parents[2] / "gpu" / "wild_write.py"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


class Agent:
    """Listens as an agent does, and keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "agent.sock"))
        self._listener.listen()
        self._changed = threading.Condition()
        self.first: Health | None = None
        self.health = Health(())
        self.num_messages = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                attach = wire.decode(next(lines), Attach)
                assert attach.role == "watch"
                for line in lines:
                    with self._changed:
                        self.health = wire.decode(line, Health)
                        self.first = self.first or self.health
                        self.num_messages += 1
                        self._changed.notify_all()

    def wait(self, is_met: Callable[[dict[tuple[str, str], Verdict]], bool]) -> dict[tuple[str, str], Verdict]:
        """Wait until findings, verdict by check and code, are as wanted."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_met(self.found()), LIMIT_S):
                pytest.fail(f"not seen in {LIMIT_S:.0f} s: {self.health}")
            return self.found()

    def found(self) -> dict[tuple[str, str], Verdict]:
        return {(each.check, each.code): each.verdict for each in self.health.findings}

    def close(self) -> None:
        self._listener.close()


class Running:
    """One watch and all that it looks at."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.gpus = Gpus(library, folder / "gpu")
        self.system = System(folder / "root")
        self.agent = Agent(folder)
        self.environment = {
            **os.environ,
            **self.gpus.environment,
            "UNBROKEN_DIR": str(folder),
            "UNBROKEN_WATCH_ROOT": str(self.system.root),
            "UNBROKEN_WATCH_STORAGE": str(folder),
            "NVIDIA_VISIBLE_DEVICES": "all",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "unbroken.watch"], env=self.environment)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.agent.close()
        self.gpus.close()


@pytest.fixture
def running(tmp_path: Path, library: Path) -> Iterator[Running]:
    started = Running(tmp_path, library)
    yield started
    started.close()


def test_each_check_finds_what_is_wrong_with_what_it_looks_at(running: Running) -> None:
    system, gpus, agent = running.system, running.gpus, running.agent
    system.add_adapter("mlx5_0", 0, "0000:3b:00.0")
    system.add_interface("eth0")
    system.set_errors("0000:01:00.0")
    system.set_pressure(0.0)
    system.set_kills(0)
    running.start()
    # PCIe errors: of a GPU only, so all is well there as soon as the driver has named the GPUs, and not before.
    checks = {"gpu", "gpu-events", "ports", "network", "pcie", "memory", "oom", "storage"}
    well = agent.wait(
        lambda found: checks <= {check for (check, code), verdict in found.items() if verdict is Verdict.OK}
    )
    assert set(well.values()) <= {Verdict.OK, Verdict.UNKNOWN}
    # An event is pushed; all else is found at the next look.
    gpus.emit(1, 79)
    agent.wait(lambda found: found.get(("gpu-events", "xid-79")) is Verdict.FATAL)
    system.set_port("mlx5_0/1", "1: DOWN")
    system.add_interface("eth0", "down")
    agent.wait(lambda found: ("ports", "link-down") in found and ("network", "link-down") in found)
    gpus.set({"gpu0.ecc": 1, "gpu0.link1": 0, "gpu0.action": 2, "gpu1.lost": 15})
    system.set_errors("0000:01:00.0", fatal=1)
    system.count("mlx5_0/1", link_downed=1)
    system.set_pressure(50.0)
    system.set_kills(2)
    wanted = {
        ("gpu", "ecc-uncorrected"): Verdict.SUSPECT,
        ("gpu", "nvlink-down"): Verdict.SUSPECT,
        ("gpu", "recovery-action-2"): Verdict.FATAL,
        ("gpu", "gpu-lost"): Verdict.FATAL,
        ("ports", "link-flapped"): Verdict.SUSPECT,
        ("pcie", "aer-fatal"): Verdict.SUSPECT,
        ("memory", "memory-pressure"): Verdict.DEGRADED,
        ("oom", "oom-killed"): Verdict.DEGRADED,
    }
    found = agent.wait(lambda found: wanted.keys() <= found.keys())
    assert {key: found[key] for key in wanted} == wanted
    assert found["gpu-events", "xid-79"] is Verdict.FATAL


def test_gpus_beyond_the_most_are_said(running: Running) -> None:
    running.gpus.set(count=34)
    running.start()
    found = running.agent.wait(lambda found: {("gpu", ""), ("gpu", "not-told"), ("gpu-events", "deaf")} <= found.keys())
    assert found["gpu", "not-told"] is Verdict.UNKNOWN
    said = {each.message for each in running.agent.health.findings if each.check.startswith("gpu")}
    assert said >= {"32 GPUs", "2 of 34 GPUs not looked at", "events of 2 of 34 GPUs are not reported"}


def test_gpus_of_other_pods_beyond_the_most_are_not_said(running: Running) -> None:
    running.gpus.set(count=34)
    running.environment["NVIDIA_VISIBLE_DEVICES"] = "GPU-0000,GPU-0001"
    running.start()
    found = running.agent.wait(lambda found: {("gpu", ""), ("gpu-events", "")} <= found.keys())
    assert not {("gpu", "not-told"), ("gpu-events", "deaf")} & found.keys()


@pytest.mark.parametrize("visible", ["GPU-0002,GPU-0003", "2,3"])
def test_what_happens_to_gpus_of_other_pods_is_none_of_ours(running: Running, visible: str) -> None:
    """Seen before: a GPU that was lost, or any where the pod's were named by number, spoke against each pod that saw it
    in a privileged container."""
    running.gpus.set({"count": 4, "gpu0.lost": 15})
    running.environment["NVIDIA_VISIBLE_DEVICES"] = visible
    running.start()
    running.agent.wait(lambda found: {("gpu", ""), ("gpu-events", "")} <= found.keys())
    running.gpus.set({"gpu1.action": 2})
    running.gpus.emit(1, 79)
    running.gpus.emit(99, 79)
    running.gpus.emit(3, 74)
    found = running.agent.wait(lambda found: {("gpu-events", "foreign"), ("gpu-events", "xid-74")} <= found.keys())
    assert found["gpu-events", "foreign"] is Verdict.UNKNOWN
    assert Verdict.FATAL not in found.values()
    suspects = {each.entity for each in running.agent.health.findings if each.verdict is Verdict.SUSPECT}
    assert suspects == {"GPU-0003"}


def test_a_driver_that_supports_nothing_and_files_that_are_not_there_are_unknown(running: Running) -> None:
    running.gpus.set(all=3)
    running.start()
    # PCIe errors: of a GPU only, so all is well there as soon as the driver has named the GPUs, and not before.
    checks = {"gpu", "gpu-events", "ports", "network", "pcie", "memory", "oom"}
    found = running.agent.wait(lambda found: checks <= {check for check, _code in found})
    assert {verdict for (check, _code), verdict in found.items() if check in checks} == {Verdict.UNKNOWN}


@pytest.fixture
def on_gpu(running: Running) -> Running:
    """A watch on the machine's own driver, files and devices."""
    # Elsewhere there is no driver but the compiled one.
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    ours = {*running.gpus.environment, "UNBROKEN_WATCH_ROOT", "NVIDIA_VISIBLE_DEVICES"}
    kept = {name: os.environ[name] for name in ours & os.environ.keys()}
    running.environment = {name: text for name, text in running.environment.items() if name not in ours} | kept
    return running


def gpu_findings(agent: Agent) -> str:
    """Return all that is found of GPUs, for people."""
    found = [each for each in agent.health.findings if each.check.startswith("gpu")]
    return ", ".join(f"{each.check} {each.code or 'all'}: {each.verdict.value} ({each.message})" for each in found)


@pytest.mark.gpu
def test_a_real_driver_finds_its_gpus_well_under_the_names_that_torch_gives_them(
    on_gpu: Running, record_property: Callable[[str, object], None]
) -> None:
    devices = range(torch.cuda.device_count())
    names = {f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in devices}
    assert names <= {gpu.uuid for gpu in Nvml().devices()}
    on_gpu.start()
    seen = {"gpu", "gpu-events"}
    found = on_gpu.agent.wait(lambda found: seen <= {check for check, _code in found})
    record_property("seen", gpu_findings(on_gpu.agent))
    assert {verdict for (check, _code), verdict in found.items() if check == "gpu"} - {Verdict.UNKNOWN}
    bad = {key for key, verdict in found.items() if verdict in (Verdict.FATAL, Verdict.SUSPECT)}
    assert not {check for check, _code in bad} & seen, on_gpu.agent.health


@pytest.mark.gpu
def test_a_real_xid_of_an_application_is_told_and_blames_no_gpu(
    on_gpu: Running, record_property: Callable[[str, object], None]
) -> None:
    on_gpu.start()
    heard = on_gpu.agent.wait(lambda found: any(check == "gpu-events" for check, _ in found))
    if heard.get(("gpu-events", "")) is not Verdict.OK:
        pytest.skip(f"needs GPUs whose events the driver reports, got {gpu_findings(on_gpu.agent)}")
    done = subprocess.run([sys.executable, str(WILD_WRITE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    began_s = time.monotonic()
    found = on_gpu.agent.wait(lambda found: any(code.startswith("xid-") for _, code in found))
    took_s = time.monotonic() - began_s
    told = {code: verdict for (_check, code), verdict in found.items() if code.startswith("xid-")}
    record_property("seen", f"{', '.join(told)} told {took_s:.2f} s after the process had ended")
    assert set(told.values()) == {Verdict.OK}, on_gpu.agent.health


def test_a_flood_of_events_is_few_messages_and_delays_no_other_finding(running: Running) -> None:
    running.system.add_adapter("mlx5_0", 0, "0000:3b:00.0")
    running.start()
    running.agent.wait(lambda found: found.get(("gpu-events", "")) is Verdict.OK and ("ports", "") in found)
    num_before = running.agent.num_messages
    running.gpus.emit(0, 31, times=4000)
    running.gpus.emit(1, 79)
    running.agent.wait(lambda found: ("gpu-events", "xid-79") in found)
    running.system.set_port("mlx5_0/1", "1: DOWN")
    found = running.agent.wait(lambda found: ("ports", "link-down") in found)
    assert found["gpu-events", "xid-31"] is Verdict.OK
    # The flood itself is two: seen once, or thrice at once.
    assert running.agent.num_messages - num_before < 20


def add_extension(running: Running, code: str) -> None:
    """Let the watch find a package with a check of its own."""
    package = running.system.root / "others"
    (package / "others-1.0.dist-info").mkdir(parents=True)
    (package / "others-1.0.dist-info" / "METADATA").write_text("Name: others\nVersion: 1.0\n")
    (package / "others-1.0.dist-info" / "entry_points.txt").write_text("[unbroken.health]\nfans = others:check\n")
    (package / "others.py").write_text(code)
    running.environment["PYTHONPATH"] = os.pathsep.join((str(package), os.environ.get("PYTHONPATH", "")))


def test_a_watch_says_that_it_begins_before_it_runs_code_of_others(running: Running) -> None:
    add_extension(running, "import os\nos._exit(4)\n")
    running.start()
    running.agent.wait(bool)
    assert running.agent.first == Health((STARTING,))
    assert running.process is not None
    assert running.process.wait(LIMIT_S) == 4


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("raise SystemExit(4)", id="it ends"),
        pytest.param("raise KeyboardInterrupt", id="it is interrupted"),
        pytest.param("import threading\nthreading.Event().wait()", id="it hangs"),
    ],
)
def test_what_an_import_of_others_does_holds_no_other_check_up(running: Running, code: str) -> None:
    """Seen before: with a package that hangs when it is imported, no check ever ran."""
    add_extension(running, code)
    running.start()
    found = running.agent.wait(lambda found: ("gpu", "") in found)
    assert found["gpu", ""] is Verdict.OK
    if code.startswith("raise"):
        running.agent.wait(lambda found: ("extensions", "not-loaded") in found)


def test_what_a_health_daemon_of_the_node_says_is_a_finding(running: Running) -> None:
    def said(verdict: Verdict) -> str:
        running.agent.wait(lambda found: verdict in (found[key] for key in found if key[0] == "node-daemon"))
        told = [each for each in running.agent.health.findings if each.check == "node-daemon"]
        return next(each.message for each in told if each.verdict is verdict)

    with contextlib.closing(Daemon()) as daemon:
        endpoint = daemon.start(hex=response(True, 0, '{"fail_count": 0}'))
        command = [sys.executable, "-m", "unbroken.probes.node_daemon", "--endpoint", f"unix://{endpoint}"]
        times = {"periodSeconds": 1, "timeoutSeconds": 60}
        probe = {"name": "node-daemon", "command": [*command, "--timeout", "50"], **times, "verdict": "fatal"}
        running.environment["UNBROKEN_WATCH_PROBES"] = json.dumps([probe])
        running.start()
        assert said(Verdict.OK) == "the daemon's check passed: exit code 0, fail_count 0"
        daemon.answer(hex=response(False, 3, '{"fail_count": 1, "error": "GPU 5 is lost"}'))
        assert said(Verdict.FATAL) == "the daemon's check failed: exit code 3, fail_count 1: GPU 5 is lost"
        daemon.kill()
        assert said(Verdict.UNKNOWN).startswith(f"exit code 2: no answer of {endpoint}: UNAVAILABLE: ")
        assert said(Verdict.FATAL).startswith("the daemon's check failed: "), "nothing was taken back"


def test_a_driver_that_hangs_tells_nothing_and_holds_up_nothing_else(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(library, tmp_path)
    environment = {**os.environ, **gpus.environment, "PYTHONPATH": str(Path(__file__).parents[3])}
    script = "import sys, time\nfrom tests.integration.sidecar.test_watch import hang\nhang(sys.argv[1])\n"
    # In a process of its own: the loader reads LD_LIBRARY_PATH when a process starts.
    done = subprocess.run(
        [sys.executable, "-c", script, str(gpus.path)], env=environment, timeout=LIMIT_S, check=False, text=True
    )
    gpus.close()
    assert done.returncode == 0


def hang(state: str) -> None:
    """Let a driver hang under a lane, and come back."""
    woken = threading.Event()
    board = Board(woken.set)
    lane = Lane([Check(GPU, 0.02, GpuReader("all", time.monotonic).sample, judge_gpus)], board.put)
    file = Path(state)
    lane.start()
    wait_until(lambda: verdict_of(board) is Verdict.OK, "a first sample")
    before = file.read_text()
    file.write_text("hang 1\n")
    wait_until(lambda: lane.hanging(time.monotonic() + PATIENCE_S + 1, PATIENCE_S) == GPU, "a check that hangs")
    board.hanging = frozenset({GPU})
    assert [(each.code, each.verdict) for each in board.health().findings if each.code == "no-answer"] == [
        ("no-answer", Verdict.UNKNOWN)
    ]
    assert verdict_of(board) is Verdict.UNKNOWN
    file.write_text(before)
    wait_until(lambda: not lane.hanging(time.monotonic() + PATIENCE_S + 1, PATIENCE_S), "its return")


def verdict_of(board: Board) -> Verdict:
    return board.health().worst


def are_gone(pids: Iterable[int]) -> bool:
    return all(map(is_gone, pids))


def test_a_child_that_hangs_is_killed_with_its_own_children_and_one_that_floods_is_cut() -> None:
    child = CommandRunner()
    flood = child.run(["sh", "-c", "yes flood | head -c 1000000; exit 3"], LIMIT_S, dict(os.environ))
    assert (flood.exit_code, len(flood.output)) == (3, 4096)
    hung = child.run(["sh", "-c", "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; wait"], 3.0, dict(os.environ))
    assert hung.exit_code is None
    wait_until(lambda: are_gone(map(int, hung.output.split())), "the end of the child's children")
    # Its grandchild keeps the pipe open, and nobody waits for that.
    assert child.run(["sh", "-c", "sleep 1000 & exit 1"], LIMIT_S, dict(os.environ)).exit_code == 1


def test_the_last_words_of_a_child_that_ends_right_after_a_look_at_its_pipe_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen on a busy machine: of a path that had answered nothing could be said for a minute."""

    def look_too_early(*_: object) -> tuple[list[int], list[int], list[int]]:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return [], [], []

    monkeypatch.setattr("unbroken.watch.child.select.select", look_too_early)
    for command, output in (
        ("echo so; echo far", "so\nfar\n"),
        ("yes | head -c 9000", "y\n" * 2048),
        ("sleep 1000 &", ""),
    ):
        ended = CommandRunner().run(["sh", "-c", command], LIMIT_S, dict(os.environ))
        assert (ended.exit_code, ended.output) == (0, output)


def test_nobody_waits_for_what_a_child_has_left_to_stop_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is always something to read, however seldom the writers get a core.
    monkeypatch.setattr("unbroken.watch.child.select.select", lambda readers, *_: (readers, [], []))
    ended = CommandRunner().run(["sh", "-c", "yes & yes >&2 & exit 1"], 20.0, dict(os.environ))
    assert ended.exit_code == 1


def test_nothing_of_a_child_that_has_ended_goes_on_in_a_session_of_its_own(tmp_path: Path) -> None:
    """Seen before: each run of a probe that calls setsid left a process behind."""
    child, file = CommandRunner(), tmp_path / "pids"
    leaving = f"setsid sh -c 'sleep 1000 & echo $$ $! > {file}.new; mv {file}.new {file}; wait' &"
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            for ending, code in (("exit 0", 0), ("kill -9 $$", -9)):
                script = f"{leaving} until [ -e {file} ]; do sleep 0.02; done; cat {file}; rm {file}; {ending}"
                ended = child.run(["sh", "-c", script], LIMIT_S, dict(os.environ))
                left = [int(number) for number in ended.output.split()]
                assert (ended.exit_code, len(left)) == (code, 2)
                wait_until(functools.partial(are_gone, left), "the end of what left the session")
            assert bystander.poll() is None
        finally:
            bystander.kill()
