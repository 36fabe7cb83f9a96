"""A proxy on this machine for a job's live page: it lets one browser in, and asks the rendezvous for it.

    browser ──http, cookie──> proxy on loopback ──https, the job's token──> rendezvous

The browser never sees the job's token. It shows a ticket, which is good once, and is given a cookie for it; both end
with the command. The page's files are the proxy's own; of the job it gets the status, as JSON and as nothing else.
docs/security.md says what that keeps out.
"""

import hmac
import json
import re
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy.files import page_files
from unbroken_core.conventions.page_headers import PAGE_HEADERS
from unbroken_core.conventions.printable import printable, printable_value
from unbroken_core.vocabulary.errors import UnbrokenError

HOST = "127.0.0.1"
_MAX_CONNECTIONS = 32
_MAX_SESSIONS = 16
_IDLE_S = 30.0
_READABLE = re.compile(r"/page/([a-z-]+\.(js|css|svg)|status(\?[a-z0-9=&-]*)?)?")
_STATUS = "/page/status"
_ERRORS = (400, 401, 404, 408, 503)
"""Of a rendezvous, passed on as they are."""
_ENTRY = "/enter/"
# A redirect would not do: where another site's link has led here, the browser withholds a strict cookie from it.
_WELCOME = b'<!doctype html><meta http-equiv="refresh" content="0;url=/page/"><link rel="icon" href="/page/icon.svg">'


@dataclass(frozen=True)
class PageAnswer:
    """What is sent back to a browser."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    cookie: str = ""
    """Value of Set-Cookie; "": none is set."""
    location: str = ""


@dataclass(frozen=True)
class Request:
    """What a browser wants to GET."""

    path: str
    host: str = ""
    cookies: str = ""
    site: str = ""
    """Sec-Fetch-Site: who has made the browser ask; "" from browsers that do not say."""


class Sessions:
    """The next ticket, and the cookies of the browsers that have used one."""

    def __init__(self, port: int) -> None:
        self.hosts = (f"{HOST}:{port}", f"localhost:{port}")
        self.cookie_name = f"unbroken-page-{port}"
        self.ticket = secrets.token_urlsafe(24)
        self._sessions: deque[str] = deque(maxlen=_MAX_SESSIONS)
        self._lock = threading.Lock()

    def redeem(self, ticket: str) -> str | None:
        """Return the cookie for a ticket, and make the next ticket; None where it is not good, or not any more."""
        with self._lock:
            if not _is_same(ticket, self.ticket):
                return None
            self.ticket = secrets.token_urlsafe(24)
            self._sessions.append(secrets.token_urlsafe(32))
            return f"{self.cookie_name}={self._sessions[-1]}; HttpOnly; SameSite=Strict; Path=/"

    def has_cookie(self, cookies: str) -> bool:
        """Return whether a Cookie header has one of those that were given."""
        pairs = (part.strip().partition("=") for part in cookies.split(";"))
        shown = [value for name, _, value in pairs if name == self.cookie_name]
        with self._lock:
            return any(_is_same(value, session) for value in shown[:4] for session in self._sessions)


def _is_same(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode(errors="replace"), wanted.encode())


def admit(request: Request, sessions: Sessions) -> PageAnswer | None:
    """Return the answer to a request that must not reach the rendezvous; None where it may."""
    for check in (_foreign_host, _entry, _foreign_site, _unknown_browser, _unknown_path):
        answer = check(request, sessions)
        if answer is not None:
            return answer
    return None


def _foreign_host(request: Request, sessions: Sessions) -> PageAnswer | None:
    if request.host in sessions.hosts:
        return None
    # A name that somebody else has pointed here (DNS rebinding).
    return _refusal(403, f"use http://{sessions.hosts[0]}, not the host {request.host[:100]!r}")


def _entry(request: Request, sessions: Sessions) -> PageAnswer | None:
    if not request.path.startswith(_ENTRY):
        return None
    cookie = sessions.redeem(request.path.removeprefix(_ENTRY))
    if cookie is None:
        return _refusal(401, "this link has been used: open the newest one that `unbroken page` printed")
    return PageAnswer(200, _WELCOME, "text/html; charset=utf-8", cookie)


def _foreign_site(request: Request, _keys: Sessions) -> PageAnswer | None:
    if request.site in ("", "none", "same-origin"):
        return None
    return _refusal(403, "refused: another site made this request")


def _unknown_browser(request: Request, sessions: Sessions) -> PageAnswer | None:
    if sessions.has_cookie(request.cookies):
        return None
    return _refusal(401, "open the link that `unbroken page` printed: it lets one browser in")


def _unknown_path(request: Request, _keys: Sessions) -> PageAnswer | None:
    if request.path == "/":
        return PageAnswer(302, b"", location="/page/")
    return None if _READABLE.fullmatch(request.path) else _refusal(404, "there is only /page/")


def _refusal(status: int, text: str) -> PageAnswer:
    return PageAnswer(status, f"{printable(text)}\n".encode())


class PageProxy:
    """Listens on the loopback until it is closed."""

    def __init__(self, ask: Callable[[str], PageAnswer], port: int, on_entry: Callable[[str], None]) -> None:
        """Listen on a port, 0: any. `ask` answers for a path, or raises CommandError; both callables run in threads.

        `on_entry` is told the next link whenever one was used. Raises CommandError when the port is taken.
        """
        try:
            self._server = _Server((HOST, port), _handler(self))
        except OSError as error:
            raise CommandError(f"--port {port}: cannot listen on {HOST}:{port}: {error.strerror}") from error
        self.port = int(self._server.server_address[1])
        self.sessions = Sessions(self.port)
        self._ask = ask
        self._on_entry = on_entry
        self._reading = threading.Lock()
        """One at a time: what a few megabytes of JSON unpack to is many times as large."""

    @property
    def link(self) -> str:
        """What opens the page, once."""
        return f"http://{HOST}:{self.port}{_ENTRY}{self.sessions.ticket}"

    def serve(self) -> None:
        """Serve until `close`, or until an exception is raised in this thread."""
        with self._server:
            self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Let `serve` return; to be called from another thread."""
        self._server.shutdown()

    def answer(self, request: Request) -> PageAnswer:
        """Return what a browser gets."""
        found = admit(request, self.sessions)
        if found is not None:
            if found.cookie:
                self._on_entry(self.link)
            return found
        if not request.path.startswith(_STATUS):
            return _own_file(request.path)
        try:
            answer = self._ask(request.path)
            with self._reading:
                return _status_of(answer)
        except UnbrokenError as error:
            return _refusal(502, str(error))


