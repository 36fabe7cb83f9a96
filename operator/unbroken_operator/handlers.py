"""The kopf operator: it watches ResilientTrainingJobs and hands every event on. The only module that imports kopf.

Only `on.event` is used: kopf then writes nothing to the jobs, neither annotations nor finalizers, so that a job can be
deleted while no operator runs; owner references remove what belongs to it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, cast

import kopf

from unbroken_operator import layout
from unbroken_operator.jobs import Jobs
from unbroken_operator.kube import Connection, load_connection

logger = logging.getLogger(__name__)

SERVER_TIMEOUT_S = 290
RESTART_S = 5.0
_IDENTITY: Any = "unbroken-operator"
"""Any text does, as there are no peers. Without it kopf asks for the user's name, which the uid of an image has not."""


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


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.posting.enabled = False
    # The job's own resource is all that it must find: no right to watch CRDs and namespaces is needed.
    settings.scanning.disabled = True
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.connect_timeout = 10.0
    settings.networking.request_timeout = 60.0
    # kopf starts over after the last one, so that jobs are seen again soon after the API server is back.
    settings.networking.error_backoffs = (0.5, 1.0, 2.0, 3.0, 5.0)
    return settings


def _registry(jobs: Jobs, kubeconfig: str | None) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, retries=3, backoff=1.0)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection_info(await load_connection(kubeconfig))

    @kopf.on.event(layout.GROUP, layout.VERSION, layout.PLURAL, registry=registry)
    async def observe_job(event: kopf.RawEvent, **_: Any) -> None:
        jobs.observe(event["type"], dict(event["object"]))

    return registry


def _connection_info(connection: Connection) -> kopf.ConnectionInfo:
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
    jobs: Jobs, kubeconfig: str | None, namespaces: tuple[str, ...], stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Watch jobs until `stop` is set or the process is told to end by a signal."""
    while not stop.is_set():
        try:
            await kopf.operator(
                registry=_registry(jobs, kubeconfig),
                settings=_settings(),
                namespaces=namespaces,
                clusterwide=not namespaces,
                standalone=True,
                identity=_IDENTITY,
                stop_flag=stop,
                ready_flag=ready,
            )
        except Exception:
            # An answer that kopf takes for fatal, such as 5xx for a minute, is no reason to give all jobs up.
            logger.exception("watch of jobs ended, starting again in_s=%.0f", RESTART_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RESTART_S)
        else:
            return
