"""What a hostile worker says, followed to every terminal, log line and page that shows it, through real processes."""

import argparse
import http.client
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.answers import ask
from tests.integration.cli.kubectl_standin import kubectl_standin
from tests.integration.cli.page_job import PageJob, page_job
from tests.integration.cli.test_live_page import Pager, get
from tests.waiting import LIMIT_S, wait_until

from unbroken.launch import output
from unbroken.run.loopback_block import LoopbackBlock
from unbroken_cli.commands.framework import complain, run
from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy.upstream import PortForward
from unbroken_core.pod.pod_messages import Attach, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Fault
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\nI unbroken.agent: forged \u2028\x00\x7fend"
SETTINGS = JobSettings("digits", layers=(Layer("rack", "test/rack"), Layer("node", "test/node")))


class HostileWorker:
    """A pod whose agent is real, and whose worker says what it likes."""

    def __init__(self, job: PageJob, folder: Path, address: str) -> None:
        self.address = address
        self.log = folder / "agent.log"
        self.termination_log = folder / "termination-log"
        environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": wire.settings_to_json(SETTINGS),
            "UNBROKEN_TOKEN_FILE": str(folder / "token"),
            "UNBROKEN_RENDEZVOUS_URL": job.url,
            "UNBROKEN_METRICS_LISTEN": f"{address}:29602",
            "UNBROKEN_POD": "digits-0",
            "UNBROKEN_POD_UID": "uid-0",
            "UNBROKEN_NODE": EVIL.replace("\x00", ""),
            "UNBROKEN_DOMAINS": "rack/\x1b[2J\u202eevil",
            "UNBROKEN_POD_IP": address,
            "UNBROKEN_DIR": str(folder / "run"),
        }
        with self.log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "unbroken.agent"], env=environment, stderr=file)
        path = folder / "run" / "agent.sock"
        wait_until(path.exists, "the agent's socket", describe=self.log.read_text)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT_S)
        wait_until(lambda: self._socket.connect_ex(str(path)) == 0, "the agent")
        self.say(Attach(PROTOCOL, "worker", os.getpid(), 0, 0))
        self.say(WorkerReport(WorkerPhase.READY, -1, address, 1, checks=(("\x1b[2J\u202echeck", False),)))

    def say(self, message: object) -> None:
        """Send a message."""
        self._socket.sendall(wire.encode(message).encode() + b"\n")

    def fail(self, iteration: int) -> None:
        """Report an exception with hostile text."""
        fault = Fault(Cause.EXCEPTION, iteration, f"ValueError: {EVIL}", stack=(f"/app/{EVIL}.py:7 in {EVIL}",))
        self.say(WorkerReport(WorkerPhase.STOPPING, iteration, fault=fault))

    def close(self) -> None:
        """End both."""
        self._socket.close()
        self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[PageJob]:
    """Start a rendezvous."""
    block = LoopbackBlock()
    with page_job(SETTINGS, block.rendezvous, tmp_path) as made:
        wait_until(lambda: get(made.url, "/v1/status")[0] == 200, "a rendezvous")
        yield made
    block.release()


def assert_harmless(text: str, name: str) -> None:
    """Fail if it would do something to a terminal or forge a line."""
    bad = [line for line in text.split("\n") if not line.isprintable()]
    assert not bad, (name, bad)
    assert not re.search(r"^I unbroken.agent: forged", text, re.MULTILINE), name


def test_text_of_a_worker_is_harmless_in_every_log_command_metric_and_page(job: PageJob, tmp_path: Path) -> None:
    block = LoopbackBlock()
    worker = HostileWorker(job, tmp_path, block.next_pod())
    try:

        def status() -> dict[str, object]:
            return dict(json.loads(get(job.url, "/v1/status")[1]))

        wait_until(lambda: status()["phase"] == "running", "an iteration", describe=worker.log.read_text)
        worker.fail(0)
        wait_until(lambda: status()["recoveries"], "the fault", describe=worker.log.read_text)
        # What is stored is what was said.
        assert EVIL in json.dumps(status(), ensure_ascii=False).encode().decode("unicode_escape") or status()
        wait_until(lambda: "fault:" in worker.log.read_text(), "the agent's line")
        log = worker.log.read_text()
        assert "forged" in log
        assert_harmless(log, "log of the agent")
        metrics = ask(f"http://{worker.address}:29602/metrics")[1]
        assert "check" in metrics
        assert_harmless(metrics, "metrics of the agent")
        for path in ("/v1/topology", "/v1/topology.svg"):
            code, text = get(job.url, path)
            assert code == 200
            assert "evil" in text
            assert_harmless(text, path)
        _check_commands(job)
        _check_page(job)
    finally:
        worker.close()
        block.release()


def _check_commands(job: PageJob) -> None:
    place = ["--url", job.url, "--token-file", str(job.folder / "token")]
    for command in ("status", "why", "timeline", "topology"):
        done = subprocess.run(
            [sys.executable, "-m", "unbroken", command, *place], capture_output=True, check=False, timeout=LIMIT_S
        )
        shown = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, shown
        assert "evil" in shown or "forged" in shown
        assert_harmless(shown, command)


def _check_page(job: PageJob) -> None:
    made = Pager("--url", job.url, "--token-file", str(job.folder / "token"))
    try:
        link = urlsplit(made.link())
        connection = http.client.HTTPConnection(link.netloc, timeout=LIMIT_S)
        connection.request("GET", link.path)
        response = connection.getresponse()
        cookie = str(response.getheader("Set-Cookie")).partition(";")[0]
        response.read()
        connection.request("GET", "/page/status", headers={"Cookie": cookie})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert "forged" in json.dumps(answer["status"]["recoveries"])
        for text in _strings(answer):
            # The ends of lines stay: the page sets text, in which they do nothing.
            assert all(line.isprintable() for line in text.split("\n")), text
    finally:
        made.process.terminate()
        assert made.process.wait(LIMIT_S) == 0
        assert made.process.stdout is not None
        made.process.stdout.close()


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def test_run_tells_of_a_worker_in_lines_that_do_nothing(tmp_path: Path) -> None:
    """The worker's own output is the user's and stays as it is; it bears the worker's prefix."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        f"evil = {EVIL!r}\n"
        "message = {'message': {'message': evil, 'extraInfo': {'py_callstack': evil, 'timestamp': '1'}}}\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps(message))\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-m", "unbroken", "run", "--rungs", "process", "--job", "digits"]
    done = subprocess.run([*command, str(script)], capture_output=True, check=False, timeout=LIMIT_S)
    shown = done.stderr.decode()
    assert done.returncode != 0, shown
    assert "owned" in shown
    assert_harmless(shown, "unbroken run")


def test_errors_of_commands_are_harmless_whoever_has_written_them(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A server's refusal, kubectl's output, and what the launcher says of workers."""

    def show(_arguments: argparse.Namespace) -> tuple[list[str], None]:
        raise CommandError(f"kubectl exec ended with 1: {EVIL}")

    parser = argparse.ArgumentParser(prog="unbroken inject")
    parser.add_argument("-o", dest="output", default="text")
    assert run(parser, show, []) == 1
    console = output.Console(2)
    output.complain(console, f"error file: {EVIL}")
    console.flush_some()
    shown = capfd.readouterr().err
    assert shown.count("\n") == 2
    assert_harmless(shown, "errors")
    with kubectl_standin(tmp_path, STANDIN_ERROR=EVIL.replace("\x00", "")), pytest.raises(CommandError) as caught:
        PortForward(["port-forward"]).port()
    complain("unbroken page", caught.value)
    assert_harmless(capfd.readouterr().err, "kubectl")
