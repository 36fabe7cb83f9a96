"""What the documents tell a reader to type works: on a cluster on this machine, made by their own commands."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.integration.cli import kubectl_standin
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_until

from unbroken_local.demo.processes import read_processes
from unbroken_local.demo.tools import BIN

from .documented_commands import ROOT, commands, pages

START_LIMIT_S = 3 * LIMIT_S
"""Three processes import torch at once, on a machine that may be busy and has not read torch yet."""
pytestmark = pytest.mark.timeout(400 + START_LIMIT_S)

NOT_HERE = {
    r"make( |$)": "make runs this test",
    r"for image in ": "needs buildah and a registry; tests/unit/house/test_images.py checks the names",
    r"helm ": "needs helm: `make chart-test` installs, upgrades and tests the chart",
    r"pip install ": "needs a package index: `make setup` installs the same extras",
    r"kubectl get prometheus": "needs the Prometheus Operator",
    r"chrt ": "a benchmark, and the right to real-time priority",
    r"torchrun .*--rdzv-backend": "needs several hosts: tests/integration/torchrun runs it on one",
    r"torchrun --nproc|srun |RANK=0 ": "needs hosts: tests/integration/inprocess/test_standalone.py has one",
    r"unbroken run ": "tests/e2e/test_e2e_run.py runs it, with faults",
    r"unbroken compare ": "tests/integration/compare runs it",
    r"unbroken inject ": "needs pods/exec, which the local cluster lacks: tests/integration/cli/test_inject_script.py",
    r"unbroken page ": "needs pods/portforward, which the local cluster lacks: tests/integration/cli/test_live_page.py",
}
"""Commands that cannot run here, as regular expressions at their beginning, each with the reason."""

BEFORE = (
    "unbroken local up --nodes examples/nodes-10.yaml",
    "kubectl apply -f crds/",
    "kubectl wait --for=condition=Established crd/resilienttrainingjobs.unbroken.dev",
    "python -m unbroken_operator --all-namespaces --lease default/unbroken-operator &",
    "kubectl apply -f examples/digits.yaml",
)
AFTER = (
    "kubectl delete pod POD",
    "kubectl delete node NODE",
    "unbroken local node fail node-a1",
    """kubectl patch rtj NAME --type merge -p '{"spec":{"suspend":true}}'""",
    "unbroken local down",
)
FIRST_PAGE = "docs/quickstart.md"
"""It makes the fault that other pages look at."""

NEW_NODE = "node-new"
RELEASE = "release"
PLACES = {"NAMESPACE": "default", "NODE": NEW_NODE, "RELEASE": RELEASE}
WORDS = {"NAME": "digits", "JOB": "digits", "POD": "digits-0", **PLACES}
SMALLER = {
    "replicas: 4": "replicas: 2",
    "count: 2": "count: 1",
    "ranksPerPod: 2": "ranksPerPod: 1",
    "--steps=600": "--steps=1000000",
}
ENDLESS = re.compile(r"--watch$|kubectl logs -f |unbroken\.rounds ")
FORWARD = re.compile(r"kubectl .*port-forward service/(\S+) (\d+) &$")
CURL_HUNG_UP = 35
"""Exit code of curl when the other end closes the connection before TLS stands."""
KUBECTL_HUNG_UP = "Unable to connect to the server: net/http: TLS handshake timeout"
"""What kubectl says when TLS does not stand after 10 s: the server got no CPU."""


def is_elsewhere(command: str) -> bool:
    """Whether a command cannot run here."""
    return any(re.match(pattern, command) for pattern in NOT_HERE)


def plan() -> list[str]:
    """Return the commands to run, in order."""
    order = sorted(pages(), key=lambda page: (page != FIRST_PAGE, page))
    shown = [command for page in order for command in commands(page)]
    assert [command for command in (*BEFORE, *AFTER) if command not in shown] == []
    middle = [command for command in shown if command not in (*BEFORE, *AFTER) and not is_elsewhere(command)]
    return [*BEFORE, *middle, *AFTER]


class Reader:
    """Types commands in a copy of the examples, with a job that fits on two cores and does not end by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._background: list[subprocess.Popen[str]] = []
        self._ports: dict[str, int] = {}
        path = f"{BIN}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "KUBECONFIG": str(folder / ".local-cluster" / "kubeconfig")}
        shutil.copytree(ROOT / "examples", folder / "examples")
        (folder / "crds").symlink_to(ROOT / "crds")
        (folder / "state").mkdir()
        self._change("digits.yaml", SMALLER)
        with (folder / "examples" / "nodes-10.yaml").open("a") as nodes:
            nodes.write(f"- name: {NEW_NODE}\n")

    def type(self, command: str) -> str:
        """Run a command as it is shown, but for its placeholders; return its output. Fails when the command does."""
        text = self._fill(command)
        if forward := FORWARD.match(text):
            self._forward(forward[1], forward[2])
        elif command.endswith(" &"):
            with (self._folder / "background.log").open("a") as log:
                self._start(text.removesuffix("&"), log)
        elif ENDLESS.search(command):
            return self._first_line(self._start(text))
        else:
            return self._run(text)
        return ""

    def restart_rendezvous(self) -> None:
        """Kill the rendezvous, whose container is started again; a Deployment named as a release finds it, too."""
        is_rendezvous = "unbroken.dev/job=digits,unbroken.dev/component=rendezvous"
        look = f"kubectl get pods -l {is_rendezvous} -o jsonpath="
        uid = self._run(f"{look}'{{.items[0].metadata.uid}}'")
        count = f"{look}'{{.items[0].status.containerStatuses[0].restartCount}}'"
        before = int(self._run(count))
        pids = [pid for pid, found in read_processes().items() if found.environment.get("UNBROKEN_POD_UID") == uid]
        assert pids, f"no process of pod {uid}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: int(self._run(count)) > before,
            "a rendezvous whose container was started again",
            describe=lambda: self._run(f"kubectl get pods -l {is_rendezvous} -o yaml; kubectl get events"),
        )
        container = {"name": "operator", "image": "unbroken/operator:0.1.0"}
        labels = {"unbroken.dev/job": "digits", "unbroken.dev/component": "rendezvous"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        spec = {"selector": {"matchLabels": labels}, "template": template}
        release = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": RELEASE}, "spec": spec}
        (self._folder / "release.json").write_text(json.dumps(release))
        self._run("kubectl apply -f release.json")

    def end(self) -> None:
        """End what runs in the background, and the cluster."""
        for process in self._background:
            self._kill(process)
        self._run("unbroken local down")

    def _run(self, text: str) -> str:
        done = wait_until(lambda: self._run_once(text), f"a connection that lasts: {text}")
        assert done.returncode == 0, f"{text}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run_once(self, text: str) -> subprocess.CompletedProcess[str] | None:
        """Return None where whom it asked hung up: it has just been started, or is busy, and a person asks again."""
        done = subprocess.run(
            ["bash", "-c", text],
            check=False,
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        has_hung_up = done.returncode == CURL_HUNG_UP if text.startswith("curl ") else KUBECTL_HUNG_UP in done.stderr
        return None if has_hung_up else done

    def _change(self, name: str, changes: dict[str, str]) -> None:
        path = self._folder / "examples" / name
        text = path.read_text()
        for old, new in changes.items():
            assert old in text, f"examples/{name}: want {old!r} in it"
            text = text.replace(old, new)
        path.write_text(text)

    def _fill(self, command: str) -> str:
        text = re.sub(r"\b[A-Z]+\b", lambda word: WORDS.get(word[0], word[0]), command)
        for port, own in self._ports.items():
            text = text.replace(f"localhost:{port}", f"localhost:{own}")
        text = text.replace("HOST:PORT", f"127.0.0.1:{free_port()}")
        return text.replace("--token-file FILE", "--token-file token").replace("--state FILE", "--state state/rounds")

    def _start(self, text: str, output: int | IO[str] = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"],
            cwd=self._folder,
            env={**self._env, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._background.append(process)
        return process

    def _kill(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def _first_line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        self._background.remove(process)
        self._kill(process)
        assert line, f"{process.args!r}: want a line of output, got exit code {process.returncode}"
        return line

    def _forward(self, service: str, port: str) -> None:
        """Put our relay in the place of `kubectl port-forward`, which the local cluster does not serve."""
        address = self._run(f"kubectl get service {service} -o jsonpath='{{.spec.clusterIP}}'")
        relay = f"{sys.executable} {kubectl_standin.__file__}"
        asked = str(self._folder / "asked")
        process = self._start(relay, STANDIN_TARGET=f"{address}:{port}", STANDIN_ASKED=asked)
        assert process.stdout is not None
        match = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert match
        self._ports[port] = int(match[1])


@pytest.fixture
def reader() -> Iterator[Reader]:
    # Not pytest's folder: Unix sockets of the pods lie below it, and their paths are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ub-"))
    reader = Reader(folder)
    try:
        yield reader
    finally:
        reader.end()
        shutil.rmtree(folder, ignore_errors=True)


def before(reader: Reader) -> dict[str, Callable[[], None]]:
    """Return what happens at night before a reader types a command; it is done once for each."""
    flapping = (
        "kubectl logs -n NAMESPACE -l unbroken.dev/job=JOB,unbroken.dev/component=rendezvous --previous --tail=50"
    )
    down = "kubectl logs -n NAMESPACE deployment/RELEASE --previous --tail=50"
    first = next(command for command in plan() if command in (flapping, down))
    return {first: reader.restart_rendezvous}


def waits(reader: Reader) -> dict[str, Callable[[], object]]:
    """Return what a reader sees before they type on, by the command."""

    def status(field: str) -> str:
        return reader.type(f"kubectl get rtj digits -o jsonpath='{{.status.{field}}}'")

    def trains() -> bool:
        return status("state") == "Running" and status("ranks.spare") == "1"

    return {
        "kubectl apply -f examples/digits.yaml": lambda: wait_until(
            trains,
            "a job that trains, with a ready spare",
            START_LIMIT_S,
            lambda: reader.type("unbroken status digits"),
        ),
        "kubectl delete pod digits-1": lambda: wait_until(lambda: status("lastRecovery"), "a recovery"),
    }


@pytest.mark.parametrize("cluster", ["local"])  # By that name conftest.py runs one cluster at a time.
def test_every_command_of_the_documents_works(reader: Reader, cluster: str) -> None:
    first, then = before(reader), waits(reader)
    for command in plan():
        first.get(command, lambda: None)()
        reader.type(command)
        then.get(command, lambda: None)()


def test_commands_that_cannot_run_here_are_shown_somewhere() -> None:
    shown = [command for page in pages() for command in commands(page)]
    assert [pattern for pattern in NOT_HERE if not any(re.match(pattern, command) for command in shown)] == []
    tests = {path for reason in NOT_HERE.values() for path in re.findall(r"tests/[\w/.]+\.py", reason)}
    assert sorted(path for path in tests if not (ROOT / path).is_file()) == []
