"""Follows one job: nodes, pods and job by the API server's watches, the rest by the rendezvous' long poll."""

import asyncio
import base64
import logging
from collections.abc import Callable

import aiohttp

from unbroken_core.conventions.tls import client_context, server_name
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.protocol.wire import decode
from unbroken_core.vocabulary.errors import UnbrokenError, WireError
from unbroken_local.demo.snapshot import JOB_LABEL, Snapshot, take_snapshot
from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient
from unbroken_local.kube.informer import Informer

log = logging.getLogger(__name__)

API_PORT = 29600
POLL_S = 20
RETRY_PAUSE_S = 0.2
JOBS_PATH = "/apis/unbroken.dev/v1alpha1/namespaces/{namespace}/resilienttrainingjobs"


class TooLateError(UnbrokenError):
    """Something did not come about in its time."""


class Observer:
    """Keeps a snapshot of one job fresh while `run` runs."""

    def __init__(self, client: KubeClient, namespace: str, job: str) -> None:
        self._client = client
        self._namespace = namespace
        self._job = job
        self._nodes = Informer(client, "/api/v1/nodes")
        self._pods = Informer(client, f"/api/v1/namespaces/{namespace}/pods")
        self._jobs = Informer(client, JOBS_PATH.format(namespace=namespace))
        self._status: JobStatus | None = None
        self._changed = asyncio.Event()
        for informer in (self._nodes, self._pods, self._jobs):
            informer.listen(lambda _old, _new: self._changed.set())

    @property
    def snapshot(self) -> Snapshot:
        """The job at this moment."""
        pods = [pod for pod in self._pods.objects.values() if _label(pod, JOB_LABEL) == self._job]
        job = self._jobs.objects.get((self._namespace, self._job))
        return take_snapshot(self._nodes.objects.values(), pods, job, self._status)

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in (self._nodes, self._pods, self._jobs):
                group.create_task(informer.run())
            group.create_task(self._follow_rendezvous())

    async def wait(self, what: str, is_there: Callable[[Snapshot], bool], limit_s: float) -> Snapshot:
        """Return the first snapshot that `is_there` likes. Raises TooLateError after `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    self._changed.clear()
                    snapshot = self.snapshot
                    if is_there(snapshot):
                        return snapshot
                    await self._changed.wait()
        except TimeoutError as error:
            snapshot = self.snapshot
            raise TooLateError(f"{what}: want it within {limit_s:.0f} s, got {describe(snapshot)}") from error

    async def _follow_rendezvous(self) -> None:
        timeout = aiohttp.ClientTimeout(total=POLL_S + 10.0, connect=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    await self._ask(session)
                except (aiohttp.ClientError, TimeoutError, OSError, ApiError, WireError) as error:
                    log.debug("rendezvous does not answer: error=%r", error)
                    await asyncio.sleep(RETRY_PAUSE_S)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        addresses = [pod.ip for pod in self.snapshot.pods if not pod.is_trainer and pod.ip and not pod.is_ending]
        if not addresses:
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        query = {"timeout": str(POLL_S)}
        if self._status is not None:
            query |= {"after": str(self._status.revision), "term": str(self._status.term)}
        path = f"/api/v1/namespaces/{self._namespace}/secrets/{self._job}-rendezvous"
        secret = (await self._client.get(path))["data"]
        token, authority = (base64.b64decode(secret[key]).decode().strip() for key in ("token", "ca.crt"))
        url = f"https://{addresses[-1]}:{API_PORT}/v1/status"
        headers = {"Authorization": f"Bearer {token}"}
        name = server_name(self._job, self._namespace)
        context = client_context(authority)
        async with session.get(url, params=query, headers=headers, ssl=context, server_hostname=name) as reply:
            reply.raise_for_status()
            self._status = decode(await reply.text(), JobStatus)
        self._changed.set()


def describe(snapshot: Snapshot) -> str:
    """Return what is known of a job, in one line."""
    status = snapshot.status
    if status is None:
        return f"state {snapshot.state or 'none'}, and the rendezvous does not answer"
    last = [f"{item.number} {item.cause}/{item.rung} {sorted(item.phase_s)}" for item in status.recoveries[-2:]]
    pods = [f"{pod.name} {','.join(pod.workers) or pod.phase}" for pod in snapshot.pods]
    noted = [item.get("number") for item in snapshot.history]
    return f"state {snapshot.state}: {status.message}; recoveries {last}, noted {noted}; pods {pods}"


def _label(item: Json, name: str) -> str | None:
    return (item["metadata"].get("labels") or {}).get(name)
