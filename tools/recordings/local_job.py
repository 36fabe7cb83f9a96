"""A job of `unbroken run` for recordings: started as by a user, seen through its rendezvous, broken by signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 120.0
_POLL_S = 0.02
_CLOSE_S = 60.0


class RecordingError(Exception):
    """What was to be recorded did not happen."""


class LocalJob:
    """One `unbroken run`, whose private folder is below `folder`."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, output: Path) -> None:
        self.process = process
        self.folder = folder
        self._output = output

    def output(self) -> str:
        """Return what the run has said so far."""
        return self._output.read_text(errors="replace")

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """Wait for something to be true, and return it. Raises RecordingError when it does not come."""
        until_s = time.monotonic() + LIMIT_S
        while not (found := look()):
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise RecordingError(f"want {what} within {LIMIT_S:g} s, or before the run ends\n{self.output()}")
            time.sleep(_POLL_S)
        return found

    def parts(self, module: str) -> list[psutil.Process]:
        """Return the processes of one part: unbroken.rendezvous, unbroken.launch or unbroken.agent."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                if module in process.cmdline():
                    found.append(process)
        return found

    def launcher(self, pod: str) -> psutil.Process:
        """Return the process that is the pod. Raises RecordingError when there is none."""
        for part in self.parts("unbroken.launch"):
            if part.environ().get("UNBROKEN_POD") == pod:
                return part
        raise RecordingError(f"want a launcher of {pod}")

    @property
    def token_file(self) -> Path:
        """The job's token."""
        return Path(self.until(lambda: next(self.folder.glob("unbroken-*/token"), None), "a token"))

    @property
    def url(self) -> str:
        """Of the rendezvous that runs."""

        def listen() -> str:
            for part in self.parts("unbroken.rendezvous"):
                with suppress(psutil.Error):
                    return part.environ().get("UNBROKEN_LISTEN", "")
            return ""

        return f"http://{self.until(listen, 'a rendezvous')}"

    def status(self, url: str | None = None, query: str = "") -> dict[str, Any] | None:
        """Return what the rendezvous says; None while it does not answer."""
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        request = urllib.request.Request(f"{url or self.url}/v1/status{query}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                return dict(json.loads(response.read()))
        except (OSError, urllib.error.URLError):
            return None

    def settled(self, num_recoveries: int) -> dict[str, Any]:
        """Wait until the job trains after so many recoveries of its rendezvous, and return the status."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            if status is None or status["phase"] != "running":
                return None
            return status if sum(bool(one["ended_at"]) for one in status["recoveries"]) >= num_recoveries else None

        return dict(self.until(look, f"a job that trains after {num_recoveries} recoveries"))


@contextmanager
def local_job(arguments: Sequence[str]) -> Iterator[LocalJob]:
    """Run a job; end it, and all that it has started, afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="job-"))
    output = folder / "output"
    environment = {**os.environ, "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "unbroken", "run", *arguments]
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=folder)
        try:
            yield LocalJob(process, folder, output)
        finally:
            _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_S)
