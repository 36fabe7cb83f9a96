"""A local copy of one collection: list, then watch; lists again after 410, resumes after a broken connection."""

import asyncio
import logging
from collections.abc import Callable

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient, pause_s

log = logging.getLogger(__name__)

WATCH_LIMIT_S = 290
REWATCH_PAUSE_S = 0.1
"""Between two watches, so that a server that ends them at once is not asked in a tight loop."""
Key = tuple[str, str]
"""Namespace ("" for cluster-wide objects) and name."""
Listener = Callable[[Json | None, Json | None], None]
"""Called with the object before and after; None stands for "did not exist". Must not block and not raise."""


class Informer:
    """Objects of one collection by key, kept fresh while `run` runs."""

    def __init__(self, client: KubeClient, path: str) -> None:
        self.objects: dict[Key, Json] = {}
        self.synced = asyncio.Event()
        self.is_connected = False
        self._client = client
        self._path = path
        self._version = ""
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener` for every object that is there and for every change after."""
        self._listeners.append(listener)
        for item in self.objects.values():
            listener(None, item)

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                self.is_connected = True
                async for event in self._client.watch(self._path, self._version, WATCH_LIMIT_S):
                    failures = 0
                    self._apply(event)
                await asyncio.sleep(REWATCH_PAUSE_S)
            except ApiError as error:
                self.is_connected = False
                failures += 1
                if not error.is_passing:
                    self._version = ""  # 410 Gone, or a collection that was deleted: start over.
                if error.status != 410:
                    log.warning("watch broke: path=%s error=%s", self._path, error)
                await asyncio.sleep(pause_s(failures))

    async def _list(self) -> None:
        answer = await self._client.get(self._path)
        kind = str(answer.get("kind", "")).removesuffix("List")
        fresh: dict[Key, Json] = {}
        for item in answer.get("items") or []:
            fresh[key_of(item)] = {"kind": kind, "apiVersion": answer.get("apiVersion", "v1"), **item}
        for key in [key for key in self.objects if key not in fresh]:
            self._emit(self.objects.pop(key), None)
        for key, item in fresh.items():
            self._put(key, item)
        self._version = answer["metadata"]["resourceVersion"]
        self.synced.set()

    def _apply(self, event: Json) -> None:
        item = event["object"]
        version = item.get("metadata", {}).get("resourceVersion")
        kind = event["type"]
        if kind in {"ADDED", "MODIFIED"}:
            self._put(key_of(item), item)
        elif kind == "DELETED":
            old = self.objects.pop(key_of(item), None)
            if old is not None:
                self._emit(old, None)
        if version:
            self._version = version

    def _put(self, key: Key, item: Json) -> None:
        old = self.objects.get(key)
        if old is not None and old["metadata"].get("resourceVersion") == item["metadata"].get("resourceVersion"):
            return
        self.objects[key] = item
        if old is not None and old["metadata"].get("uid") != item["metadata"].get("uid"):
            self._emit(old, None)
            old = None
        self._emit(old, item)

    def _emit(self, old: Json | None, new: Json | None) -> None:
        for listener in self._listeners:
            listener(old, new)


def key_of(item: Json) -> Key:
    """Return namespace and name."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
