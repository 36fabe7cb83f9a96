"""Workers that are forked from a process which has imported what is expensive; the agent is played by the test."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.sidecar.launch.test_launcher_processes import AgentDouble
from tests.processes import is_gone, words_of
from tests.waiting import wait_until

from unbroken.launch.forking import Forking
from unbroken.launch.python_command import parse_command
from unbroken_core.pod.pod_messages import End, Shutdown

Begin = Callable[..., AgentDouble]

# The standard library stands for torch, whose import takes a second; numpy has a state of its own to share.
IMPORTS = {"UNBROKEN_PREIMPORT": "decimal"}

FACTS = """\
import gc, multiprocessing, os, random, signal, sys
import helper
def double(x): return 2 * x
if __name__ == "__main__":
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.apply(double, (21,))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    own = ("TORCHELASTIC_ERROR_FILE", "UNBROKEN_PREIMPORT")
    places = ("UNBROKEN_LOCAL_RANK=", "UNBROKEN_INCARNATION=", "UNBROKEN_POD=")
    streams = [(stream.line_buffering, stream.write_through, stream.encoding) for stream in (sys.stdout, sys.stderr)]
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "name": __name__,
        "spec": repr(__spec__ and __spec__.name), "package": __package__, "flags": str(sys.flags),
        "globals": sorted(name for name in globals() if name.startswith("__")),
        "main": sys.modules["__main__"].__dict__ is globals(), "executable": sys.executable, "doubled": doubled,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name not in own},
        "c_environ": os.popen("echo $UNBROKEN_X-$LOCAL_RANK").read(), "cwd": os.getcwd(), "umask": os.umask(0o22),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "blocked": status["SigBlk"], "ignored": status["SigIgn"], "streams": streams,
        "collector": (gc.isenabled(), gc.get_threshold()),
        "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "descriptors": descriptors,
        "shown": sorted(word for word in open("/proc/self/environ").read().split(chr(0)) if word.startswith(places)),
        "title": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
    }
    for name, value in facts.items():
        print("fact", name, value, flush=True)
    print("parent", os.getppid(), "random", random.random(), "imported", "decimal" in sys.modules, flush=True)
"""

ENDS = """\
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit", flush=True)
how = os.environ["UNBROKEN_HOW"]
def fail():
    raise ValueError("no data")
if how == "thread":
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread is over", flush=True))).start()
elif how == "raise":
    try:
        {}["key"]
    except KeyError:
        fail()
elif how == "string":
    sys.exit("wrong")
elif how == "code":
    sys.exit(7)
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "hook":
    sys.excepthook = lambda kind, error, frames: print("hook:", error, frames.tb_lineno, flush=True)
    fail()
