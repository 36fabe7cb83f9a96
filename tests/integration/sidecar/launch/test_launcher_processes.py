"""The launcher with real processes; the agent is played by the test."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Union

import psutil
import pytest
from tests.processes import is_gone, words_of
from tests.waiting import wait_until

from unbroken.launch.config import read_config
from unbroken.launch.output import Console
from unbroken.launch.workers import Workers
from unbroken_core.pod.pod_messages import Attach, DumpStack, End, Processes, ProcessState, Shutdown, Spawn, ToLauncher
from unbroken_core.pod.stacks import stack_path
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PairState
from unbroken_core.vocabulary.findings import Health

LIMIT_S = 60.0


class AgentDouble:
    """Listens on a pod's socket, and keeps what the launcher says."""

    def __init__(self, folder: Path, command: list[str], ranks: int, variables: dict[str, str], *options: str) -> None:
        self.folder = folder
        self.output, self.errors = folder / "out", folder / "err"
        self.processes: Processes | None = None
        self.history: list[ProcessState] = []
        self.health: Health | None = None
        self.pairs: PairState | None = None
        self.limit_s = LIMIT_S
        """For the next word."""
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._unread = b""
        self.listen()
        environment = {
            **os.environ,
            "UNBROKEN_DIR": str(folder),
            "UNBROKEN_POD": "digits-0",
            "UNBROKEN_RANKS_PER_POD": str(ranks),
            **variables,
        }
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unbroken.launch", "--grace", "1", *options, "--", *command],
                env=environment,
                stdout=output,
                stderr=errors,
            )
        self.accept()

    def listen(self) -> None:
        """Open the socket, as an agent that was started anew."""
        (self.folder / "agent.sock").unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / "agent.sock"))
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)

    def accept(self) -> None:
        """Take the launcher's connection; it says who it is and what it has."""
        assert self._listener is not None
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(0.05)
        self._unread = b""
        attach = self.wait_line()
        assert wire.decode(attach, Attach).role == "launcher"
        self.health = None

    def hang_up(self) -> None:
        """End, as a killed agent does."""
        for end in (self._connection, self._listener):
            if end is not None:
                end.close()
        self._connection = self._listener = None

    def say(self, order: ToLauncher) -> None:
        """Send an order."""
        assert self._connection is not None
        self._connection.sendall(wire.encode(order).encode() + b"\n")

    def spawn(self, incarnation: int = 0, *ranks: int, **environment: str) -> None:
        """Order these places to be started."""
        for rank in ranks or (0,):
            self.say(Spawn(rank, incarnation, environment))

    def wait_line(self) -> bytes:
        """Return the next line."""
        until_s = time.monotonic() + self.limit_s
        while b"\n" not in self._unread:
            assert time.monotonic() < until_s, f"the launcher says nothing:\n{self.text()}"
            assert self._connection is not None
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                continue
            assert data, f"the launcher has hung up:\n{self.text()}"
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def wait_for(self, is_enough: Callable[[Processes], Any]) -> Processes:
        """Read states until one is enough."""
        while self.processes is None or not is_enough(self.processes):
            self._take()
        return self.processes

    def wait_health(self) -> Health:
        """Return what the pod's preflight has found, once the launcher has said it on this connection."""
        while self.health is None:
            self._take()
        return self.health

    def wait_pairs(self, is_enough: Callable[[PairState], Any]) -> PairState:
        """Read what is said of tests with other pods until it is enough."""
        while self.pairs is None or not is_enough(self.pairs):
            self._take()
        return self.pairs

    def _take(self) -> None:
        said: Processes | Health | PairState = wire.decode(self.wait_line(), Union[Processes, Health, PairState])
        if isinstance(said, Health):
            self.health = said
            return
        if isinstance(said, PairState):
            self.pairs = said
            return
        self.processes = said
        self.history += said.processes

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look until something is there."""
        wait_until(condition, what, LIMIT_S, self.text)

    def wait_exit(self, local_rank: int = 0, incarnation: int = 0) -> ProcessState:
        """Return the state of a place once its process has ended."""

        def has_ended(said: Processes) -> bool:
            state = said.processes[local_rank]
            return state.incarnation == incarnation and state.exit_code is not None

        return self.wait_for(has_ended).processes[local_rank]

    def wait_output(self, text: str) -> None:
        """Wait until the console shows a text."""
        self.wait_until(lambda: text in self.text(), f"{text!r} on the console")

    def text(self) -> str:
        """Return the console."""
        return self.output.read_text(errors="replace") + self.errors.read_text(errors="replace")

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.hang_up()


@pytest.fixture
def start() -> Iterator[Callable[..., AgentDouble]]:
    """Start a launcher; every test gets a folder with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="ubl-", dir="/tmp"))
    made: list[AgentDouble] = []

    def begin(command: list[str], ranks: int = 1, *options: str, **variables: str) -> AgentDouble:
        made.append(AgentDouble(folder, command, ranks, variables, *options))
        return made[-1]

    yield begin
    for double in made:
        double.close()
    shutil.rmtree(folder, ignore_errors=True)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


