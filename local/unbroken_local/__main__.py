"""`unbroken local`: a Kubernetes on this machine whose pods are processes.

unbroken local up --nodes FILE      start it; prints the KUBECONFIG to export
unbroken local status               what runs
unbroken local node fail NAME       a node dies: its processes are killed, its lease is not renewed
unbroken local node silence NAME    its kubelet falls silent: its processes run on, its lease is not renewed
unbroken local node recover NAME    it comes back
unbroken local down                 end it, and every process of its pods
"""

import argparse
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from unbroken_core.conventions.console import run_command
from unbroken_core.vocabulary.errors import InputError
from unbroken_local.control import SOCKET_NAME, ask
from unbroken_local.daemon import LOCK_NAME, take_lock
from unbroken_local.inventory import read_inventory
from unbroken_local.kube.kubeconfig import read_kubeconfig
from unbroken_local.kubelet.folders import short_name

DEFAULT_DIRECTORY = Path(".local-cluster")
UP_LIMIT_S = 120.0
DOWN_LIMIT_S = 20.0
KILL_LIMIT_S = 30.0


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for what failed, 2 for what cannot be meant."""
    arguments = _parser().parse_args(argv)
    if sys.platform != "linux":
        print(
            f"unbroken local: want Linux (pods have addresses in 127.0.0.0/8 and end with PR_SET_CHILD_SUBREAPER), "
            f"got {sys.platform}; use any other Kubernetes there",
            file=sys.stderr,
        )
        return 2
    try:
        return int(arguments.run(arguments))
    except InputError as error:
        print(f"unbroken local: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unbroken local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="the cluster's folder (%(default)s)")
        command.set_defaults(run=run)
        return command

    up = add("up", _up, "start a cluster in the background")
    up.add_argument("--nodes", type=Path, required=True, metavar="FILE", help="YAML list of nodes, see examples")
    up.add_argument("--kubeconfig-out", type=Path, metavar="FILE", help="write the kubeconfig here, too")
    up.add_argument(
        "--api-server", type=Path, metavar="KUBECONFIG", help="use this control plane instead of our own API server"
    )
    up.add_argument(
        "--control-loops",
        choices=("auto", "on", "off"),
        default="auto",
        help="run our scheduler and node lifecycle; auto: where the control plane has none (%(default)s)",
    )
    up.add_argument(
        "--node-grace", type=_seconds, default=8.0, metavar="SECONDS", help="silence that makes a node unreachable"
    )
    up.add_argument(
        "--back-off", type=_seconds, default=1.0, metavar="SECONDS", help="first pause of a crash loop (%(default)s)"
    )
    add("down", _down, "end the cluster and every process of its pods")
    add("status", _status, "say what runs")
    node = commands.add_parser("node", help="make a node fail, fall silent or recover")
    node.add_argument("action", choices=("fail", "silence", "recover"))
    node.add_argument("name")
    node.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="the cluster's folder (%(default)s)")
    node.set_defaults(run=_node)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"want more than 0 seconds, got {text}")
    return value


def _up(arguments: argparse.Namespace) -> int:
    read_inventory(arguments.nodes)  # Bad input is refused before anything is started.
    if arguments.api_server is not None:
        read_kubeconfig(arguments.api_server)
    directory = arguments.dir.resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--dir: want a folder that can be made, got {directory}: {error.strerror}") from error
    if is_running(directory):
        print(
            f"unbroken local: a cluster runs in {directory} already; end it: {_down_command(directory)}",
            file=sys.stderr,
        )
        return 1
    failure = _start_daemon(arguments, directory)
    if failure:
        print(f"unbroken local: {failure}", file=sys.stderr)
        return 1
    kubeconfig = directory / "kubeconfig"
    if arguments.kubeconfig_out is not None:
        arguments.kubeconfig_out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kubeconfig, arguments.kubeconfig_out)
        arguments.kubeconfig_out.chmod(0o600)
        kubeconfig = arguments.kubeconfig_out.resolve()
    print(f"end it: {_down_command(directory)}", file=sys.stderr)
    print(f"export KUBECONFIG={shlex.quote(str(kubeconfig))}")
    return 0


def _down_command(directory: Path) -> str:
    return f"unbroken local down --dir {shlex.quote(str(directory))}"


def _start_daemon(arguments: argparse.Namespace, directory: Path) -> str:
    """Start the background process and wait until it is ready; return why it is not, or an empty string."""
    log_path = directory / "cluster.log"
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "unbroken_local.daemon", "--nodes", str(arguments.nodes.resolve())]
    command += ["--dir", str(directory), "--report", str(writer), "--control-loops", arguments.control_loops]
    command += ["--node-grace", str(arguments.node_grace), "--back-off", str(arguments.back_off)]
    if arguments.api_server is not None:
        command += ["--api-server", str(arguments.api_server.resolve())]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writer],
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    os.close(writer)
    outcome = _follow(reader, time.monotonic() + UP_LIMIT_S)
    if outcome == "ready":
        return ""
    process.terminate()
    try:
        process.wait(DOWN_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return (
        outcome or f"the cluster did not start; the end of {log_path}:\n{log_path.read_text(errors='replace')[-2000:]}"
    )


def _follow(reader: int, deadline_s: float) -> str:
    """Print what the background process says; return "ready", its error, or "" when it ended without a word."""
    data = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while (left := deadline_s - time.monotonic()) > 0:
            if not select.select([pipe], [], [], left)[0]:
                break
            block = pipe.read(65536)
            if not block:
                return ""
            *lines, data = (data + block).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "say" in message:
                    print(message["say"], file=sys.stderr, flush=True)
                elif "error" in message:
                    return str(message["error"])
                else:
                    return "ready"
    return f"want the cluster to be ready within {UP_LIMIT_S:g} s, got no answer"


def is_running(directory: Path) -> bool:
    """Return whether any process of a cluster in this folder is left."""
    if not (directory / LOCK_NAME).exists():
        return False
    lock = take_lock(directory)
    if lock is None:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    return False


def _down(arguments: argparse.Namespace) -> int:
    directory = arguments.dir.resolve()
    if not is_running(directory):
        _clean(directory)
        print(f"no cluster runs in {directory}", file=sys.stderr)
        return 0
    try:
        ask(short_name(directory), "POST", "/shutdown")
    except OSError:
        _signal_daemon(directory, signal.SIGTERM)
    if not _wait_until_gone(directory, DOWN_LIMIT_S):
        _signal_daemon(directory, signal.SIGKILL)
        if not _wait_until_gone(directory, KILL_LIMIT_S):
            print(f"unbroken local: processes of {directory} do not end", file=sys.stderr)
            return 1
    _clean(directory)
    print("the cluster has ended", file=sys.stderr)
    return 0


def _clean(directory: Path) -> None:
    """Remove what a cluster that was killed could not remove; logs and claims stay."""
    short = short_name(directory)
    if short.is_symlink():
        short.unlink()
    for name in ("kubeconfig", SOCKET_NAME):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / "v", ignore_errors=True)


def _signal_daemon(directory: Path, signum: int) -> None:
    text = (directory / LOCK_NAME).read_text(encoding="ascii", errors="replace").strip()
    command_line = Path(f"/proc/{text}/cmdline")
    try:
        # The lock may outlive the daemon by its last process, and its pid be somebody else's.
        if text.isdigit() and b"unbroken_local.daemon" in command_line.read_bytes():
            os.kill(int(text), signum)
    except OSError:
        pass


def _wait_until_gone(directory: Path, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while is_running(directory):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _ask(arguments: argparse.Namespace, method: str, path: str) -> dict[str, object]:
    directory = arguments.dir.resolve()
    try:
        return ask(short_name(directory), method, path)
    except OSError as error:
        raise InputError(f"--dir: want the folder of a running cluster, got {directory} ({error})") from error


def _status(arguments: argparse.Namespace) -> int:
    answer = _ask(arguments, "GET", "/status")
    print(f"API server  {answer['server']}")
    print(f"kubeconfig  {answer['kubeconfig']}")
    nodes = answer["nodes"]
    if isinstance(nodes, list):
        width = max(len(node["name"]) for node in nodes)
        for node in nodes:
            print(f"{node['name']:{width}}  {_how_is(node):6}  {' '.join(node['pods'])}".rstrip())
    return 0


def _node(arguments: argparse.Namespace) -> int:
    answer = _ask(arguments, "POST", f"/nodes/{arguments.name}/{arguments.action}")
    print(f"{answer['name']} is {_how_is(answer)}", file=sys.stderr)
    return 0


def _how_is(node: Mapping[str, object]) -> str:
    return "down" if node["isDown"] else "silent" if node["isSilent"] else "up"


if __name__ == "__main__":
    sys.exit(run_command(main))