elif how == "wait":
    print("waits", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start a launcher in a folder of its own, with what the workers run."""
    folder = Path(tempfile.mkdtemp(prefix="ubl-", dir="/tmp"))
    made: list[AgentDouble] = []

    def start(command: list[str], ranks: int = 1, **variables: str) -> AgentDouble:
        made.append(AgentDouble(folder, command, ranks, variables))
        return made[-1]

    yield start
    for double in made:
        double.close()
    shutil.rmtree(folder, ignore_errors=True)


def write_script(folder: Path, text: str) -> str:
    """Write a script, with a module beside it; return the script's path."""
    (folder / "helper.py").write_text("")
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


def servers(agent: AgentDouble) -> list[psutil.Process]:
    """Return the fork servers of a launcher."""
    children = psutil.Process(agent.process.pid).children()
    return [child for child in children if any(word.endswith("fork_server.py") for word in words_of(child))]


def facts_of(agent: AgentDouble) -> tuple[list[str], list[str]]:
    """Run a worker; return what it sees, and what differs from run to run."""
    agent.spawn(0, UNBROKEN_X="x")
    assert agent.wait_exit().exit_code == 0, agent.text()
    agent.say(Shutdown(0, 0.0, "done"))
    agent.process.wait()
    lines = [line.removeprefix("[digits-0/0] ") for line in agent.output.read_text().splitlines()]
    facts = [line for line in lines if line.startswith("fact ")]
    assert len(facts) > 20, agent.text()
    return facts, lines[-1].split()


@pytest.mark.parametrize(
    "words", [["-W", "error::FutureWarning", "train.py", "--lr", "a b"], ["-u", "-m", "train", "x"]]
)
def test_forked_worker_is_what_the_interpreter_would_have_made(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Everything that a process can see of itself, compared as a whole."""
    write_script(tmp_path, FACTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    command = [sys.executable, *words]
    forked, seen = facts_of(agent := begin(command, **IMPORTS))
    own, own_seen = facts_of(begin(command, UNBROKEN_PREIMPORT=""))
    assert forked == own
    assert seen[1] == str(agent.process.pid)
    assert (seen[5], own_seen[5]) == ("True", "False")


def test_forked_worker_ends_as_the_interpreter_would(begin: Begin, tmp_path: Path) -> None:
    """Codes, last words, and the order of what runs at the end."""
    command = [sys.executable, write_script(tmp_path, ENDS)]
    said = []
    for imports in ("decimal", ""):
        agent = begin(command, UNBROKEN_PREIMPORT=imports)
        ends: list[object] = []
        for incarnation, ending in enumerate(("thread", "raise", "string", "code", "interrupt", "hook")):
            agent.spawn(incarnation, UNBROKEN_HOW=ending)
            state = agent.wait_exit(0, incarnation)
            ends.append((state.exit_code, state.error))
        agent.say(Shutdown(0, 0.0, "done"))
        agent.process.wait()
        said.append((ends, agent.text()))
    assert said[0] == said[1]
    codes_and_words = [(0, ""), (1, "ValueError: no data"), (1, "wrong"), (7, ""), (-signal.SIGINT, ""), (1, "")]
    assert said[0][0] == codes_and_words


def test_forked_workers_are_ended_and_started_again_like_others(begin: Begin, tmp_path: Path) -> None:
    """4.23, 4.27"""
    agent = begin([sys.executable, write_script(tmp_path, ENDS)], 2, **IMPORTS)
    agent.spawn(0, 0, 1, UNBROKEN_HOW="wait")
    first = agent.wait_for(lambda said: all(state.pid for state in said.processes))
    agent.wait_until(lambda: agent.text().count("waits") == 2, "both workers")
    os.kill(first.processes[1].pid, signal.SIGKILL)
    assert agent.wait_exit(1, 0).exit_code == -signal.SIGKILL
    agent.say(End(0, 0, 30.0))
    assert agent.wait_exit(0, 0).exit_code == -signal.SIGTERM
    agent.spawn(1, 1, UNBROKEN_HOW="code")
    assert agent.wait_exit(1, 1).exit_code == 7
    assert "without" not in agent.text()


def test_killed_launcher_takes_fork_server_and_forked_workers_along(begin: Begin, tmp_path: Path) -> None:
    agent = begin([sys.executable, write_script(tmp_path, ENDS)], **IMPORTS)
    agent.spawn(UNBROKEN_HOW="wait")
    agent.wait_output("waits")
    pids = [child.pid for child in psutil.Process(agent.process.pid).children()]
    assert len(pids) == 2
    agent.process.kill()
    agent.process.wait()
    agent.wait_until(lambda: all(is_gone(pid) for pid in pids), "the end of all")


def test_worker_is_started_by_itself_while_the_fork_server_is_away(begin: Begin, tmp_path: Path) -> None:
    agent = begin([sys.executable, write_script(tmp_path, ENDS)], **IMPORTS)
    agent.spawn(0, UNBROKEN_HOW="code")
    assert agent.wait_exit(0, 0).exit_code == 7
    (server,) = servers(agent)
    server.kill()
    agent.wait_output("fork server has ended; workers are started without it")
    agent.spawn(1, UNBROKEN_HOW="code")
    assert agent.wait_exit(0, 1).exit_code == 7
    agent.wait_until(lambda: len(servers(agent)) == 1, "another fork server")
    agent.spawn(2, UNBROKEN_HOW="code")
    assert agent.wait_exit(0, 2).exit_code == 7
    assert agent.text().count("fork server") == 1


def test_fork_server_that_has_ended_is_followed_by_another_as_soon_as_it_is_reaped(tmp_path: Path) -> None:
    """Its socket is closed a moment before it can be reaped; a worker that is to start between them is the last one."""
    command = parse_command([sys.executable, write_script(tmp_path, ENDS)])
    assert command is not None
    forking = Forking(command, ("decimal",), os.environ, lambda: None, lambda _reason: None)
    others = set(psutil.Process().children())

    def own() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in others]

    try:
        forking.start_server(0.0)
        (first,) = own()
        first.kill()
        # Seen, and not reaped: what it is while a worker is to start.
        wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE, "the end of the fork server")
        while forking.descriptors:
            # It may have been quick enough to say that it was ready.
            forking.advance(1.0)
        assert not forking.ask(0, os.environ, 1.0)
        forking.advance(1.0)
        assert own() == [first]
        assert forking.note_end(first.pid)
        os.waitpid(first.pid, 0)
        forking.advance(2.0)
        (second,) = own()
        assert second != first
    finally:
        forking.close()
        for child in own():
            os.waitpid(child.pid, 0)


def test_fork_server_that_stands_still_is_given_up_and_its_worker_started_once(begin: Begin, tmp_path: Path) -> None:
    agent = begin([sys.executable, write_script(tmp_path, ENDS)], **IMPORTS)
    agent.spawn(0, UNBROKEN_HOW="code")
    agent.wait_exit(0, 0)
    (server,) = servers(agent)
    server.suspend()
    agent.spawn(1, UNBROKEN_HOW="code")
    assert agent.wait_exit(0, 1).exit_code == 7
    agent.wait_until(lambda: is_gone(server.pid), "the end of the fork server")
    agent.say(Shutdown(0, 0.0, "done"))
    agent.process.wait()
    assert agent.text().count("at exit") == 2


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "threads"
        ),
        pytest.param("import socket\nkept = socket.socketpair()\n", "hold socket:"),
        pytest.param("raise OSError('no licence')\n", "import slow_module: OSError: no licence"),
        pytest.param("import os\nos._exit(3)\n", "has ended"),
    ],
)
def test_imports_that_cannot_be_shared_are_told_and_workers_start_by_themselves(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "slow_module.py").write_text(module)
    agent = begin([sys.executable, write_script(tmp_path, ENDS)], UNBROKEN_PREIMPORT="slow_module")
    agent.spawn(UNBROKEN_HOW="code")
    assert agent.wait_exit().exit_code == 7
    agent.wait_output(reason)


def test_worker_that_is_to_have_another_environment_is_started_by_itself(begin: Begin, tmp_path: Path) -> None:
    agent = begin([sys.executable, write_script(tmp_path, "import sys; print('decimal' in sys.modules)")], **IMPORTS)
    agent.spawn(0, OMP_NUM_THREADS="3")
    agent.wait_exit(0, 0)
    agent.spawn(1)
    agent.wait_exit(0, 1)
    agent.wait_output("True")
    assert "[digits-0/0] False\n[digits-0/0] True\n" in agent.text()
    agent.wait_output("has another OMP_NUM_THREADS than the worker")


def test_process_after_a_crash_is_not_forked(begin: Begin, tmp_path: Path) -> None:
    code = "import os, sys; print('forked', 'decimal' in sys.modules, flush=True); os.kill(os.getpid(), 6)"
    agent = begin([sys.executable, write_script(tmp_path, code)], **IMPORTS)
    for incarnation in range(3):
        agent.spawn(incarnation)
        assert agent.wait_exit(0, incarnation).exit_code == -signal.SIGABRT
    agent.wait_until(lambda: agent.text().count("forked") == 3, "three starts")
    assert [line.split()[-1] for line in agent.text().splitlines()] == ["True", "False", "True"]
