"""All jobs: one worker each, and the watches that wake them."""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from unbroken_operator.adapters.device_taints.looking import Claimant
from unbroken_operator.adapters.errors import KubeError
from unbroken_operator.adapters.executor import Services
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.listening import Rarely
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.adapters.stores import JobKey, NodeStore, PodStore, ServiceStore
from unbroken_operator.adapters.tasks.supervision import end_all, keep_running
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import held
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.quarantine import JobsView
from unbroken_operator.decisions.snapshot import NodeView, OperatorOptions, PodView
from unbroken_operator.worker import JobWorker

logger = logging.getLogger(__name__)

SWEEP_S = 300.0
RETRY_SWEEP_S = 2.0


class Jobs:
    """Runs in one event loop. `namespaces` empty means all."""

    def __init__(
        self,
        kube: Kube,
        client: RendezvousApi,
        options: OperatorOptions,
        metrics: OperatorMetrics,
        namespaces: tuple[str, ...],
        *,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        pods = PodStore(self.wake, self._note_cut)
        services, nodes = ServiceStore(self.wake), NodeStore(self._wake_on_node)
        self._kube = kube
        self._rarely = Rarely()
        self._shared = Services(kube, client, pods, services, nodes, options, metrics, may_act)
        self._namespaces = namespaces
        self._workers: dict[JobKey, tuple[JobWorker, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self.restored = asyncio.Event()
        """Set when the API server's history was replaced: a watch of jobs begins anew, and clears it."""
        self._is_sweep_due = asyncio.Event()
        self._informers = [Informer(kube, collection_path("nodes"), nodes, on_restored=self._note_restored)]
        for namespace in namespaces or (None,):
            for resource, store in (("pods", pods), ("services", services)):
                path = collection_path(resource, namespace)
                selector, told = layout.JOB_LABEL, self._note_restored
                self._informers.append(Informer(kube, path, store, selector, namespace=namespace, on_restored=told))
        metrics.show_jobs(self.statuses)

    async def start(self) -> None:
        """Start the watches and wait until each has listed once: no plan is made from half of the cluster."""
        self._tasks = [
            asyncio.create_task(keep_running(f"informer {index}", informer.run), name=f"informer {index}")
            for index, informer in enumerate(self._informers)
        ]
        for informer in self._informers:
            await informer.synced.wait()
        self._tasks.append(asyncio.create_task(keep_running("sweep", self._sweep), name="sweep"))
        logger.info("watching namespaces=%s", ",".join(self._namespaces) or "*")

    async def stop(self) -> None:
        """Stop everything for good; pods stay as they are. Harmless when repeated."""
        self._is_stopped = True
        tasks = [*self._tasks, *(task for _, task in self._workers.values())]
        self._tasks, self._workers = [], {}
        await end_all(tasks)
        self._shared.planner.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Whether every watch has listed."""
        return bool(self._tasks) and all(informer.synced.is_set() for informer in self._informers)

    def observe(self, kind: str | None, job: Mapping[str, Any]) -> None:
        """Take an event of the watch of jobs: ADDED, MODIFIED, DELETED, or None for one that is there."""
        if self._is_stopped:
            return
        key = (job["metadata"]["namespace"], job["metadata"]["name"])
        running = self._workers.get(key)
        uid = job["metadata"]["uid"]
        if kind == "DELETED":
            if running is not None and running[0].uid == uid:
                self._end(key)
            return
        if running is not None and running[0].uid == uid and not running[1].done():
            running[0].update(job)
            return
        if running is not None:
            self._end(key)
        worker = JobWorker(job, self._shared)
        name = f"job {key[0]}/{key[1]}"
        work = keep_running(name, worker.run, self._shared.metrics.reconcile_errors.inc)
        # A task keeps the context in which it was made: kopf's has the whole job in it, whatever its size.
        context = contextvars.Context()
        task = context.run(partial(asyncio.create_task, work, name=name))
        task.add_done_callback(lambda ended: self._ended(key, worker, ended), context=context)
        self._workers[key] = (worker, task)

    def wake(self, key: JobKey) -> None:
        """Wake a job's worker, if there is one."""
        running = self._workers.get(key)
        if running is not None:
            running[0].wake()

    def statuses(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Return namespace, name and status of every job."""
        for (namespace, name), (worker, _) in sorted(self._workers.items()):
            yield namespace, name, worker.job.get("status") or {}

    def nodes(self) -> Mapping[str, NodeView]:
        """Return all nodes by name."""
        return self._shared.nodes.nodes

    def blames(self) -> Iterator[JobsView]:
        """Return what each job says of nodes."""
        for key, (worker, _) in sorted(self._workers.items()):
            suspects = (worker.job.get("status") or {}).get("suspectNodes") or ()
            yield JobsView(*key, suspects, self._shared.pods.hosts(key, worker.uid) if suspects else frozenset())

    def claimants(self) -> Iterator[Claimant]:
        """Return the training pods whose devices are to be looked at."""
        for key, (worker, _) in sorted(self._workers.items()):
            if worker.minds_devices:
                for pod in self._shared.pods.claimants(key, worker.uid):
                    yield Claimant(key[0], pod.uid, pod.node, pod.claims)

    def note_tainted(self, found: Mapping[str, str]) -> None:
        """Take why pods are to leave because of their devices, by uid."""
        self._shared.pods.note_tainted(found)

    def _note_cut(self, key: JobKey, pod: PodView) -> None:
        """Tell of a pod that was made to cost much: once in a while, since there may be any number."""
        self._shared.metrics.count_refusal(OperatorRefusal.POD)
        if self._rarely.may_tell("pod", time.monotonic()):
            logger.warning("pod is not held as it is pod=%s/%s because=%s", key[0], pod.name, pod.cut)

    def _note_restored(self) -> None:
        self.restored.set()
        self._is_sweep_due.set()

    def _wake_on_node(self, node: str) -> None:
        for key in self._shared.pods.jobs_on(node):
            self.wake(key)

    def _end(self, key: JobKey) -> None:
        worker, task = self._workers.pop(key)
        worker.is_gone = True
        task.cancel()

    def _ended(self, key: JobKey, worker: JobWorker, task: asyncio.Task[None]) -> None:
        running = self._workers.get(key)
        if running is not None and running[0] is worker:
            del self._workers[key]
        if not task.cancelled() and task.exception() is not None:
            # The sweep starts it again: one job's trouble is not the others'.
            logger.error("worker ended by a bug job=%s/%s", *key, exc_info=task.exception())

    async def _sweep(self) -> None:
        """Compare with the API server now and then: kopf reports no job that was deleted while its watch was broken."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_sweep_due.wait(), SWEEP_S)
            is_urgent = self._is_sweep_due.is_set()
            self._is_sweep_due.clear()
            before = {key: worker.job for key, (worker, _) in self._workers.items()}
            try:
                jobs: list[dict[str, Any]] = []
                for namespace in self._namespaces or (None,):
                    path = collection_path(layout.PLURAL, namespace, layout.API_VERSION)
                    jobs += (await self._kube.list(path, read=held))[0]
            except KubeError as error:
                logger.warning("sweep failed error=%s", error)
                if is_urgent:
                    await asyncio.sleep(RETRY_SWEEP_S)
                    self._is_sweep_due.set()
                continue
            uids = {job["metadata"]["uid"] for job in jobs}
            for worker in [worker for worker, _ in self._workers.values() if worker.uid not in uids]:
                await worker.check_existence()
                worker.wake()
            for job in jobs:
                self._take_listed(job, before)

    def _take_listed(self, job: Mapping[str, Any], before: Mapping[JobKey, Mapping[str, Any]]) -> None:
        """Take a job of a list, which knows better than what was known `before` it was asked for."""
        key = (job["metadata"]["namespace"], job["metadata"]["name"])
        running = self._workers.get(key)
        if running is not None and running[0].uid == job["metadata"]["uid"] and running[0].job is before.get(key):
            running[0].replace(job)
        self.observe(None, job)
