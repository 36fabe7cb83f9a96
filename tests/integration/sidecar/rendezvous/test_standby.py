"""A rendezvous that stands by, as a process: it leads nobody, and nothing runs out, until it is told to lead."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.run.loopback_block import LoopbackBlock
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier, JobStatus
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.vocabulary.reasons import JobPhase

KEY = "k" * 64
STARTUP_S = 1.0
SETTINGS = JobSettings("digits", uid="uid-1", timeouts=Timeouts(startup_s=STARTUP_S))


class Standby:
    """The process, in the folder of its pod."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        (folder / "job-key").write_text(KEY)
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": wire.settings_to_json(SETTINGS),
            "UNBROKEN_JOB_KEY_FILE": str(self.folder / "job-key"),
            "UNBROKEN_LISTEN": f"{self.address}:29600",
            "UNBROKEN_METRICS_LISTEN": f"{self.address}:29601",
            "UNBROKEN_DIR": str(self.folder),
        }
        self.process = subprocess.Popen([sys.executable, "-m", "unbroken.rendezvous.standby"], env=environment)
        wait_until(lambda: self.ask("/healthz", port=29601)[0] == 200, "a rendezvous that is ready")
        return self.process

    def ask(
        self, path: str, body: bytes | None = None, kind: Kind = Kind.OPERATOR, pod: str = "", port: int = 29600
    ) -> tuple[int, str]:
        """Return status and text of the answer, (0, "") when there is none."""
        token = derive_token(KEY, kind, "uid-1", pod)
        request = urllib.request.Request(
            f"http://{self.address}:{port}{path}", data=body, headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> JobStatus | None:
        code, text = self.ask("/v1/status")
        status: JobStatus | None = wire.decode(text, JobStatus) if code == 200 else None
        return status


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    block = LoopbackBlock()
    made = Standby(tmp_path, block.rendezvous)
    yield made
    made.process.terminate()
    made.process.wait(LIMIT_S)
    block.release()


def lead(standby: Standby, **numbers: Any) -> tuple[int, str]:
    return standby.ask("/v1/lead", wire.encode(Earlier(**numbers)).encode())


def test_nobody_is_led_and_nothing_runs_out_before_it_is_told_to_lead(standby: Standby) -> None:
    assert standby.ask("/v1/status") == (503, "this rendezvous stands by, another one leads the job\n")
    assert standby.ask("/v1/agents", kind=Kind.AGENT, pod="digits-0")[0] == 403
    assert standby.ask("/v1/lead", b"{}", Kind.READER)[0] == 403
    assert standby.ask("/v1/lead", b"{}")[0] == 400
    # The job's startup timeout is shorter than this: a coordinator would have failed the job by now.
    time.sleep(2 * STARTUP_S)
    assert lead(standby, term=5, iteration=7) == (204, "")
    status = wait_until(standby.status, "a rendezvous that leads")
    assert (status.term, status.phase) == (6, JobPhase.FORMING)
    assert lead(standby, term=5, iteration=7) == (204, ""), "said again it changes nothing"
    again = standby.status()
    assert again is not None
    assert again.term == 6


def test_one_that_has_led_leads_again_after_its_container_was_restarted(standby: Standby) -> None:
    assert lead(standby, term=5, iteration=7) == (204, "")
    wait_until(standby.status, "a rendezvous that leads")
    standby.process.send_signal(signal.SIGKILL)
    standby.process.wait(LIMIT_S)
    standby.start()
    assert wait_until(standby.status, "a rendezvous that leads again").term == 7


def test_it_ends_at_once_when_it_is_told_to_end(standby: Standby) -> None:
    standby.process.terminate()
    assert standby.process.wait(LIMIT_S) == 0
    assert standby.ask("/healthz", port=29601) == (0, "")
