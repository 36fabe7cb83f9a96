"""The probe that asks a node's health daemon: real processes, grpcio's own server, a real Unix socket."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.sidecar.probes.daemon import Daemon, response

LIMIT_S = 100.0
"""For a whole probe on a busy machine; its own limit is given where it counts."""
PROBE = [sys.executable, "-m", "unbroken.probes.node_daemon"]
WAIT = ["--timeout", "60"]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    started = Daemon()
    yield started
    started.close()


def ask(endpoint: str, *more: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Return exit code and line of a probe."""
    done = subprocess.run(
        [*PROBE, "--endpoint", endpoint, *more],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
    )
    line = done.stdout.decode()
    assert line.endswith("\n")
    assert line[:-1].isprintable(), line
    assert len(line) <= 201
    return done.returncode, line[:-1]


def test_the_exit_code_is_what_the_daemon_says(daemon: Daemon) -> None:
    endpoint = daemon.start(hex=response(True, 0, '{"fail_count": 0}'))
    assert ask(endpoint, *WAIT) == (0, "the daemon's check passed: exit code 0, fail_count 0")
    assert ask(f"unix://{endpoint}", *WAIT, "--", "--level", "2") == (
        0,
        "the daemon's check passed: exit code 0, fail_count 0",
    )
    assert daemon.requests == [b"", b"\n\x07--level\n\x012"]
    daemon.answer(hex=response(False, 3, '{"fail_count": 2, "error": "\\u001b[31mGPU 5\\u0007 is lost"}'))
    assert ask(endpoint, *WAIT) == (
        1,
        "the daemon's check failed: exit code 3, fail_count 2: \\x1b[31mGPU 5\\x07 is lost",
    )
    daemon.answer(hex=response(True, 0, '{"fail_count": 1, "error": "NIC"}'))
    assert ask(endpoint, *WAIT) == (1, "the daemon's check failed: exit code 0, fail_count 1: NIC")
    daemon.answer(hex=response(True, 0, "{garbage"))
    assert ask(endpoint, *WAIT) == (0, "the daemon's check passed: exit code 0, its output is no JSON")
    # What ASCII has no letter for is said all the same.
    daemon.answer(hex=response(False, 1, '{"error": "Lüfter \\ud800"}'))
    code, line = ask(endpoint, *WAIT, environment={"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"})
    assert (code, line) == (1, "the daemon's check failed: exit code 1: Lüfter \\ud800")


def test_what_is_no_answer_is_unknown(daemon: Daemon) -> None:
    endpoint = daemon.start(hex="1a05")
    assert ask(endpoint, *WAIT) == (2, "the daemon's answer ends in field 3: want 5 bytes, got 0")
    daemon.answer(hex=response(True, 0, b"x" * (1 << 20)))
    code, line = ask(endpoint, *WAIT)
    assert (code, "RESOURCE_EXHAUSTED" in line) == (2, True), line
    daemon.answer(status="INTERNAL", details="\x1b[2J" + "of its own " * 100)
    code, line = ask(endpoint, *WAIT)
    assert (code, line[: line.index(": INTERNAL: ") + 19]) == (2, f"no answer of {endpoint}: INTERNAL: \\x1b[2J")
    daemon.answer(hang=True)
    code, line = ask(endpoint, "--timeout", "1")
    assert (code, line.startswith(f"no answer of {endpoint}: DEADLINE_EXCEEDED (--timeout 1): ")) == (2, True), line
    daemon.answer()
    assert ask(endpoint, *WAIT) == (2, f"no answer of {endpoint}: it ended the call without one")
    daemon.kill()
    assert ask(endpoint, *WAIT) == (2, f"no answer of {endpoint}: UNAVAILABLE: Connection refused")


def test_a_daemon_without_this_service_is_unknown(daemon: Daemon) -> None:
    endpoint = daemon.start(service="other.Service")
    code, line = ask(endpoint, *WAIT)
    assert (code, line.startswith(f"{endpoint} answers, but does not know /nvhcd.")) == (2, True), line


def test_a_server_that_accepts_and_never_speaks_is_unknown(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon.socket))
        listener.listen()
        code, line = ask(str(daemon.socket), "--timeout", "1")
        assert (code, line.startswith(f"no answer of {daemon.socket}: DEADLINE_EXCEEDED")) == (2, True), line


def test_no_daemon_is_unknown(daemon: Daemon) -> None:
    assert ask("/nonexistent/nvhcd.sock") == (
        2,
        "no daemon: /nonexistent/nvhcd.sock: No such file or directory: is it mounted into this container?",
    )
    daemon.socket.write_text("")
    assert ask(str(daemon.socket)) == (2, f"no daemon: {daemon.socket}: want a Unix socket, got another kind of file")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        pytest.param(
            "raise ImportError('no module of this name')", "gRPC cannot be imported (pip install grpcio): no mo"
        ),
        # Python would end with 1, as if the node were broken.
        pytest.param(
            "raise TypeError('of another\\nPython')", "the daemon could not be asked: TypeError('of another\\"
        ),
    ],
)
def test_no_usable_grpcio_is_unknown(daemon: Daemon, tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / "grpc.py").write_text(code)
    paths = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon.socket))
        seen = ask(str(daemon.socket), environment={"PYTHONPATH": paths})
    assert (seen[0], seen[1][: len(text)]) == (2, text)


def test_what_nobody_can_read_says_nothing_of_the_node() -> None:
    """Python would end with 1."""
    command = [*PROBE, "--endpoint", "/nonexistent/nvhcd.sock"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "no daemon: /nonexistent/nvhcd.sock: No such file or directory: is it mounted into this container?: "
        "cannot be said: [Errno 28] No space left on device\n",
    )


def test_why_nothing_can_connect_is_said_whatever_the_path(daemon: Daemon) -> None:
    """gRPC names the path twice before it says why, which a line has no room for."""
    path = f"{daemon.folder}/{'x' * (100 - len(str(daemon.folder)))}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        assert ask(path, *WAIT) == (2, f"no answer of {path}: UNAVAILABLE: Protocol wrong type for socket")


def test_only_what_is_asked_needs_grpcio(tmp_path: Path) -> None:
    """In an image without any package the probe says so, and imports nothing but ours."""
    path = Path(tempfile.mkdtemp(prefix="ubt-", dir="/tmp")) / "a"
    root = Path(__file__).parents[4]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        done = subprocess.run(
            [sys.executable, "-S", *PROBE[1:], "--endpoint", str(path)],
            env={"PYTHONPATH": f"{root / 'sidecar'}{os.pathsep}{root / 'core'}"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    shutil.rmtree(path.parent)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "gRPC cannot be imported (pip install grpcio): No module named 'grpc'\n",
        "",
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        pytest.param(["--endpoint", "localhost:50051"], "--endpoint: want the absolute path of a Unix socket"),
        pytest.param(["--endpoint", "/x", "--timeout", "0"], "--timeout: want 0.1 to 60 seconds, got 0"),
        pytest.param(["--endpoint", "/x", "--timeout", "nan"], "--timeout: want 0.1 to 60 seconds, got nan"),
        pytest.param(["--endpoint", "/x", "--timeout", "soon"], "argument --timeout: invalid float value: 'soon'"),
        pytest.param(["--end", "/x"], "the following arguments are required: --endpoint"),
        pytest.param(["--endpoint", "/x", "--deep"], "unrecognized arguments: --deep"),
    ],
)
def test_wrong_options_are_unknown_and_said_where_the_watch_reads(words: list[str], text: str) -> None:
    done = subprocess.run([*PROBE, *words], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout[: len(text)]) == (2, text)
