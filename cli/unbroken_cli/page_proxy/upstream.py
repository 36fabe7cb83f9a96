"""How the proxy reaches a job's rendezvous: at a URL, or in the cluster through `kubectl port-forward`."""

import base64
import contextlib
import http.client
import re
import shutil
import ssl
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken_cli.errors import CommandError, refusal_hint
from unbroken_cli.fetching import fetch
from unbroken_cli.page_proxy.server import PageAnswer
from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import checked_secret
from unbroken_core.vocabulary.errors import InputError

API_PORT = 29600
_ANSWER_S = 40.0
"""A rendezvous answers the page within 20 s, and a busy one later."""
_FORWARD_S = 40.0
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")


@dataclass(frozen=True)
class RendezvousAccess:
    """How a rendezvous is asked."""

    url: str
    token: str
    authorities: str | None
    """PEM; None without encryption."""


def ask(access: RendezvousAccess, path: str) -> PageAnswer:
    """Return what the rendezvous answers. Raises CommandError when it does not."""
    if not access.url.startswith(("http://", "https://")):
        raise InputError(f"--url: must be http://ADDRESS:PORT or https://..., got {access.url!r}")
    if access.url.startswith("https://") and access.authorities is None:
        raise InputError("--url https://...: needs --ca-file, the job's authority (ca.crt of its Secret)")
    context = None if access.authorities is None else _trust(access.authorities)
    try:
        found = fetch(access.url, path, {"Authorization": f"Bearer {access.token}"}, _ANSWER_S, context)
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CommandError(f"the rendezvous does not answer: {text}") from error
    return PageAnswer(found.status, found.body, found.content_type)


def _trust(authorities: str) -> ssl.SSLContext:
    try:
        return client_context(authorities)
    except InputError as error:
        raise InputError(f"the job's authority: {error}") from error


class PortForward:
    """A `kubectl port-forward` to a job's rendezvous, started again when it has ended. Any thread may ask it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are kubectl's. Raises InputError without kubectl."""
        program = shutil.which("kubectl")
        if program is None:
            raise InputError("kubectl: not found in PATH, and needed to reach the rendezvous; or see --url")
        self._command = [program, *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._port = 0

    def port(self) -> int:
        """Return the port on this machine. Raises CommandError when there is none in time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._port = self._start()
            return self._port

    def drop(self) -> None:
        """End it: what it leads to is gone. The next `port` starts another one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._reader is not None:
            self._reader.join(_FORWARD_S)
            self._reader = None

    def _start(self) -> int:
        process = self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said: deque[str] = deque(maxlen=3)
        found: list[int] = []
        is_known = threading.Event()

        def read() -> None:
            # To its end: it says a line for each connection, and would wait for somebody to read them.
            with process.stdout or contextlib.nullcontext(()) as lines:
                for line in lines:
                    said.append(line.strip())
                    match = _FORWARDED.search(line)
                    if match is not None:
                        found.append(int(match[1]))
                        is_known.set()
            is_known.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        is_known.wait(_FORWARD_S)
        if not found:
            self._end()
            text = " ".join(said) or f"no output within {_FORWARD_S:g} s"
            hint = refusal_hint(text, "pods/portforward", "use --url with the address of the rendezvous")
            raise CommandError(f"kubectl port-forward: {text}; {hint}")
        return found[0]


class ClusterRendezvous:
    """The rendezvous of a job in the cluster: its Secret, read again when it was replaced, and its forwarded port."""

    def __init__(self, read_secret: Callable[[], Mapping[str, Any]], forward: PortForward) -> None:
        self._read_secret = read_secret
        self._forward = forward
        self._secret = read_secret()

    def ask(self, path: str) -> PageAnswer:
        """Return what the rendezvous answers. Raises CommandError and InputError."""
        answer = self._ask(path)
        if answer.status == 401:
            self._secret = self._read_secret()
            answer = self._ask(path)
        return answer

    def _ask(self, path: str) -> PageAnswer:
        authorities = secret_value(self._secret, "ca.crt")
        scheme = "http" if authorities is None else "https"
        # The certificate has this name for connections through port-forward.
        url = f"{scheme}://localhost:{self._forward.port()}"
        try:
            return ask(RendezvousAccess(url, _token(self._secret), authorities), path)
        except CommandError:
            # It leads to a pod that has ended, maybe.
            self._forward.drop()
            raise

    def close(self) -> None:
        """End what was started."""
        self._forward.drop()


def _token(secret: Mapping[str, Any]) -> str:
    try:
        return checked_secret(secret_value(secret, "token") or "", f"Secret {secret['metadata']['name']}: token")
    except InputError as error:
        raise CommandError(f"{error}; delete the Secret, and the operator recreates it") from error


def secret_value(secret: Mapping[str, Any], key: str) -> str | None:
    """Return what a Secret holds, or None. Raises CommandError when it is not readable."""
    text = (secret.get("data") or {}).get(key)
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True).decode().strip()
    except ValueError as error:
        raise CommandError(f"Secret {secret['metadata']['name']}: {key}: not base64 of text") from error
