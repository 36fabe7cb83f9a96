"""Serves the reviews of jobs over HTTPS, in every replica: it needs neither the lease nor the API server.

The certificate comes from a folder, filled by the kubelet from a Secret. It may arrive late and be replaced at any
time; until it is there handshakes fail, and the API server does what the webhook's failurePolicy says.
"""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from unbroken_operator.adapters.listening import Address, listening
from unbroken_operator.decisions.review import answer

logger = logging.getLogger(__name__)

PATH = "/review"
MAX_BYTES = 8 * 1024 * 1024
"""An object, the one before it and what is around them: the API server takes objects of up to 3 MB."""
LOOK_S = 10.0
"""Between looks at the certificate's files."""
ReviewObserver = Callable[[str], None]
"""Told the outcome of each review: allowed, refused or unreadable."""


@dataclass(frozen=True)
class Webhook:
    """Where reviews of jobs are served."""

    listen: Address
    certificates: Path
    """Folder with tls.crt and tls.key, which may arrive late and be replaced."""


class Certificate:
    """The certificate in a folder, and the TLS context that shows it."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / "tls.crt", folder / "tls.key")
        self._loaded: tuple[tuple[int, int], ...] | None = None
        self._trouble = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def look(self) -> bool:
        """Take the files if they are others than before; return whether a certificate is shown. Tells trouble once."""
        try:
            found = tuple((status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in self._files))
            if found != self._loaded:
                # Tried out first: two files of different age would leave the context without either.
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*self._files)
                self.context.load_cert_chain(*self._files)
                self._loaded, self._trouble = found, ""
                logger.info("showing certificate file=%s", self._files[0])
        except (OSError, ssl.SSLError) as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                logger.warning("webhook waits for a certificate file=%s error=%s", self._files[0], trouble)
            self._trouble = trouble
        return self._loaded is not None

    async def keep(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


@contextlib.asynccontextmanager
async def reviewing(
    webhook: Webhook | None, namespaces: tuple[str, ...], on_review: ReviewObserver
) -> AsyncIterator[None]:
    """Serve while the context lasts; nothing when there is no address. Raises InputError when it cannot listen."""
    if webhook is None:
        yield
        return
    certificate = Certificate(webhook.certificates)
    certificate.look()
    application = make_application(namespaces, on_review)
    keeping = asyncio.create_task(certificate.keep(), name="certificate")
    try:
        async with listening(application, webhook.listen, certificate.context):
            yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def make_application(namespaces: tuple[str, ...], on_review: ReviewObserver) -> web.Application:
    """Return what answers reviews: 400 for what is none, which the API server counts as a failed call."""

    async def review(request: web.Request) -> web.Response:
        try:
            made = answer(json.loads(await request.read()), namespaces)
        except (ValueError, RecursionError) as error:
            on_review("unreadable")
            logger.warning("review is unreadable peer=%s error=%s", request.remote, error)
            return web.Response(status=400, text=f"{error}\n")
        on_review("allowed" if made.refused is None else "refused")
        if made.refused is not None:
            logger.info("refused job=%s because=%s", made.job, made.refused.message)
        return web.json_response(made.to_json())

    application = web.Application(client_max_size=MAX_BYTES)
    application.add_routes([web.post(PATH, review)])
    return application