Begin = Callable[..., AgentDouble]


def test_places_have_held_ports_that_only_their_process_can_listen_on(start: Begin) -> None:
    """1.26: no race for a free port."""
    code = "import os,socket; s=socket.create_server(('', int(os.environ['P']))); print('listens', flush=True)"
    agent = start(python(code), ranks=2)
    first = agent.wait_for(lambda said: True)
    assert [(state.incarnation, state.pid, state.exit_code) for state in first.processes] == [(-1, 0, None)] * 2
    ports = [state.port for state in first.processes]
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))
    agent.spawn(P=str(ports[0]))
    state = agent.wait_exit()
    assert (state.exit_code, state.error) == (0, "")
    assert state.port not in ports


def test_exit_code_signal_and_last_words_are_reported(start: Begin) -> None:
    """4.14, 4.16, 4.22"""
    agent = start(python("import os; exec(os.environ['CODE'])"))
    agent.spawn(0, CODE="raise ValueError('no data')")
    first = agent.wait_exit(0, 0)
    agent.spawn(1, CODE="os.kill(os.getpid(), 9)")
    second = agent.wait_exit(0, 1)
    record = json.dumps({"message": {"message": "RuntimeError: from record", "extraInfo": {}}})
    agent.spawn(2, CODE=f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({record!r}); os._exit(7)")
    third = agent.wait_exit(0, 2)
    assert [(state.exit_code, state.error) for state in (first, second, third)] == [
        (1, "ValueError: no data"),
        (-9, ""),
        (7, "RuntimeError: from record"),
    ]


def test_stack_of_a_process_that_holds_the_gil_is_written_into_its_log(start: Begin, tmp_path: Path) -> None:
    """2.22: what a rank does that makes no progress is known before it is ended."""
    code = (
        "import ctypes, os, pathlib, sys\n"
        "from unbroken.inprocess.interruption.stacks import StackSignal\n"
        "signal = StackSignal(pathlib.Path(os.environ['UNBROKEN_DIR']), 0)\n"
        "def holds_the_gil():\n"
        "    print('signal', signal.number, flush=True)\n"
        "    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "holds_the_gil()\n"
    )
    agent = start(python(code), UNBROKEN_LOG_DIR=str(tmp_path / "logs"))
    agent.spawn()
    agent.wait_until(lambda: b"signal" in agent.output.read_bytes(), "the signal's number")
    number = int(agent.output.read_text().split("signal ")[1].split()[0])
    agent.say(DumpStack(0, 1, number))
    agent.say(DumpStack(0, 0, number))
    log = tmp_path / "logs" / "digits-0" / "rank-0" / "0.log"
    agent.wait_until(lambda: b"in holds_the_gil" in log.read_bytes(), "the stack in the log")
    assert log.read_bytes().count(b"no progress; the main thread stands at\n") == 1


def test_stack_that_is_written_late_is_in_the_log_all_the_same(tmp_path: Path) -> None:
    """A worker that gets no processor handles the signal when it does: the test writes for it, after the first look."""
    ready, logs = tmp_path / "ready", tmp_path / "logs"
    code = (
        "import pathlib, signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "while True: signal.pause()\n"
    )
    stack = stack_path(tmp_path, 0)
    stack.touch()
    environment = {**os.environ, "UNBROKEN_DIR": str(tmp_path), "UNBROKEN_LOG_DIR": str(logs)}
    workers = Workers(read_config(["--", *python(code)], environment), Console(1), Console(2))
    workers.spawn(Spawn(0, 0, {}), 0.0)
    try:
        wait_until(ready.exists, "the handler of the signal")
        workers.dump_stack(DumpStack(0, 0, int(signal.SIGUSR1)), 0.0)
        workers.log_stacks(10.0)
        stack.write_text("stands here")
        workers.log_stacks(20.0)
        (log,) = logs.rglob("0.log")
        assert b"no progress; the main thread stands at\nstands here" in log.read_bytes()
    finally:
        workers.end_all(0.0, 0.0)
        wait_until(workers.reap, "the end of the process")
        for place in workers._workers:
            place.port.release()


def test_process_that_does_not_handle_the_signal_is_not_asked_for_its_stack(start: Begin) -> None:
    agent = start(python("import time; print('runs', flush=True); time.sleep(1000)"))
    agent.spawn()
    agent.wait_until(lambda: b"runs" in agent.output.read_bytes(), "the start")
    for number in (0, int(signal.SIGRTMAX) - 1, int(signal.SIGUSR1)):
        agent.say(DumpStack(0, 0, number))
    agent.say(End(0, 0, 5.0))
    assert agent.wait_exit().exit_code == -signal.SIGTERM


def test_command_that_does_not_exist_is_an_exit_with_code_127(start: Begin) -> None:
    agent = start(["no-such-command"])
    agent.spawn()
    state = agent.wait_exit()
    assert state.exit_code == 127
    assert state.error.startswith("command 'no-such-command': not found in PATH")


def test_same_or_older_incarnation_is_not_started_again(start: Begin) -> None:
    agent = start(["sleep", "1000"])
    agent.spawn(3)
    pid = agent.wait_for(lambda said: said.processes[0].pid).processes[0].pid
    agent.spawn(3)
    agent.spawn(2)
    agent.say(End(0, 2, 0.0))
    agent.say(End(0, 3, 0.0))
    agent.wait_exit(0, 3)
    assert {state.pid for state in agent.history if state.pid} == {pid}


def test_grace_is_given_and_stopped_or_stubborn_processes_are_killed(start: Begin) -> None:
    """4.23, 4.28, 4.2"""
    polite = "import signal,time; signal.signal(15, lambda *a: exit(3)); print('on', flush=True); time.sleep(1000)"
    agent = start(python(polite))
    agent.spawn()
    agent.wait_output("on")
    os.kill(agent.wait_for(lambda said: said.processes[0].pid).processes[0].pid, signal.SIGSTOP)
    agent.say(End(0, 0, 30.0))
    assert agent.wait_exit().exit_code == 3


def test_process_that_ignores_sigterm_is_killed_after_the_grace(start: Begin) -> None:
    stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(1000)"
    agent = start(python(stubborn))
    agent.spawn()
    agent.wait_output("on")
    agent.say(End(0, 0, 0.2))
    assert agent.wait_exit().exit_code == -9


def test_grandchildren_die_with_the_worker(start: Begin) -> None:
    """4.27"""
    code = "import subprocess,os; p=subprocess.Popen(['sleep','1000']); print('child', p.pid, flush=True); os._exit(1)"
    agent = start(python(code))
    agent.spawn()
    agent.wait_exit()
    agent.wait_output("child ")
    pid = int(agent.text().split("child ")[1].split()[0])
    wait_until(lambda: is_gone(pid), f"end of process {pid}", LIMIT_S)


def test_workers_outlive_the_agent_and_a_new_one_is_told_everything(start: Begin) -> None:
    agent = start(["sleep", "1000"], ranks=2)
    agent.spawn(4, 0, 1)
    before = agent.wait_for(lambda said: all(state.pid for state in said.processes))
    agent.hang_up()
    agent.listen()
    agent.accept()
    agent.processes = None
    assert agent.wait_for(lambda said: True) == before


def test_launcher_that_is_killed_takes_its_workers_along(start: Begin) -> None:
    agent = start(["sleep", "1000"])
    agent.spawn()
    pid = agent.wait_for(lambda said: said.processes[0].pid).processes[0].pid
    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: is_gone(pid), f"end of process {pid}", LIMIT_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_to_end_is_told_passed_on_and_becomes_the_exit_code(start: Begin, number: int, code: int) -> None:
    """1.18, 4.1, 4.17, 4.30"""
    agent = start(["sleep", "1000"])
    agent.spawn()
    agent.wait_for(lambda said: said.processes[0].pid)
    agent.process.send_signal(number)
    assert agent.wait_for(lambda said: said.is_leaving).processes[0].exit_code is None
    assert agent.wait_exit().exit_code == -number
    assert agent.process.wait(LIMIT_S) == code


def test_user_signal_is_passed_on_to_the_worker(start: Begin) -> None:
    code = "import signal,time; signal.signal(10, lambda *a: exit(5)); print('on', flush=True); time.sleep(1000)"
    agent = start(python(code))
    agent.spawn()
    agent.wait_output("on")
    agent.process.send_signal(signal.SIGUSR1)
    assert agent.wait_exit().exit_code == 5


def test_shutdown_lets_workers_end_and_gives_the_exit_code(start: Begin) -> None:
    """4.19"""
    agent = start(["sleep", "0.2"])
    agent.spawn()
    agent.wait_for(lambda said: said.processes[0].pid)
    agent.say(Shutdown(6, 30.0, "all done"))
    assert agent.wait_exit().exit_code == 0
    assert agent.process.wait(LIMIT_S) == 6
    assert "the job is over: all done" in agent.text()


def test_bad_end_is_the_exit_code_also_when_it_came_before_the_word_that_training_is_over(start: Begin) -> None:
    """The agent releases workers and launcher at once: a worker may be the quicker one."""
    agent = start(["sleep", "1000"])
    agent.spawn()
    os.kill(agent.wait_for(lambda said: said.processes[0].pid).processes[0].pid, signal.SIGKILL)
    assert agent.wait_exit().exit_code == -9
    agent.say(Shutdown(0, 30.0, "done", (0,)))
    assert agent.process.wait(LIMIT_S) == 137


def test_fault_of_a_worker_that_others_have_made_up_for_is_not_the_exit_code(start: Begin) -> None:
    agent = start(["sleep", "1000"])
    agent.spawn()
    os.kill(agent.wait_for(lambda said: said.processes[0].pid).processes[0].pid, signal.SIGKILL)
    assert agent.wait_exit().exit_code == -9
    agent.say(Shutdown(0, 30.0, "done"))
    assert agent.process.wait(LIMIT_S) == 0


def test_end_that_the_agent_wanted_is_not_the_exit_code(start: Begin) -> None:
    stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(1000)"
    agent = start(python(stubborn))
    agent.spawn()
    agent.wait_output("on")
    agent.say(End(0, 0, 0.1))
    assert agent.wait_exit().exit_code == -9
    agent.say(Shutdown(0, 30.0, "done", (0,)))
    assert agent.process.wait(LIMIT_S) == 0


def test_flood_of_output_is_complete_on_console_and_in_the_log(start: Begin, tmp_path: Path) -> None:
    """4.9, 4.11"""
    code = "import sys; sys.stdout.write(''.join(f'line {i} ' + 'x' * 80 + '\\n' for i in range(50000)))"
    agent = start(python(code), UNBROKEN_LOG_DIR=str(tmp_path))
    agent.spawn()
    agent.wait_exit()
    agent.say(Shutdown(0, 0.0, "done"))
    assert agent.process.wait(LIMIT_S) == 0
    shown = agent.output.read_text().splitlines()
    expected = [f"line {number} " + "x" * 80 for number in range(50_000)]
    assert shown == [f"[digits-0/0] {line}" for line in expected]
    assert (tmp_path / "digits-0" / "rank-0" / "0.log").read_text().splitlines() == expected


def test_log_folder_that_is_a_file_is_told_once_and_the_console_goes_on(start: Begin, tmp_path: Path) -> None:
    """4.8"""
    path = tmp_path / "logs"
    path.write_text("")
    agent = start(["echo", "hello"], ranks=2, UNBROKEN_LOG_DIR=str(path))
    agent.spawn(0, 0, 1)
    agent.wait_output("[digits-0/1] hello")
    assert agent.text().count("want a folder for logs, got: Not a directory") == 1


def test_launcher_without_an_agent_says_what_it_waits_for_and_ends() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "unbroken.launch", "--agent-timeout", "0.2", "--", "true"],
            env={**os.environ, "UNBROKEN_DIR": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert f"agent: no socket at {folder}/agent.sock within 0.2 s" in done.stderr


def test_missing_command_is_refused() -> None:
    """1.2"""
    done = subprocess.run(
        [sys.executable, "-m", "unbroken.launch"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, "got no command" in done.stderr) == (2, True)


def test_the_watch_on_devices_comes_after_the_first_worker_and_again_when_it_ends(start: Begin) -> None:
    agent = start(python("import time; time.sleep(1000)"), UNBROKEN_WATCH="1", UNBROKEN_WATCH_DELAY="0")

    def watches() -> list[psutil.Process]:
        children = psutil.Process(agent.process.pid).children()
        return [child for child in children if "unbroken.watch" in words_of(child) and not is_gone(child.pid)]

    agent.wait_for(lambda said: True)
    assert watches() == []
    agent.spawn()
    agent.wait_until(lambda: bool(watches()), "a watch")
    (first,) = watches()
    first.kill()
    agent.wait_until(lambda: any(each.pid != first.pid for each in watches()), "another watch")
    (second,) = watches()
    assert "the watch on devices and links has ended; the next one starts in 1 s" in agent.errors.read_text()
    agent.say(Shutdown(0, 0.0, "over"))
    agent.process.wait(LIMIT_S)
    agent.wait_until(lambda: is_gone(second.pid), "the end of the watch")
