"""Serves the reviews of jobs over HTTPS, in every replica: it needs neither the lease nor the API server.

The certificate comes from a folder, filled by the kubelet from a Secret. It may arrive late and be replaced at any
time; until it is there handshakes fail, and the API server does what the webhook's failurePolicy says.

Whoever reaches the port may send what they like: a body is bounded before it is read, and judged in another
thread, so that the loop which renews the lease goes on.
"""

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from unbroken_core.conventions.printable import printable
from unbroken_operator.adapters.listening import Address, ListenLimits, Rarely, RefusalObserver, listening
from unbroken_operator.decisions.review import ReviewAnswer, answer

logger = logging.getLogger(__name__)

PATH = "/review"
MAX_BYTES = 1_000_000
"""An object, the one before it and what is around them. A job with a full history is 30 kB."""
BODY_S = 5.0
"""A body that is not there after this is given up."""
MAX_WAITING = 64
"""Reviews at once, two of which are judged. One takes milliseconds, 100 ms at worst."""
LONG_BYTES = 100_000
"""Bodies of more, which at most half of those that wait may be, are judged one after the other among themselves:
whoever sends many holds up nobody else."""
LIMITS = ListenLimits(connections=128, of_one_address=64)
LOOK_S = 10.0
"""Between looks at the certificate's files."""
ReviewObserver = Callable[[str], None]
"""Told the outcome of each review: allowed, refused, unreadable, too-large or busy."""


@dataclass(frozen=True)
class Webhook:
    """Where reviews of jobs are served."""

    listen: Address
    certificates: Path
    """Folder with tls.crt and tls.key, which may arrive late and be replaced."""
    images: tuple[str, ...] = ()
    """Images that a job's rendezvous may have, as the operator itself admits them; empty: any."""
    client_authority: Path | None = None
    """File with the authority that the API server's own certificate comes from; None: whoever connects is answered."""


class ServingCertificate:
    """The certificate in a folder, and the TLS context that shows it."""

    def __init__(self, folder: Path, client_authority: Path | None = None) -> None:
        self._pair = (folder / "tls.crt", folder / "tls.key")
        self._files = (*self._pair, *([client_authority] if client_authority else []))
        self._client_authority = client_authority
        self._loaded: tuple[tuple[int, int], ...] | None = None
        self._trouble = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if client_authority is not None:
            # From the first moment: without the authority nobody is trusted.
            self.context.verify_mode = ssl.CERT_REQUIRED

    def look(self) -> bool:
        """Take the files if they are others than before; return whether a certificate is shown. Tells trouble once."""
        try:
            found = tuple((status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in self._files))
            if found != self._loaded:
                # Tried out first: two files of different age would leave the context without either.
                self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
                self._load(self.context)
                self._loaded, self._trouble = found, ""
                logger.info("showing certificate file=%s", self._files[0])
        except (OSError, ssl.SSLError) as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                logger.warning("webhook waits for a certificate file=%s error=%s", self._files[0], trouble)
            self._trouble = trouble
        return self._loaded is not None

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(*self._pair)
        if self._client_authority is not None:
            context.load_verify_locations(self._client_authority)

    async def keep(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


@contextlib.asynccontextmanager
async def reviewing(
    webhook: Webhook | None,
    namespaces: tuple[str, ...],
    on_review: ReviewObserver,
    on_refused: RefusalObserver = lambda _: None,
) -> AsyncIterator[None]:
    """Serve while the context lasts; nothing when there is no address. Raises InputError when it cannot listen."""
    if webhook is None:
        yield
        return
    certificate = ServingCertificate(webhook.certificates, webhook.client_authority)
    certificate.look()
    application = make_application(namespaces, on_review, webhook.images)
    keeping = asyncio.create_task(certificate.keep(), name="certificate")
    try:
        async with listening(application, webhook.listen, certificate.context, limits=LIMITS, on_refused=on_refused):
            yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def make_application(
    namespaces: tuple[str, ...], on_review: ReviewObserver, images: tuple[str, ...] = ()
) -> web.Application:
    """Return what answers reviews; anything but 200 is a failed call to the API server."""
    reviews = _Reviews(namespaces, on_review, images)
    application = web.Application(client_max_size=MAX_BYTES)
    application.add_routes([web.post(PATH, reviews.handle)])
    application.on_cleanup.append(reviews.close)
    return application


class _Reviews:
    """Answers reviews, the short and the long ones each one after the other in a thread of their own."""

    def __init__(self, namespaces: tuple[str, ...], on_review: ReviewObserver, images: tuple[str, ...]) -> None:
        self._known = (namespaces, images)
        self._on_review = on_review
        self._short, self._long = ThreadPoolExecutor(1, "review"), ThreadPoolExecutor(1, "long-review")
        self._num_waiting = self._num_long = 0
        self._rarely = Rarely()

    async def close(self, _: web.Application) -> None:
        """Let the threads end."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request."""
        if (request.content_length or 0) > MAX_BYTES:
            return self._failed(request, 413, "too-large", _too_large(str(request.content_length)))
        # Without a length, in chunks, it may be long.
        is_long = (request.content_length or MAX_BYTES) > LONG_BYTES
        try:
            if not (busy := self._busy(is_long)):
                async with asyncio.timeout(BODY_S):
                    body = await request.read()
                # Who sends nothing has had no place: the limits on connections are against that, by address.
                busy = self._busy(is_long)
            if busy:
                return self._failed(request, 503, "busy", busy)
            made = await self._judged(body, is_long)
        except web.HTTPRequestEntityTooLarge:
            return self._failed(request, 413, "too-large", _too_large("more"))
        except TimeoutError:
            return self._failed(request, 408, "unreadable", f"body: is not complete after {BODY_S:g} s")
        except (ValueError, RecursionError) as error:
            return self._failed(request, 400, "unreadable", f"{error}"[:500])
        self._on_review("allowed" if made.refused is None else "refused")
        if made.refused is not None:
            logger.info("refused job=%s because=%s", printable(made.job), printable(made.refused.message))
        return web.json_response(made.to_json())

    async def _judged(self, body: bytes, is_long: bool) -> ReviewAnswer:
        self._num_waiting += 1
        self._num_long += is_long
        try:
            thread = self._long if is_long else self._short
            return await asyncio.get_running_loop().run_in_executor(thread, _judge, body, *self._known)
        finally:
            self._num_waiting -= 1
            self._num_long -= is_long

    def _busy(self, is_long: bool) -> str:
        """Return why no further review may wait; "" when it may."""
        if self._num_waiting >= MAX_WAITING:
            return f"{self._num_waiting} reviews wait, at most {MAX_WAITING} may"
        if is_long and self._num_long >= MAX_WAITING // 2:
            return f"{self._num_long} reviews of over {LONG_BYTES} bytes wait, at most {MAX_WAITING // 2} may"
        return ""

    def _failed(self, request: web.Request, status: int, outcome: str, because: str) -> web.Response:
        self._on_review(outcome)
        if self._rarely.may_tell(outcome, time.monotonic()):
            logger.warning(
                "review failed peer=%s outcome=%s error=%s", request.remote, outcome, printable(str(because))
            )
        # As bytes: what was seen may hold halves of characters.
        return web.Response(status=status, body=f"{because}\n".encode(errors="replace"), content_type="text/plain")


def _judge(body: bytes, namespaces: tuple[str, ...], images: tuple[str, ...]) -> ReviewAnswer:
    return answer(json.loads(body), namespaces, images)


def _too_large(seen: str) -> str:
    return f"body: must have at most {MAX_BYTES} bytes, got {seen}"
