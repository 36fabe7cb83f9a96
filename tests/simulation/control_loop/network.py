"""The way to the API server and back: calls that take time, that get lost on either way, and watches that lag.

The operator's own code calls `KubeClient` where it would call `Kube`: the same methods, and the same errors.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.control_loop.api_server import ApiError, ApiServer, Change, address_of

from unbroken_operator.adapters.errors import (
    KubeConflict,
    KubeError,
    KubeGone,
    KubeNotFound,
    KubeRefused,
    KubeUnavailable,
)
from unbroken_operator.adapters.kube import REQUEST_TIMEOUT_S, WATCH_TIMEOUT_S, WatchEvent

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld
    from tests.simulation.control_loop.operators import OperatorProcess

JsonObject = dict[str, Any]
SILENT_S = 60.0
"""After so long a client gives up a connection of which nothing comes."""
WRITES = ("create", "merge", "delete")


class Network:
    """Between the API server and all who ask it."""

    def __init__(self, world: ControlLoopWorld, api: ApiServer) -> None:
        self.world = world
        self.api = api
        self.random = random.Random(f"network {world.schedule.seed}")
        self.is_down = False
        """Whether the API server is away."""
        self.armed: dict[str, int] = {}
        """How many of the next calls meet which fate."""
        self.weather = 0.0
        """Share of all calls that meet some fate."""
        self.slow_until_s = 0.0
        self.lag_until: dict[str, tuple[float, float]] = {}
        """By kind: until when watches lag, and by how many seconds at most."""
        self.met: Counter[str] = Counter()
        """Fates that calls have met."""
        self.streams: dict[str, list[WatchStream]] = {}
        api.watchers.append(self._tell_streams)

    # ---------------------------------------------------------------------------------------------------------- calls

    def send(self, process: OperatorProcess, verb: str, what: str, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Make a call; the future gets the answer, or the error that the operator's client would raise."""
        future = process.loop.create_future()
        if process.loop.is_over:
            return future
        rng = self.random
        up_s, down_s = rng.uniform(0.001, 0.01), rng.uniform(0.001, 0.01)
        if self.world.now_s < self.slow_until_s:
            up_s, down_s = rng.uniform(0.0, 4.0), rng.uniform(0.0, 4.0)
        if process.is_cut_off:
            self._fail(process, future, REQUEST_TIMEOUT_S, f"{what}: time-out")
            return future
        if self.is_down:
            self._fail(process, future, rng.choice([0.01, 0.01, 1.0, REQUEST_TIMEOUT_S]), f"{what}: refused")
            return future
        fate = self._fate(verb)
        if not self._refuse(process, future, fate, what, up_s + down_s):
            self._deliver(process, future, fate, what, call, (up_s, down_s))
        return future

    def _refuse(
        self, process: OperatorProcess, future: asyncio.Future[Any], fate: str, what: str, after_s: float
    ) -> bool:
        """Answer a call that is not to be done; return whether it is one."""
        if fate in ("5xx", "429"):
            wait_s = self.random.choice([None, 1.0]) if fate == "429" else None
            self._fail(process, future, after_s, f"{what}: {fate}", wait_s)
        elif fate == "conflict":
            error = KubeConflict(f"{what}: 409 Operation cannot be fulfilled on resourcequotas")
            self.world.after(after_s, lambda: _answer(process, future, error), "")
        return fate in ("5xx", "429", "conflict")

    def _deliver(
        self,
        process: OperatorProcess,
        future: asyncio.Future[Any],
        fate: str,
        what: str,
        call: Callable[[], Any],
        ways_s: tuple[float, float],
    ) -> None:
        """Let a call take effect when it arrives, and its answer come some time later, if at all."""
        up_s, down_s = ways_s
        if fate == "late":
            # The client gives up first; what it has asked for is done all the same.
            self._fail(process, future, up_s + down_s, f"{what}: connection lost")
            up_s += self.random.uniform(0.0, 4.0)
            self.world.holds.excuse()
        lost_s = self.random.choice([0.01, 0.5, 5.0]) if fate == "lost" else None

        def arrive() -> None:
            result: Any
            if self.is_down:
                self._fail(process, future, down_s, f"{what}: broken off")
                return
            try:
                self.world.caller = process
                result = call()
            except ApiError as error:
                result = _kube_error(error, what)
            finally:
                self.world.caller = None
            if lost_s is not None:
                self._fail(process, future, down_s + lost_s, f"{what}: the answer got lost")
            elif fate != "late":
                self.world.after(down_s, lambda: _answer(process, future, result), "")

        self.world.after(up_s, arrive, "")

    def _fate(self, verb: str) -> str:
        """Return what becomes of a call, "" for nothing special."""
        for kind, left in self.armed.items():
            if left > 0 and (verb in WRITES or kind in ("5xx", "429")) and (verb == "create" or kind != "conflict"):
                self.armed[kind] = left - 1
                self.world.note_strike(kind)
                return kind
        if self.weather and self.random.random() < self.weather:
            kinds = ["5xx", "429", "lost", "lost", "late"] if verb in WRITES else ["5xx", "429"]
            kind = self.random.choice(kinds)
            self.world.note_strike(kind)
            return kind
        return ""

    def _fail(
        self,
        process: OperatorProcess,
        future: asyncio.Future[Any],
        after_s: float,
        text: str,
        retry_after_s: float | None = None,
    ) -> None:
        error = KubeUnavailable(text, retry_after_s)
        self.world.after(after_s, lambda: _answer(process, future, error), "")

    # -------------------------------------------------------------------------------------------------------- watches

    def go_down(self, lasts_s: float) -> None:
        """Let the API server be away."""
        self.is_down = True
        self.break_watches()

        def come_back() -> None:
            self.is_down = False

        self.world.after(lasts_s, come_back, f"the API server is back after {lasts_s:.1f} s")

    def break_watches(self) -> None:
        """Break every watch."""
        for streams in self.streams.values():
            for stream in list(streams):
                stream.break_off()

    def _tell_streams(self, collection: str, change: Change) -> None:
        for stream in self.streams.get(collection, ()):
            stream.send(change)

    def lag_s(self, kind: str) -> float:
        """Return how much later a watch tells of a change."""
        until_s, most_s = self.lag_until.get(kind, (0.0, 0.0))
        if self.world.now_s < until_s:
            return self.random.uniform(0.0, most_s)
        return self.random.uniform(0.001, 0.05)


