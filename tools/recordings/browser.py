"""Chromium without a window, driven by its DevTools protocol through a pipe: nothing listens, nothing is installed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ANSWER_S = 60.0
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-proxy-server",
    "--force-color-profile=srgb",
)


def find_chromium() -> str | None:
    """Return the browser's program ($CHROMIUM, else by its usual names), or None."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else list(_PROGRAMS)
    return next((program for name in names if (program := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser does not do what it was told to."""


class Browser:
    """One process of Chromium, with a profile of its own that is gone afterwards."""

    def __init__(self, program: str) -> None:
        """Start it. Raises BrowserError when it does not answer."""
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        # High numbers: the shell below moves them to 3 and 4, where Chromium wants them.
        ours, theirs = zip(*(map(_high, os.pipe()) for _ in range(2)), strict=True)
        (their_in, self._out), (self._in, their_out) = (ours[0], theirs[0]), (ours[1], theirs[1])
        options = [*_OPTIONS, f"--user-data-dir={self._profile.name}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        script = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out} {their_in}<&- {their_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options, "about:blank"],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._read = b""
        self._num_calls = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, and wait for its end."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command. Raises BrowserError for a refusal, or none in time."""
        self._num_calls += 1
        number = self._num_calls
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(until_s, method)
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error'].get('message')}")
            else:
                return dict(answer["result"])

    def _next(self, until_s: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(until_s - time.monotonic(), 0))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise BrowserError(f"{what}: want an answer within {ANSWER_S:g} s, got none")
            self._read += data
        first, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(first))

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> "Tab":
        """Return a new tab with a page; `scheme`: light or dark."""
        tab = Tab(self)
        tab.resize(width, height)
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.go(url)
        return tab


class Tab:
    """One tab, with cookies of its own."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        made = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)
        self._session = browser.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of this tab."""
        return self._browser.call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        """Go to another page. Raises BrowserError when it cannot be had."""
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")

    def look(self, expression: str) -> Any:
        """Return the value of JavaScript; a promise is waited for. Raises BrowserError for what it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(f"{expression}: {details.get('exception', details).get('description', details)}")
        return answer["result"].get("value")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Change the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def picture(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Return what the browser has complained about in this tab: errors, and what its policies have blocked."""
        self.call("Runtime.evaluate", expression="0")  # All that came before it is read by then.
        found = []
        for event in self._browser.events:
            parameters = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception", parameters)))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}".strip())
        return found

    def requests(self) -> list[str]:
        """Return the URLs that this tab has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """Close it, with its cookies."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


def _high(descriptor: int) -> int:
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return high
