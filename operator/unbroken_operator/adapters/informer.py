"""Keeps a store like the API server's: list, then watch, and list again when the place in history is lost.

Not kopf's watch, which never reports what went while it was broken (docs/design/0016-what-kopf-does.md).

A list is asked for without a version, so it shows what is stored at that moment. If its version is lower than one that
was seen before, the API server's history was replaced: etcd was restored from a backup.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from unbroken_operator.adapters.backoff import after_failure_s
from unbroken_operator.adapters.errors import KubeError, KubeGone, KubeUnavailable

logger = logging.getLogger(__name__)

MAX_DELAY_S = 10.0
MAX_BREAKS = 3
SILENT_S = 0.2
"""Pause after a watch that brought nothing, longer after each one more in a row."""


class ObjectSource(Protocol):
    """Where objects come from."""

    async def list(
        self, path: str, selector: str = "", *, read: Callable[[dict[str, Any]], Any]
    ) -> tuple[list[Any], str]:
        """Return what `read` keeps of all objects, and their resource version."""

    async def peek(self, path: str) -> str:
        """Return the resource version that a list would have now."""

    def watch(self, path: str, resource_version: str, selector: str = "") -> AsyncIterator[Any]:
        """Yield changes after that version."""


class Store(Protocol):
    """Where objects go."""

    def mark(self) -> int:
        """Return a number for this moment; a list is asked for after it."""

    def read(self, item: dict[str, Any]) -> Any:
        """Return what is kept of an object; the rest need not be held until a list is complete."""

    def replace(self, items: list[Any], version: str, mark: int, namespace: str | None) -> None:
        """Hold exactly these objects of the namespace (None: of all), and what became known newer since `mark`."""

    def upsert(self, item: dict[str, Any]) -> None:
        """Hold this object, unless a newer state of it is known."""

    def remove(self, item: dict[str, Any]) -> None:
        """Forget this object."""


class Informer:
    """One list-and-watch. `synced` is set after the first list."""

    def __init__(
        self,
        source: ObjectSource,
        path: str,
        store: Store,
        selector: str = "",
        *,
        namespace: str | None = None,
        on_restored: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_restored` is told that the API server's history was replaced, after the store holds the new one."""
        self._source = source
        self._path = path
        self._store = store
        self._selector = selector
        self._namespace = namespace
        self._on_restored = on_restored
        self._seen_version = 0
        """The last one; versions only ever rise, as long as the history is the same."""
        self._has_gone_back = False
        self.synced = asyncio.Event()
        self._num_failures = 0
        """In a row, until a watch brought something."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self._watch(await self._list())
            except KubeError as error:
                # A list costs the API server much: only what a watch brings shows that the next will be worth it.
                self._num_failures += 1
                delay_s = min(after_failure_s(error, self._num_failures - 1, random.random()), MAX_DELAY_S)
                level = logging.INFO if isinstance(error, KubeGone) else logging.WARNING
                logger.log(level, "watch failed, listing again path=%s in_s=%.1f error=%s", self._path, delay_s, error)
                await asyncio.sleep(delay_s)
            except Exception:
                # The boundary of one watch: an unexpected object must not make the operator blind.
                logger.exception("watch failed by a bug, listing again path=%s in_s=%.0f", self._path, MAX_DELAY_S)
                await asyncio.sleep(MAX_DELAY_S)

    async def _list(self) -> str:
        mark, before = self._store.mark(), self._seen_version
        items, version = await self._source.list(self._path, self._selector, read=self._store.read)
        number = _number(version)
        self._store.replace(items, version, mark, self._namespace)
        self._seen_version = number
        self.synced.set()
        if self._has_gone_back or 0 < number < before:
            self._has_gone_back = False
            logger.warning("history was replaced, planning again path=%s version=%s was=%s", self._path, number, before)
            self._on_restored()
        return version

    async def _watch(self, version: str) -> None:
        """Follow changes, over reconnections, until the version is too old or the server does not answer."""
        num_breaks = num_silent = 0
        is_first = True
        while True:
            try:
                if not is_first:
                    await self._check_history()
                is_first = False
                num_silent += 1
                async for event in self._source.watch(self._path, version, self._selector):
                    version = self._followed(event.item["metadata"]["resourceVersion"])
                    num_breaks = num_silent = self._num_failures = 0
                    self._take(event.type, event.item)
            except KubeUnavailable as error:
                # The connection broke: go on where it was, unless the server is away for longer.
                num_breaks += 1
                if num_breaks > MAX_BREAKS:
                    raise
                await asyncio.sleep(after_failure_s(error, num_breaks, random.random()))
            else:
                # A server, or a proxy, that ends every watch at once is not to be asked without a pause.
                await asyncio.sleep(min(SILENT_S * num_silent, MAX_DELAY_S))

    async def _check_history(self) -> None:
        """Raise KubeGone when the history was replaced: a watch would wait in silence until it is as long again."""
        number = _number(await self._source.peek(self._path))
        if 0 < number < self._seen_version:
            self._has_gone_back = True
            raise KubeGone(f"the last version is {number}, and was {self._seen_version}")

    def _followed(self, version: str) -> str:
        """Return the version of an event. Raises KubeGone when it belongs to another history."""
        number = _number(version)
        if 0 < number < self._seen_version:
            self._has_gone_back = True
            raise KubeGone(f"a watch came to version {number}, after {self._seen_version}")
        self._seen_version = number or self._seen_version
        return version

    def _take(self, kind: str, item: dict[str, Any]) -> None:
        if kind == "DELETED":
            self._store.remove(item)
        elif kind != "BOOKMARK":
            self._store.upsert(item)


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