class WatchStream:
    """One watch: an order of its own, and a lag of its own."""

    def __init__(self, network: Network, process: OperatorProcess, path: str, version: str, selector: str) -> None:
        self._network, self._process, self._selector = network, process, selector
        self._collection = address_of(path).collection
        self._kind = address_of(path).kind
        self._version = int(version)
        self._shown: set[str] = set()
        self._events: deque[WatchEvent | KubeError | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last_s = 0.0
        self._is_open = False

    def __aiter__(self) -> WatchStream:
        return self

    async def __anext__(self) -> WatchEvent:
        if not self._is_open:
            self._is_open = True
            await self._network.send(self._process, "watch", f"watch {self._kind}", self._open)
        while not self._events:
            self._waiter = self._process.loop.create_future()
            try:
                await self._waiter
            except BaseException:
                self._close()
                raise
            finally:
                self._waiter = None
        event = self._events.popleft()
        if isinstance(event, WatchEvent):
            return event
        self._close()
        if event is None:
            raise StopAsyncIteration
        raise event

    def _open(self) -> None:
        network = self._network
        changes = network.api.changes_after(self._collection, self._version)
        network.streams.setdefault(self._collection, []).append(self)
        self._shown = {item["metadata"]["uid"] for item in network.api.items(self._collection)}
        for change in changes:
            self.send(change)
        ends_s = network.random.uniform(0.5, 1.0) * WATCH_TIMEOUT_S
        network.world.after(ends_s, lambda: self._put(None), "")

    def send(self, change: Change) -> None:
        """Let a change arrive some time later, after all before it."""
        item, kind = change.item, change.type
        uid = item["metadata"]["uid"]
        if self._selector and self._selector not in (item["metadata"].get("labels") or {}):
            if uid not in self._shown:
                return
            self._shown.discard(uid)
            kind = "DELETED"
        else:
            self._shown.add(uid)
        if self._process.is_cut_off:
            return  # It does not arrive, and nobody notices before the silence has lasted too long.
        world = self._network.world
        self._last_s = max(self._last_s, world.now_s + self._network.lag_s(self._kind))
        event = WatchEvent(kind, item)
        world.after(self._last_s - world.now_s, lambda: self._put(event), "")

    def break_off(self) -> None:
        """Break the connection; what is under way is lost."""
        self._close()
        self._put(KubeUnavailable(f"watch of {self._kind}: broken off"), even_closed=True)

    def cut(self) -> None:
        """Lose all that comes from now on, and notice it by the silence."""
        self._close()
        error = KubeUnavailable(f"watch of {self._kind}: silence")
        self._network.world.after(SILENT_S, lambda: self._put(error, even_closed=True), "")

    def _put(self, event: WatchEvent | KubeError | None, *, even_closed: bool = False) -> None:
        if not even_closed and self not in self._network.streams.get(self._collection, ()):
            return
        if not even_closed and isinstance(event, WatchEvent) and self._process.is_cut_off:
            return
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _close(self) -> None:
        streams = self._network.streams.get(self._collection, [])
        if self in streams:
            streams.remove(self)

    @property
    def process(self) -> OperatorProcess:
        """Who watches."""
        return self._process


class KubeClient:
    """What an operator has in place of `Kube`."""

    def __init__(self, network: Network, process: OperatorProcess) -> None:
        self._network, self._process = network, process

    async def get(self, path: str) -> JsonObject:
        """See Kube."""
        found: JsonObject = await self._call("get", path, lambda: self._network.api.get(path))
        return found

    async def create(self, path: str, item: Mapping[str, Any]) -> JsonObject:
        """See Kube."""
        what = f"{path}/{item['metadata']['name']}"
        stored: JsonObject = await self._call("create", what, lambda: self._network.api.create(path, item))
        return stored

    async def merge(self, path: str, patch: Mapping[str, Any]) -> JsonObject:
        """See Kube."""
        stored: JsonObject = await self._call("merge", path, lambda: self._network.api.merge(path, patch))
        return stored

    async def delete(self, path: str, uid: str, is_forced: bool = False, *, resource_version: str = "") -> JsonObject:
        """See Kube."""
        api = self._network.api
        last: JsonObject = await self._call(
            "delete", path, lambda: api.delete(path, uid, is_forced=is_forced, version=resource_version)
        )
        return last

    async def peek(self, path: str) -> str:
        """See Kube."""
        return str((await self._call("list", path, lambda: self._network.api.list_of(path)))[1])

    async def list(
        self, path: str, selector: str = "", *, read: Callable[[JsonObject], Any] = lambda item: item
    ) -> tuple[list[Any], str]:
        """See Kube."""
        items, version = await self._call("list", path, lambda: self._network.api.list_of(path, selector))
        return [read(item) for item in items], str(version)

    def watch(self, path: str, resource_version: str, selector: str = "") -> WatchStream:
        """See Kube."""
        return WatchStream(self._network, self._process, path, resource_version, selector)

    async def _call(self, verb: str, path: str, call: Callable[[], Any]) -> Any:
        return await self._network.send(self._process, verb, f"{verb} {path}", call)


def _answer(process: OperatorProcess, future: asyncio.Future[Any], result: Any) -> None:
    if future.done() or process.loop.is_over:
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _kube_error(error: ApiError, what: str) -> KubeError:
    kinds: dict[int, type[KubeError]] = {404: KubeNotFound, 409: KubeConflict, 410: KubeGone}
    return kinds.get(error.code, KubeRefused)(f"{what}: {error}")
