"""A rendezvous that means harm to whoever looks at its job: `unbroken status --url` and `unbroken page` end in time."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken_cli import fetching
from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy import upstream
from unbroken_cli.page_proxy.server import PageAnswer
from unbroken_cli.sources import rendezvous
from unbroken_core.conventions import tls
from unbroken_operator.adapters.certificates import make_certificates

LIMIT_S = 30.0
Answer = Callable[[socket.socket, threading.Event], None]


def drip(peer: socket.socket, is_over: threading.Event) -> None:
    """Send a byte now and then, without an end."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not is_over.wait(0.05):
        peer.sendall(b" ")


def interim(peer: socket.socket, is_over: threading.Event) -> None:
    """Say that the answer is to come, without an end."""
    while not is_over.is_set():
        peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def headers(peer: socket.socket, is_over: threading.Event) -> None:
    """Send headers without an end, slowly."""
    peer.sendall(b"HTTP/1.1 200 OK\r\n")
    while not is_over.wait(0.05):
        peer.sendall(b"X")


def giant(peer: socket.socket, _is_over: threading.Event) -> None:
    """Send more than fits."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
    for _ in range(50):
        peer.sendall(b"[" * 1_000_000)


def elsewhere(peer: socket.socket, _is_over: threading.Event) -> None:
    """Send the reader to somebody else."""
    host, port = peer.getsockname()
    peer.sendall(f"HTTP/1.1 302 Found\r\nLocation: http://{host}:{port}/other\r\nContent-Length: 0\r\n\r\n".encode())


@contextlib.contextmanager
def serving(answer: Answer, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """Serve until the end of the `with`, encrypted with a context; yield the URL, and what was asked."""
    is_over = threading.Event()
    asked: list[bytes] = []

    def serve() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer if context is None else context.wrap_socket(peer, server_side=True) as peer:
                    asked.append(peer.recv(65536).partition(b"\r\n")[0])
                    answer(peer, is_over)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            is_over.set()
            thread.join(LIMIT_S)


def ended(work: Callable[[], object]) -> BaseException | object:
    """Do something that must end; return what it returned or raised."""
    found: list[BaseException | object] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it waits for ever"
    return found[0]


@pytest.mark.parametrize("answer", [drip, interim, headers, giant, elsewhere])
def test_whatever_a_rendezvous_answers_the_reader_gets_an_end_and_goes_nowhere_else(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a byte now and then kept them for ever, 64 MB were parsed, and a redirect was followed with the token."""
    monkeypatch.setattr(rendezvous, "_TIMEOUT_S", 1.0)
    monkeypatch.setattr(upstream, "_ANSWER_S", 1.0)
    (tmp_path / "token").write_text("t" * 40)
    with serving(answer) as (url, asked):
        shown = ended(lambda: rendezvous.read_status(url, tmp_path / "token", None))
        assert isinstance(shown, CommandError), shown
        page = ended(lambda: upstream.ask(upstream.RendezvousAccess(url, "t" * 40, None), "/page/status"))
        assert isinstance(page, CommandError) or (isinstance(page, PageAnswer) and len(page.body) < 10_000)
    # Whoever gets no processor for a second has not asked by then.
    assert set(asked) <= {b"GET /v1/status HTTP/1.1", b"GET /page/status HTTP/1.1", b""}
    assert len(asked) <= 2


def test_an_answer_that_is_too_long_is_not_kept() -> None:
    with serving(giant) as (url, _):
        found = ended(lambda: fetching.fetch(url, "/", {}, LIMIT_S))
    assert isinstance(found, ValueError)
    assert "more than 16777216 bytes" in str(found)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("digits-rendezvous.ml.svc", "it answers 404", id="the job's own, at any address"),
        pytest.param("other-rendezvous.ml.svc", "match", id="another job's"),
        pytest.param("", "give JOB and -n NAMESPACE, too", id="the address, which is in no certificate"),
    ],
)
def test_the_certificate_of_a_rendezvous_that_is_asked_at_a_pods_address_is_checked_by_the_jobs_name(
    name: str, wanted: str, tmp_path: Path
) -> None:
    made = make_certificates(["digits-rendezvous.ml.svc", "localhost"])
    files = {"token": "t" * 40, "ca.crt": made.authority, "tls.crt": made.certificate, "tls.key": made.key}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    context = tls.server_context(tmp_path / "tls.crt", tmp_path / "tls.key")

    def not_found(peer: socket.socket, is_over: threading.Event) -> None:
        peer.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with serving(not_found, context) as (url, _):
        encrypted = url.replace("http:", "https:")
        found = ended(lambda: rendezvous.read_status(encrypted, tmp_path / "token", tmp_path / "ca.crt", name))
    assert isinstance(found, CommandError)
    assert wanted in str(found)
