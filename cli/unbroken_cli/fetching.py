"""One request to a job's rendezvous, whose image is the tenant's: bounded in time and size, and led nowhere else."""

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

MAX_BYTES = 16 << 20
"""The page of a job of thousands of pods has a few."""


@dataclass(frozen=True)
class FetchedStatus:
    """An answer, whatever its status."""

    status: int
    body: bytes
    content_type: str


class _Named(http.client.HTTPSConnection):
    """A connection to a server that is known by another name than the one it is reached by."""

    server_name = ""

    def connect(self) -> None:
        """Connect, and check the certificate against the name."""
        http.client.HTTPConnection.connect(self)
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]  # as in the parent's own connect
        self.sock = context.wrap_socket(self.sock, server_hostname=self.server_name)


def fetch(
    url: str,
    path: str,
    headers: Mapping[str, str],
    limit_s: float,
    context: ssl.SSLContext | None = None,
    *,
    server_name: str = "",
) -> FetchedStatus:
    """GET a path at a URL. Redirects are not followed. Raises OSError, HTTPException, ValueError.

    `server_name`: that of the certificate, where it is not the URL's host.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"want http://ADDRESS:PORT or https://..., got {url!r}")
    connection = (
        http.client.HTTPConnection(parts.hostname, parts.port, timeout=limit_s)
        if parts.scheme == "http"
        else _Named(parts.hostname, parts.port, timeout=limit_s, context=context)
    )
    if isinstance(connection, _Named):
        connection.server_name = server_name or parts.hostname
    try:
        connection.connect()
        # The time-out of a socket begins anew with each byte.
        cut = threading.Timer(limit_s, _cut, (connection.sock,))
        cut.daemon = True
        cut.start()
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
        finally:
            cut.cancel()
        if len(body) > MAX_BYTES:
            raise ValueError(f"the answer has more than {MAX_BYTES} bytes")
        return FetchedStatus(response.status, body, response.getheader("Content-Type", "text/plain"))
    finally:
        connection.close()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Of the plain socket: a thread may be reading through TLS.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
