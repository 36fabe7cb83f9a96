"""Looks at all DrainRequests every few seconds, and does what is due for each.

A list every few seconds, and no watch: there is a request for each broken node. Each look begins from what the API
server says, and only since when a request is known is remembered: two of these programs, or one that was started again,
do no harm.
"""

import asyncio
import datetime
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import KubeConflict, KubeError, KubeNotFound, KubeNotServed, KubeRefused
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout
from unbroken_operator.drains.requests import (
    GROUP_VERSION,
    PLURAL,
    DrainReason,
    DrainRequest,
    Due,
    FoundPod,
    PodName,
    condition,
    decide,
    is_complete,
    read_pod,
    read_request,
    whose_turn,
    with_condition,
)

logger = logging.getLogger(__name__)

MAX_REQUESTS = 100
"""Of one look. Where there are more, they take turns."""
_EVICTIONS = ("policy/v1", "policy/v1beta1")
"""The second one where Kubernetes is older than 1.22."""


class Drains:
    """All requests of one namespace, or of all."""

    def __init__(self, kube: Kube, namespace: str | None, patience_s: float) -> None:
        self._kube = kube
        self._collection = collection_path(PLURAL, namespace, GROUP_VERSION)
        self._patience_s = patience_s
        self._policy = _EVICTIONS[0]
        self._is_served = True
        self._first = 0
        """Whose turn it is, where there are too many."""
        self._since_s: dict[str, float] = {}
        """Since when each open request is known, by its uid."""
        self._complaints: dict[str, str] = {}
        """What was logged last of each request that is open: once is enough."""

    async def run(self, every_s: float) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except KubeNotServed:
                self._note_served(False)
            except KubeError as error:
                logger.warning("drain requests cannot be read: error=%s", error)
            else:
                self._note_served(True)
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Do what is due for each request. Raises KubeError if they cannot be read."""
        items, _ = await self._kube.list(self._collection)
        open_ones = [item for item in items if not is_complete(_status(item))]
        open_ones.sort(key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
        now_s = asyncio.get_running_loop().time()
        self._since_s = {(uid := item["metadata"]["uid"]): self._since_s.get(uid, now_s) for item in open_ones}
        due = whose_turn(open_ones, self._first, MAX_REQUESTS)
        self._first = (self._first + len(due)) % max(len(open_ones), 1)
        names = [_name(item) for item in open_ones]
        self._complaints = {name: text for name, text in self._complaints.items() if name in names}
        await asyncio.gather(*(self._serve(item) for item in due))

    async def _serve(self, item: Mapping[str, Any]) -> None:
        name = _name(item)
        try:
            await self._drain(item, name)
        except (KubeConflict, KubeNotFound):
            pass  # It has changed, or is gone: the next look sees it as it is.
        except KubeError as error:
            self._complain(name, f"cannot be served now: {error}")

    def _complain(self, name: str, text: str) -> None:
        if self._complaints.get(name) != text:
            self._complaints[name] = text
            logger.warning("drain request is held up: request=%s error=%s", name, text)

    async def _drain(self, item: Mapping[str, Any], name: str) -> None:
        metadata = item["metadata"]
        known_s = asyncio.get_running_loop().time() - self._since_s[metadata["uid"]]
        path = f"{collection_path(PLURAL, metadata['namespace'], GROUP_VERSION)}/{quote(metadata['name'], safe='')}"
        try:
            request = read_request(path, _mapping(item.get("spec")), known_s)
        except InputError as error:
            await self._write(item, path, name, (False, DrainReason.INVALID, str(error)))
            return
        due, refusals = await self._act(request, name)
        await self._write(item, path, name, condition(request, due, refusals, self._patience_s))

    async def _act(self, request: DrainRequest, request_name: str) -> tuple[Due, dict[PodName, str]]:
        """Return what was due, and what the API server said to evictions that it refused."""
        looks = await asyncio.gather(*(self._look_at(pod) for pod in request.pods))
        found = {name: pod for name, pod in zip(request.pods, looks, strict=True) if pod is not None}
        due = decide(request, found, self._patience_s)
        for name in due.ask:
            try:
                await self._ask_to_leave(name, found[name], request)
            except KubeRefused as error:
                # A cordon of the node asks for the same.
                self._complain(request_name, f"{name} cannot be asked to leave: {error}")
        refusals = {}
        for name in due.evict:
            try:
                await self._evict(name, found[name])
            except KubeConflict:
                pass  # Another one: the next look sees it.
            except KubeNotFound as error:
                if await self._look_at(name) == found[name]:
                    refusals[name] = f"the API server has no evictions: {error}"
            except KubeError as error:
                refusals[name] = str(error)
        return due, refusals

    async def _look_at(self, pod: PodName) -> FoundPod | None:
        try:
            return read_pod(await self._kube.get(_pod_path(pod)))
        except KubeNotFound:
            return None

    async def _ask_to_leave(self, name: PodName, pod: FoundPod, request: DrainRequest) -> None:
        """Its ranks go to a spare as soon as one is ready; the operator deletes it then."""
        annotations = {layout.LEAVING_ANNOTATION: f"node {request.node} is drained"}
        await self._kube.merge(_pod_path(name), {"metadata": {"uid": pod.uid, "annotations": annotations}})

    async def _evict(self, name: PodName, pod: FoundPod) -> None:
        for policy in _EVICTIONS[_EVICTIONS.index(self._policy) :]:
            eviction = {
                "apiVersion": policy,
                "kind": "Eviction",
                "metadata": {"name": name.name, "namespace": name.namespace},
                "deleteOptions": {"preconditions": {"uid": pod.uid}},
            }
            try:
                await self._kube.create(f"{_pod_path(name)}/eviction", eviction)
            except KubeRefused:
                if policy == _EVICTIONS[-1]:
                    raise
            else:
                self._policy = policy
                return

    async def _write(
        self,
        item: Mapping[str, Any],
        path: str,
        name: str,
        wanted: tuple[bool, DrainReason, str],
    ) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = with_condition(_status(item), wanted, now)
        if conditions is None:
            return
        version = {"resourceVersion": item["metadata"]["resourceVersion"]}
        await self._kube.merge(f"{path}/status", {"metadata": version, "status": {"conditions": conditions}})
        is_done, reason, message = wanted
        logger.info("drain request: request=%s complete=%s reason=%s message=%s", name, is_done, reason.value, message)

    def _note_served(self, is_served: bool) -> None:
        if is_served != self._is_served:
            self._is_served = is_served
            logger.log(
                logging.INFO if is_served else logging.WARNING,
                "drain requests are %s: kind=%s",
                "there" if is_served else "unknown to the API server until their CRD is installed",
                f"{PLURAL}.{GROUP_VERSION}",
            )


def _name(item: Mapping[str, Any]) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _pod_path(pod: PodName) -> str:
    return f"{collection_path('pods', pod.namespace)}/{quote(pod.name, safe='')}"


def _status(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(item.get("status"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
