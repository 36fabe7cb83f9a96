"""`unbroken local`: up, status, node, down; and what is left when it is killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from unbroken_core.conventions.console import CLOSED_PIPE

from .local_bench import Bench, Space, container, is_alive, is_ready, sh, unbroken_local

NODE = "- {name: n1}\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ub-test-"))
    try:
        yield path
    finally:
        unbroken_local("down", "--dir", str(path / "d"))
        shutil.rmtree(path)


def up(folder: Path, *options: str) -> str:
    (folder / "nodes.yaml").write_text(NODE)
    done = unbroken_local("up", "--nodes", str(folder / "nodes.yaml"), "--dir", str(folder / "d"), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_pod(folder: Path) -> tuple[Bench, list[int]]:
    bench = Bench("builtin", folder / "d")
    bench.connect()
    space = Space(bench, "default", folder)
    space.run("p", sh("trap '' TERM; setsid sleep 600 & echo $! > /shared/child; echo $$$$ > /shared/main; sleep 600"))
    return bench, [int(space.wait_file(name)) for name in ("main", "child")]


def test_up_prints_a_kubeconfig_to_export_and_down_ends_every_process(folder: Path) -> None:
    out = folder / "sub" / "config"
    assert up(folder, "--kubeconfig-out", str(out)).strip() == f"export KUBECONFIG={out}"
    assert out.stat().st_mode & 0o077 == 0
    bench, pids = run_pod(folder)
    bench.close()
    daemon = int((folder / "d" / "lock").read_text())
    status = unbroken_local("status", "--dir", str(folder / "d"))
    assert status.returncode == 0
    assert re.search(r"^n1 +up +p$", status.stdout, re.MULTILINE)
    # As in `unbroken local status | head -1`, whose reader may be gone before anything is written.
    command = [sys.executable, "-m", "unbroken_local", "status", "--dir", str(folder / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as unread:
        assert unread.stdout is not None
        assert unread.stderr is not None
        unread.stdout.close()
        assert unread.stderr.read() == ""
    assert unread.returncode == CLOSED_PIPE
    again = unbroken_local("up", "--nodes", str(folder / "nodes.yaml"), "--dir", str(folder / "d"))
    assert again.returncode == 1
    assert "already" in again.stderr
    assert unbroken_local("down", "--dir", str(folder / "d")).returncode == 0
    assert [pid for pid in pids if is_alive(pid)] == []
    # It gives the lock up, which `down` waits for, a moment before it is gone.
    wait_until(lambda: not is_alive(daemon), "the background process is gone")
    assert not (folder / "d" / "kubeconfig").exists()
    second = unbroken_local("down", "--dir", str(folder / "d"))
    assert (second.returncode, "no cluster runs" in second.stderr) == (0, True)
    assert unbroken_local("status", "--dir", str(folder / "d")).returncode == 2


def test_a_killed_cluster_leaves_no_process_behind_and_can_be_started_again(folder: Path) -> None:
    up(folder)
    bench, pids = run_pod(folder)
    bench.close()
    os.kill(int((folder / "d" / "lock").read_text()), signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the pod's processes are gone")
    wait_until(lambda: "no cluster runs" in unbroken_local("down", "--dir", str(folder / "d")).stderr, "all is gone")
    up(folder)


def test_killing_what_starts_the_processes_ends_them_and_the_pod_is_started_again(folder: Path) -> None:
    up(folder)
    bench, pids = run_pod(folder)
    daemon = int((folder / "d" / "lock").read_text())
    os.kill(_ancestor_below(daemon, pids[0]), signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "its processes are gone")
    space = Space(bench, "default", folder)
    space.wait("p", lambda s: container(s).get("restartCount", 0) >= 1 and is_ready(s), "the pod runs again")
    bench.close()


def _ancestor_below(top: int, pid: int) -> int:
    """Return the child of `top` that `pid` descends from."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid if parent == top else _ancestor_below(top, parent)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- {name: N1}", "nodes[0].name: want a DNS name"),
        ("- {name: a, taints: [{key: k, effect: Never}]}", "nodes[0].taints[0].effect: want one of"),
        ("{", "want YAML"),
        (None, "want a readable file"),
    ],
)
def test_a_bad_nodes_file_is_refused_before_anything_starts(folder: Path, content: str | None, message: str) -> None:
    file = folder / "bad.yaml"
    if content is not None:
        file.write_text(content)
    done = unbroken_local("up", "--nodes", str(file), "--dir", str(folder / "d"))
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert not (folder / "d").exists()


def test_a_control_plane_that_does_not_answer_is_named(folder: Path) -> None:
    config = folder / "kubeconfig"
    config.write_text(
        "{current-context: c, contexts: [{name: c, context: {cluster: c}}], "
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]}"
    )
    (folder / "nodes.yaml").write_text(NODE)
    words = ["--control-loops", "off", "--api-server", str(config)]
    done = unbroken_local("up", "--nodes", str(folder / "nodes.yaml"), "--dir", str(folder / "d"), *words)
    assert done.returncode == 1
    assert "GET /api/v1" in done.stderr


def test_an_unknown_node_is_refused_with_the_names_that_there_are(folder: Path) -> None:
    up(folder)
    done = unbroken_local("node", "fail", "n7", "--dir", str(folder / "d"))
    assert (done.returncode, done.stderr) == (2, "unbroken local: node: want one of n1, got 'n7'\n")
