"""Processes of the operator: its own lease, jobs, workers, watches and plans, each in an event loop of its own.

What production has around them is modelled: kopf's watch of jobs is `_watch_jobs`, and the process that ends when it
has lost its lease, as `__main__` does, is `_work`. A process may end at any moment; another one comes after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.simulation.control_loop.names import JOBS, LEASE, LEASE_S, NAMESPACE
from tests.simulation.control_loop.network import KubeClient
from tests.simulation.control_loop.rendezvous import RendezvousClient
from tests.simulation.control_loop.virtual_loop import VirtualLoop

from unbroken_operator.adapters.errors import KubeError
from unbroken_operator.adapters.lease import Lease
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.tasks.supervision import end_all
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.jobs import Jobs

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld


class QuietMetrics(OperatorMetrics):
    """Measures that outlive the operators of one run."""

    def show_jobs(self, statuses: Any) -> None:
        """Show nothing: nobody scrapes."""


_METRICS: list[QuietMetrics] = []


def shared_metrics() -> QuietMetrics:
    """Return the measures of all runs: to make them takes as long as a run."""
    if not _METRICS:
        _METRICS.append(QuietMetrics())
    return _METRICS[0]


class OperatorProcess:
    """One process."""

    def __init__(self, world: ControlLoopWorld, number: int) -> None:
        self.world = world
        self.identity = f"operator-{number}"
        self.is_cut_off = False
        """Whether it does not reach the API server, without being told so."""
        self.is_deaf = False
        """Whether it does not reach any rendezvous."""
        self.leads_since_s: float | None = None
        self.loop = VirtualLoop(lambda: world.now_s, self._wake_at)
        self.lease: Lease | None = None
        with self.loop.running():
            self.main = self.loop.create_task(self._main(), name=self.identity)
        self.main.add_done_callback(lambda _task: world.operators.ended(self))

    def _wake_at(self, at_s: float) -> None:
        self.world.after(max(at_s - self.world.now_s, 0.0), self.loop.run_due, "")

    @property
    def may_act(self) -> bool:
        """Whether it believes that it leads."""
        with self.loop.running():
            return self.lease is not None and self.lease.may_act

    async def _main(self) -> None:
        kube: Any = KubeClient(self.world.network, self)
        lease = self.lease = Lease(kube, LEASE, self.identity, LEASE_S)
        await lease.acquire()
        self.leads_since_s = self.world.now_s
        work = asyncio.create_task(self._work(kube, lease), name="work")
        keeping = asyncio.create_task(lease.keep(), name="lease")
        await asyncio.wait([work, keeping], return_when=asyncio.FIRST_COMPLETED)
        self.leads_since_s = None
        await end_all([work, keeping])

    async def _work(self, kube: Any, lease: Lease) -> None:
        options = OperatorOptions("sidecar:1", encrypts=False, lease=str(LEASE))
        client: Any = RendezvousClient(self.world, self)
        jobs = Jobs(kube, client, options, shared_metrics(), (NAMESPACE,), may_act=lambda: lease.may_act)
        try:
            await jobs.start()
            while True:
                await self._watch_jobs(kube, jobs)
                await asyncio.sleep(1.0)
        finally:
            await jobs.stop()

    async def _watch_jobs(self, kube: Any, jobs: Jobs) -> None:
        """Do what kopf does: list, then watch. It tells of no job that went while the watch was broken."""
        try:
            items, version = await kube.list(JOBS)
            for job in items:
                jobs.observe(None, job)
            async for event in kube.watch(JOBS, version):
                jobs.observe(event.type, event.item)
        except KubeError:
            return


class Operators:
    """The processes that there are. A Deployment starts another one for each that ends."""

    def __init__(self, world: ControlLoopWorld, num: int) -> None:
        self.world = world
        self.processes: list[OperatorProcess] = []
        self._num = 0
        self._cut: dict[OperatorProcess, int] = {}
        for _number in range(num):
            self.start()

    def start(self) -> None:
        """Start a process."""
        if not self.world.is_over:
            self.processes.append(OperatorProcess(self.world, self._num))
            self._num += 1

    def ended(self, process: OperatorProcess) -> None:
        """Start another one some time after a process has ended."""
        if process not in self.processes:
            return
        self.processes.remove(process)
        process.loop.end()
        self.world.after(self.world.random.uniform(0.3, 5.0), self.start, "an operator starts")

    def crash(self, process: OperatorProcess) -> None:
        """End a process at once."""
        if process in self.processes:
            self.processes.remove(process)
            process.loop.end()
            self.world.after(self.world.random.uniform(0.3, 15.0), self.start, "an operator starts")

    @property
    def leader(self) -> OperatorProcess | None:
        """The process that acts now."""
        return next((process for process in self.processes if process.leads_since_s is not None), None)

    def cut_off(self, process: OperatorProcess, lasts_s: float) -> None:
        """Let a process not reach the API server."""
        process.is_cut_off = True
        self._cut[process] = self._cut.get(process, 0) + 1
        for streams in self.world.network.streams.values():
            for stream in [stream for stream in streams if stream.process is process]:
                stream.cut()

        def mend() -> None:
            self._cut[process] -= 1
            process.is_cut_off = self._cut[process] > 0

        self.world.after(lasts_s, mend, f"{process.identity} reaches the API server again")

    def end(self) -> None:
        """End all of them."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.loop.end()