def _own_file(path: str) -> PageAnswer:
    found = page_files().get(path.removeprefix("/page/") or "index.html")
    return _refusal(404, "/page/: there is no such file") if found is None else PageAnswer(200, *found)


def _status_of(answer: PageAnswer) -> PageAnswer:
    """Return what the page reads; of what the job's server says of type, errors and headers, nothing is passed on."""
    if answer.status == 200:
        try:
            text = json.dumps(printable_value(json.loads(answer.body)))
        except (ValueError, RecursionError):
            return _refusal(502, "the rendezvous gives an unreadable answer; is it of another release?")
        return PageAnswer(200, text.encode(), "application/json")
    return _refusal(answer.status if answer.status in _ERRORS else 502, f"the rendezvous answers {answer.status}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that goes away says nothing new.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(proxy: PageProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_S

        def do_GET(self) -> None:
            fields = self.headers
            answer = proxy.answer(
                Request(
                    self.path,
                    fields.get("Host", ""),
                    fields.get("Cookie", ""),
                    fields.get("Sec-Fetch-Site", ""),
                )
            )
            # What was sent with it is not read: the next request on this connection would begin within.
            self.close_connection = self.close_connection or answer.status >= 400
            self.send_response_only(answer.status)
            for name, value in (("Set-Cookie", answer.cookie), ("Location", answer.location)):
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def end_headers(self) -> None:
            for name, value in PAGE_HEADERS.items():
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Say nothing: the link would stand in it."""

        def setup(self) -> None:
            super().setup()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    return Handler
