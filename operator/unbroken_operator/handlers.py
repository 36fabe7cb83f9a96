"""The kopf operator: its handlers hand every event of a ResilientTrainingJob to the job's worker.

The only module that imports kopf. Jobs have `on.event` handlers alone: kopf then writes nothing to them, neither
annotations nor finalizers, so that a job can be deleted while no operator runs; owner references remove what belongs
to it. docs/design/0016-what-kopf-does.md says what kopf does here, what it does not, and what that was measured by.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import kopf

from unbroken_operator.adapters.kube import KubeConnection, load_connection
from unbroken_operator.api import layout
from unbroken_operator.jobs import Jobs

logger = logging.getLogger(__name__)

SERVER_TIMEOUT_S = 290
RESTART_S = 1.0
MAX_RESTART_S = 15.0
STEADY_S = 60.0
"""After a watch that lasted so long, failures are counted from one again."""
_IDENTITY: Any = "unbroken-operator"
"""Any text, since there are no peers. Without it kopf looks up the user's name; an image's uid has none."""

NO_FINALIZER = "the operator of Unbroken has no finalizer"
"""No object can have one of this name, since the API server refuses spaces. kopf takes its own off wherever it sees it:
whoever put kopf's, whose name is public, on a job made kopf write to that job for ever, and miss its events."""


class NoDiffBase(kopf.DiffBaseStorage):
    """Nobody asks how a job has changed: without this kopf copies all of a job, and its history, at every event."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Return nothing to compare with."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Keep nothing."""


@dataclass
class OperatorMemo:
    """What the handlers work with; kopf hands each of them a copy."""

    kubeconfig: str | None
    observe: Callable[[str | None, dict[str, Any]], None]
    """Takes the kind of an event, and the job."""
    release: Callable[[], None]
    """Lets go of the thread that waits for the stop flag."""


registry = kopf.OperatorRegistry()
"""Not kopf's default one, which tests and other operators in a process would share."""


@kopf.on.startup(registry=registry)
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Make kopf ask for as little as it can: no copy of each job, no Events of its own, no right to watch CRDs."""
    # The job's own resource is all that kopf must find.
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.finalizer = NO_FINALIZER
    settings.posting.enabled = False
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.connect_timeout = 10.0
    # A job of a megabyte takes up to 60 as objects: few at a time, none for longer than it takes to hand it on.
    settings.watching.chunk_size = 5
    settings.queueing.idle_timeout = 0.1
    settings.networking.request_timeout = 60.0
    # kopf starts over after the last one, so that jobs are seen again soon after the API server is back.
    settings.networking.error_backoffs = (0.5, 1.0, 2.0, 3.0, 5.0)


@kopf.on.login(registry=registry, retries=3, backoff=1.0)
async def log_in(memo: OperatorMemo, **_: Any) -> kopf.ConnectionInfo:
    """Connect as the rest of the operator does, with a token that is fresh."""
    return _connection_info(await load_connection(memo.kubeconfig))


@kopf.on.event(layout.GROUP, layout.VERSION, layout.PLURAL, registry=registry)
async def observe_job(event: kopf.RawEvent, memo: OperatorMemo, **_: Any) -> None:
    """Wake the job's worker, or start or end it."""
    memo.observe(event["type"], dict(event["object"]))


@kopf.on.cleanup(registry=registry)
async def clean_up(memo: OperatorMemo, **_: Any) -> None:
    """Release the thread that waits for the stop flag: it is one of those for which kopf waits 5 s."""
    memo.release()


def _connection_info(connection: KubeConnection) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(
        server=connection.server,
        scheme="Bearer" if connection.token else None,
        token=connection.token,
        ca_path=connection.ca_path,
        certificate_path=connection.certificate_path,
        private_key_path=connection.private_key_path,
        insecure=connection.is_insecure,
    )


async def run_operator(
    jobs: Jobs,
    kubeconfig: str | None,
    namespaces: tuple[str, ...],
    stop: asyncio.Event,
    ready: asyncio.Event,
    *,
    is_served: Callable[[], Awaitable[bool]],
) -> None:
    """Watch jobs until `stop` is set. `is_served` asks whether the API server knows of jobs at all."""
    num_failures = 0
    while not stop.is_set():
        if num_failures and not await is_served():
            # kopf looks for the kind once, at its start, and would watch nothing from then on.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RESTART_S)
            continue
        started_at = time.monotonic()
        # In a history that was replaced, kopf's watch would wait in silence for a version of the former one.
        jobs.restored.clear()
        try:
            await _watch_jobs(jobs, kubeconfig, namespaces, stop, ready)
        except Exception:
            # An answer that kopf takes for fatal, such as 5xx for a minute, or 404 of an API server that has just
            # started and does not know of CRDs yet, does not end the operator.
            num_failures = 1 if time.monotonic() - started_at > STEADY_S else num_failures + 1
            delay_s = min(RESTART_S * 2.0 ** (num_failures - 1), MAX_RESTART_S)
            logger.exception("watch of jobs ended, starting again in_s=%.0f", delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), delay_s)
        else:
            if stop.is_set() or not jobs.restored.is_set():
                return


async def _watch_jobs(
    jobs: Jobs, kubeconfig: str | None, namespaces: tuple[str, ...], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Run kopf in a thread and a loop of its own until `stop` or `jobs.restored` is set. Raises what kopf raises.

    At its end it waits for every task of its loop that was made meanwhile, and cancels it: in the loop of the jobs that
    would be their workers, with all that these remember.
    """
    ours = asyncio.get_running_loop()
    halt = threading.Event()
    is_ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    is_ready.add_done_callback(lambda _: ours.call_soon_threadsafe(ready.set))

    def observe(kind: str | None, job: dict[str, Any]) -> None:
        # Not in kopf's context, which holds the event for as long as anything that was made in it.
        ours.call_soon_threadsafe(jobs.observe, kind, job, context=contextvars.Context())

    async def watch() -> None:
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf.OperatorSettings(),
                memo=OperatorMemo(kubeconfig, observe, halt.set),
                namespaces=namespaces,
                clusterwide=not namespaces,
                standalone=True,
                identity=_IDENTITY,
                stop_flag=halt,
                ready_flag=is_ready,
            )
        finally:
            # A thread of kopf's waits for it, and would hold up the end of the loop.
            halt.set()

    watching = asyncio.create_task(asyncio.to_thread(asyncio.run, watch()), name="kopf")
    reasons = [asyncio.create_task(flag.wait(), name="stop kopf") for flag in (stop, jobs.restored)]
    try:
        await asyncio.wait([watching, *reasons], return_when=asyncio.FIRST_COMPLETED)
    finally:
        halt.set()
        for task in reasons:
            task.cancel()
        await watching


def _is_news(record: logging.LogRecord) -> bool:
    return "not in the main thread" not in record.msg


# The signals are taken by this process' own loop.
logging.getLogger("kopf._core.reactor.running").addFilter(_is_news)
