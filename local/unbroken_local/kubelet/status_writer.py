"""Writes a pod's status when it changed, and only then; the newest one wins, failures are tried again.

What others make of it meanwhile is taken back: who calls a node silent that has just come back says so of its pods too.
"""

import asyncio
import logging
from collections.abc import Callable

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient, pause_s
from unbroken_local.kubelet.spec import PodSpec
from unbroken_local.kubelet.status import OWNED_CONDITIONS

log = logging.getLogger(__name__)


class StatusWriter:
    """One pod's status. `build` returns what it should be, None when there is nothing to say."""

    def __init__(self, client: KubeClient, pod: PodSpec, build: Callable[[], Json | None]) -> None:
        self._client = client
        self._uid = pod.uid
        self._path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        self._build = build
        self._written: Json | None = None
        self._written_version = 0
        self._seen: dict[str, str] = {}
        self._seen_version = 0
        self._touched = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_closed = False
        self._lock = asyncio.Lock()

    def touch(self) -> None:
        """The status may have changed."""
        self._touched.set()

    def observe(self, pod: Json) -> None:
        """The API server has this object now; older ones than the last that was written say nothing."""
        self._seen, self._seen_version = _own(pod.get("status") or {}), int(pod["metadata"]["resourceVersion"])
        self._compare()

    def pause(self) -> None:
        """Write nothing until `resume`."""
        self._may_write.clear()

    def resume(self) -> None:
        """Write again; others may have changed the status meanwhile."""
        self._written = None
        self._may_write.set()
        self._touched.set()

    def close(self) -> None:
        """Never write again."""
        self._is_closed = True

    def known(self, seen: Json) -> Json:
        """Return the status that the API server has: what was written last, with others' conditions from `seen`."""
        if self._written is None:
            return seen
        ours = [c for c in self._written["conditions"] if c["type"] in OWNED_CONDITIONS]
        others = [c for c in seen.get("conditions") or [] if c["type"] not in OWNED_CONDITIONS]
        return {**seen, **self._written, "conditions": ours + others}

    async def run(self) -> None:
        """Write until cancelled."""
        failures = 0
        while True:
            await self._touched.wait()
            await self._may_write.wait()
            self._touched.clear()
            if await self._write():
                failures = 0
            else:
                failures += 1
                await asyncio.sleep(pause_s(failures))
                self._touched.set()

    async def _write(self) -> bool:
        """Return whether there is nothing left to write."""
        async with self._lock:
            status = self._build()
            if status is None or self._is_closed or status == self._written:
                return True
            try:
                pod = await self._client.merge_patch(
                    f"{self._path}/status", {"metadata": {"uid": self._uid}, "status": status}
                )
            except ApiError as error:
                if error.status == 404:
                    return True  # Gone: the watch will say so.
                log.warning("status not written: pod=%s error=%s", self._path, error)
                return False
            self._written, self._written_version = status, int(pod["metadata"]["resourceVersion"])
            self._compare()  # What others wrote after it may have been observed before its answer was here.
            return True

    def _compare(self) -> None:
        """Write again where the newest object, seen after the last that was written, says something else."""
        if self._written is None or self._seen_version <= self._written_version:
            return
        if self._seen != _own(self._written):
            self._written = None
            self._touched.set()

    async def delete_pod(self) -> bool:
        """Write the last status, then delete the object for good. Return whether it is gone or going."""
        await self._write()
        if self._is_closed:
            return True
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self._uid},
        }
        try:
            await self._client.delete(self._path, body)
        except ApiError as error:
            if error.status not in {404, 409}:
                log.warning("pod not deleted: pod=%s error=%s", self._path, error)
                return False
        return True


def _own(status: Json) -> dict[str, str]:
    """Return what the conditions that are the kubelet's say, by type."""
    return {c["type"]: c["status"] for c in status.get("conditions") or [] if c["type"] in OWNED_CONDITIONS}
