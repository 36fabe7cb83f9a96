"""Kubernetes Events, best effort: repeated ones are counted, a full queue drops, nothing ever waits for them."""

import asyncio
import logging
import uuid
from datetime import datetime, timezone

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient

log = logging.getLogger(__name__)

QUEUE_LENGTH = 1000
REMEMBERED = 2000


def timestamp() -> str:
    """Return the wall-clock time as the API server writes it: RFC 3339, UTC, whole seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp() -> str:
    """Return the wall-clock time with microseconds, as Leases want it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class EventRecorder:
    """Writes Events of one component."""

    def __init__(self, client: KubeClient, component: str) -> None:
        self._client = client
        self._component = component
        self._queue: asyncio.Queue[Json] = asyncio.Queue(QUEUE_LENGTH)
        self._seen: dict[tuple[str, ...], Json] = {}

    def record(self, about: Json, kind: str, reason: str, message: str, host: str = "") -> None:
        """Queue an Event; `kind` is Normal or Warning, `host` the node that it comes from."""
        metadata = about["metadata"]
        namespace = metadata.get("namespace") or "default"
        now = timestamp()
        event = {
            "metadata": {"namespace": namespace, "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {
                "kind": about.get("kind", "Pod"),
                "apiVersion": about.get("apiVersion", "v1"),
                "namespace": metadata.get("namespace", ""),
                "name": metadata["name"],
                "uid": metadata.get("uid", ""),
            },
            "type": kind,
            "reason": reason,
            "message": message[:1000],
            "source": {"component": self._component, **({"host": host} if host else {})},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            log.debug("event dropped: reason=%s message=%s", reason, message)

    async def run(self) -> None:
        """Send what is queued until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._send(event)
            except ApiError as error:
                log.debug("event not written: reason=%s error=%s", event["reason"], error)

    async def _send(self, event: Json) -> None:
        path = f"/api/v1/namespaces/{event['metadata']['namespace']}/events"
        key = (event["involvedObject"]["uid"], event["involvedObject"]["name"], event["reason"], event["message"])
        earlier = self._seen.get(key)
        if earlier is not None:
            change = {"count": earlier["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
            try:
                await self._client.merge_patch(f"{path}/{earlier['metadata']['name']}", change)
                earlier |= change
                return
            except ApiError as error:
                if error.status != 404:
                    raise
        await self._client.create(path, event)
        if len(self._seen) >= REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._seen[key] = event
