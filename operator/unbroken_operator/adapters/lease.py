"""One Lease, so that one of several operators acts; written as client-go's leader election writes it.

    waits ──nobody holds it, or its holder is silent──> leads ──not renewed in 2/3 of its time──> may not act ──┐
                                                          │ ^──────────────────renewed──────────────────────────┤
                                                          └────────────another holder───────> lost <────────────┘

No clock of one host is compared with another's: a waiting replica counts from when it last saw the Lease change. An API
server that is away costs no leader its lead: it keeps what it remembers of its jobs, and goes on afterwards.

The election runs in a thread of its own, with connections of its own: no job keeps the main loop, or the API server's
line of calls, busy enough to delay a renewal. A main loop that hangs for good is what the liveness probe is for.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_operator.adapters.errors import KubeConflict, KubeError, KubeNotFound
from unbroken_operator.adapters.kube import CallObserver, Kube, collection_path
from unbroken_operator.adapters.tasks.loop_thread import LoopThread

logger = logging.getLogger(__name__)

API_VERSION = "coordination.k8s.io/v1"
RENEWALS = 4
"""In the time of a lease."""
LOOKS = 8
"""In the time of a lease, by a replica that waits for it."""
ACTING = 2 / 3
"""Part of a lease's time in which its holder may act: the rest is for what is on its way when it ends."""

MAX_TROUBLE = 300
"""Characters of an unexpected error that are logged."""


@dataclass(frozen=True)
class LeaseName:
    """Which Lease."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Sighting:
    """What a waiting replica knows of the Lease."""

    version: str
    """Resource version."""
    holder: str
    """"" when nobody has it."""
    duration_s: float
    transitions: int
    since_s: float
    """When this version was seen first."""


def look(before: Sighting | None, item: Mapping[str, Any], now_s: float) -> Sighting:
    """Return what is known after the Lease was read."""
    version = str(item["metadata"]["resourceVersion"])
    if before is not None and before.version == version:
        return before
    spec = item.get("spec") or {}
    return Sighting(
        version=version,
        holder=spec.get("holderIdentity") or "",
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        since_s=now_s,
    )


def is_free(seen: Sighting, identity: str, now_s: float) -> bool:
    """Whether the Lease may be taken."""
    return seen.holder in ("", identity) or now_s - seen.since_s >= seen.duration_s


class Lease:
    """This process' part in the election. Used by one task at a time."""

    def __init__(self, kube: Kube, name: LeaseName, identity: str, duration_s: int) -> None:
        self._kube = kube
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._seen: Sighting | None = None
        self._version = ""
        """Of the Lease as this process wrote it last."""
        self._held_until_s = float("-inf")
        self._trouble = ""
        self._is_told_waiting = False
        """Whether it was said that jobs wait for the lease."""
        self.is_in_touch = False
        """Whether the Lease could be read: from then on it is only a matter of time who leads."""

    @property
    def may_act(self) -> bool:
        """Whether nobody else can have the Lease now."""
        return _clock_s() < self._held_until_s

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self._attempt(self._take):
            await asyncio.sleep(self._duration_s / LOOKS)
        logger.info("leading lease=%s identity=%s", self._name, self._identity)

    async def keep(self) -> str:
        """Stay the leader until somebody else is, which is returned."""
        while True:
            left_s = self._held_until_s - _clock_s()
            is_fresh = left_s > self._duration_s * (ACTING - 1 / LOOKS)
            await asyncio.sleep(self._duration_s / (RENEWALS if is_fresh else LOOKS))
            if await self._attempt(self._renew) and self._seen is not None:
                self._held_until_s = float("-inf")
                return self._seen.holder
            self._tell_whether_jobs_wait()

    def _tell_whether_jobs_wait(self) -> None:
        """Say once for all jobs that nothing is done for them, and once that it is again."""
        if self.may_act is not self._is_told_waiting:
            return
        self._is_told_waiting = not self.may_act
        if self._is_told_waiting:
            logger.error("all jobs wait: the lease cannot be renewed, another may hold it lease=%s", self._name)
        else:
            logger.info("jobs go on: the lease is renewed lease=%s", self._name)

    async def release(self) -> None:
        """Let the next one lead at once, if this process does. To be called when nothing acts any more."""
        if not self.may_act:
            return
        self._held_until_s = float("-inf")
        try:
            async with asyncio.timeout(self._duration_s):
                await self._write({"holderIdentity": "", "leaseDurationSeconds": 1})
        except (KubeError, TimeoutError) as error:
            logger.warning("lease is not released, it runs out lease=%s error=%s", self._name, error)

    async def _attempt(self, step: Callable[[], Awaitable[bool]]) -> bool:
        """Do one step in bounded time; False as well when it fails. Trouble that lasts is logged once."""
        trouble, is_done = "", False
        try:
            async with asyncio.timeout(self._duration_s * ACTING):
                is_done = await step()
            self.is_in_touch = True
        except TimeoutError:
            trouble = "no answer in time"
        except KubeError as error:
            trouble = str(error)
        except Exception as error:
            # A Lease that somebody else has written, and that cannot be read, must not end the election in silence.
            trouble = f"{type(error).__name__}: {error}"[:MAX_TROUBLE]
        if trouble and trouble != self._trouble:
            logger.warning("lease is out of reach lease=%s error=%s", self._name, trouble)
        self._trouble = trouble
        return is_done

    async def _take(self) -> bool:
        """Take the Lease if it is free; return whether it was."""
        item = await self._read()
        sent_s = _clock_s()
        if item is None:
            return await self._create(sent_s)
        before, self._seen = self._seen, look(self._seen, item, sent_s)
        if not is_free(self._seen, self._identity, sent_s):
            if before is None or before.holder != self._seen.holder:
                logger.info("waiting for the lease lease=%s holder=%s", self._name, self._seen.holder)
            return False
        self._version = self._seen.version
        try:
            await self._write(self._spec(self._seen.transitions + 1, _now()), sent_s)
        except KubeConflict:
            return False
        return True

    async def _renew(self) -> bool:
        """Renew the Lease; return whether another one has it; `_seen` then names it."""
        sent_s = _clock_s()
        try:
            await self._write({"renewTime": _now()}, sent_s)
        except (KubeConflict, KubeNotFound):
            item = await self._read()
            if item is None:
                return not await self._create(sent_s) and await self._renew()
            self._seen = look(None, item, sent_s)
            self._version = self._seen.version
            if self._seen.holder != self._identity:
                return True
            await self._write({"renewTime": _now()}, sent_s)
        return False

    async def _read(self) -> Mapping[str, Any] | None:
        try:
            return await self._kube.get(self._path(self._name.name))
        except KubeNotFound:
            return None

    async def _create(self, sent_s: float) -> bool:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": {"name": self._name.name, "namespace": self._name.namespace},
            "spec": self._spec(0, _now()),
        }
        try:
            self._hold(await self._kube.create(self._path(), manifest), sent_s)
        except KubeConflict:
            return False
        return True

    async def _write(self, spec: Mapping[str, Any], sent_s: float | None = None) -> None:
        # The version makes the API server refuse the write when anybody else has written since.
        patch = {"metadata": {"resourceVersion": self._version}, "spec": spec}
        item = await self._kube.merge(self._path(self._name.name), patch)
        if sent_s is not None:
            self._hold(item, sent_s)

    def _hold(self, item: Mapping[str, Any], sent_s: float) -> None:
        """Count from when the write was sent: the others count from when they saw it, which is later."""
        self._version = str(item["metadata"]["resourceVersion"])
        self._held_until_s = sent_s + self._duration_s * ACTING

    def _spec(self, transitions: int, now: str) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _path(self, name: str = "") -> str:
        path = collection_path("leases", self._name.namespace, API_VERSION)
        return f"{path}/{name}" if name else path


class Election:
    """A lease's coroutines, for a main loop that may be busy: they run in the thread of the election."""

    def __init__(self, thread: LoopThread, lease: Lease) -> None:
        self._thread = thread
        self._lease = lease

    @property
    def may_act(self) -> bool:
        """See Lease."""
        return self._lease.may_act

    @property
    def is_in_touch(self) -> bool:
        """See Lease."""
        return self._lease.is_in_touch

    async def acquire(self) -> None:
        """See Lease."""
        await self._thread.run(self._lease.acquire())

    async def keep(self) -> str:
        """See Lease."""
        return await self._thread.run(self._lease.keep())

    async def release(self) -> None:
        """See Lease."""
        await self._thread.run(self._lease.release())


@contextlib.asynccontextmanager
async def electing(
    kubeconfig: str | None, name: LeaseName, identity: str, duration_s: int, on_call: CallObserver = lambda *_: None
) -> AsyncIterator[Election]:
    """Take part in the election while the context lasts. Raises InputError."""
    async with LoopThread("lease") as thread:
        kube = await thread.run(Kube.connect(kubeconfig, on_call))
        try:
            yield Election(thread, Lease(kube, name, identity, duration_s))
        finally:
            await thread.run(kube.close())


def _clock_s() -> float:
    """Return monotonic seconds."""
    return asyncio.get_running_loop().time()


def _now() -> str:
    """Return the time of day, for people who read the Lease."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
