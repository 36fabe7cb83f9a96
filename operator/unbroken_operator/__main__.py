"""`python -m unbroken_operator`: runs until SIGTERM or SIGINT, or until another operator leads."""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters import logs
from unbroken_operator.adapters.device_taints.looking import DeviceTaints
from unbroken_operator.adapters.discovery import is_served, wait_for_api
from unbroken_operator.adapters.endpoints import serving
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.lease import Election, electing
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.permissions import reporting_missing_rights, rights
from unbroken_operator.adapters.quarantine_taints import QuarantineTaints
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.adapters.tasks.supervision import end_all, keep_running
from unbroken_operator.adapters.webhook import reviewing
from unbroken_operator.config import Config, parse
from unbroken_operator.decisions.quarantine import QuarantineMode
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.handlers import run_operator
from unbroken_operator.jobs import Jobs

logger = logging.getLogger(__name__)


STATUS_LEASE_LOST = 3
STATUS_NOT_ENDED = 4
END_S = 25.0
"""So long after a signal the process ends, whatever of it does not: Kubernetes kills it after 30 s, without a word."""
SWITCH_S = 0.001
"""How long a busy thread may keep the interpreter from the others."""


@dataclass(frozen=True)
class Flags:
    """Set when the operator is to stop, and when it watches."""

    stop: asyncio.Event
    ready: asyncio.Event
    may_act: Callable[[], bool] = lambda: True


async def run(config: Config) -> int:
    """Run until SIGTERM or SIGINT, or until another operator leads; return the exit status. Raises InputError.

    The process ends soon after that, whatever hangs.
    """
    metrics = OperatorMetrics()
    stop, ready = asyncio.Event(), asyncio.Event()
    _stop_on_signals(stop)
    bound = asyncio.create_task(_bound_the_end(stop), name="bound")
    kube = await Kube.connect(config.kubeconfig, metrics.count_call)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(kube.close)
        stack.callback(bound.cancel)
        client = await stack.enter_async_context(RendezvousApi())
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        lease = None
        if config.lease is not None:
            lease = await stack.enter_async_context(
                electing(config.kubeconfig, config.lease, identity, config.lease_s, metrics.count_call)
            )

        def is_ready() -> bool:
            # A replica that waits for the lease is ready to take over.
            return ready.is_set() or (lease is not None and lease.is_in_touch and not lease.may_act)

        for address, has_metrics in ((config.metrics_listen, True), (config.liveness_listen, False)):
            endpoints = serving(address, metrics.registry, is_ready, has_metrics, metrics.count_refused)
            await stack.enter_async_context(endpoints)
        wanted = rights(
            config.namespaces,
            config.lease,
            has_taints=config.quarantine is QuarantineMode.ON,
            has_node_condition=config.has_node_condition,
            has_policies=config.network_policy is not None,
        )
        await stack.enter_async_context(reporting_missing_rights(kube, wanted))
        reviews = reviewing(config.webhook, config.namespaces, metrics.count_review, metrics.count_refused)
        await stack.enter_async_context(reviews)
        if lease is None:
            await _until_stopped(_work(config, kube, client, metrics, Flags(stop, ready)), stop, ready)
            return 0
        metrics.show_lead(lambda: lease.may_act)
        flags = Flags(stop, ready, lambda: lease.may_act)
        return await _lead(lease, lambda: _work(config, kube, client, metrics, flags), flags)


async def _lead(lease: Election, work: Callable[[], Coroutine[None, None, None]], flags: Flags) -> int:
    """Work as long as this process leads; return the exit status."""
    await _until_stopped(lease.acquire(), flags.stop)
    if flags.stop.is_set():
        await lease.release()
        return 0
    keeping = asyncio.create_task(lease.keep(), name="lease")
    # All that the jobs' tasks do is at an end before the next leader begins.
    keeping.add_done_callback(lambda _: flags.stop.set())
    await _until_stopped(work(), flags.stop, flags.ready)
    if keeping.done():
        logger.warning("lease is lost, ending to be started again holder=%s", keeping.result())
        return STATUS_LEASE_LOST
    await end_all([keeping])
    await lease.release()
    return 0


async def _until_stopped(
    what: Coroutine[None, None, None], stop: asyncio.Event, ready: asyncio.Event | None = None
) -> None:
    """Run to the end, or until `stop` is set; once ready, `what` sees that itself and ends."""
    work = asyncio.create_task(what, name="operator")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if ready is None or not ready.is_set():
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _work(
    config: Config,
    kube: Kube,
    client: RendezvousApi,
    metrics: OperatorMetrics,
    flags: Flags,
) -> None:
    is_native = await wait_for_api(kube, config.namespaces)
    options = OperatorOptions(
        config.sidecar_image,
        has_native_sidecars=is_native,
        force_delete_after_s=config.force_delete_after_s,
        encrypts=config.encrypts,
        rendezvous_images=config.rendezvous_images,
        lease="" if config.lease is None else str(config.lease),
        sidecar_resources=config.sidecar_resources,
        rendezvous_resources=config.rendezvous_resources,
        network_policy=config.network_policy,
    )
    jobs = Jobs(kube, client, options, metrics, config.namespaces, may_act=flags.may_act)
    quarantine = QuarantineTaints(
        kube,
        jobs.nodes,
        jobs.blames,
        mode=config.quarantine,
        limits=config.quarantine_limits,
        has_condition=config.has_node_condition,
        may_act=flags.may_act,
        count_withheld=metrics.count_withheld,
    )
    devices = DeviceTaints(kube, jobs.claimants, jobs.note_tainted)
    keeping: list[asyncio.Task[None]] = []
    try:
        await jobs.start()
        for name, work in (("quarantine", quarantine.run), ("device taints", devices.run)):
            keeping.append(asyncio.create_task(keep_running(name, work), name=name))
        await run_operator(
            jobs,
            config.kubeconfig,
            config.namespaces,
            flags.stop,
            flags.ready,
            is_served=lambda: is_served(kube, config.namespaces),
        )
    finally:
        await end_all(keeping)
        await jobs.stop()


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _bound_the_end(stop: asyncio.Event) -> None:
    await stop.wait()
    threading.Thread(target=_end_in_time, name="end", daemon=True).start()


def _end_in_time(limit_s: float = END_S) -> None:
    """End the process if it has not ended by then. Its lease is not released, and runs out: nobody leads beside it."""
    time.sleep(limit_s)
    logger.error("did not end in time, ending now in_s=%.0f; what it was doing follows", limit_s)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(STATUS_NOT_ENDED)


def _make_room() -> None:
    """Prepare for thousands of jobs: a connection each, and many long-lived objects."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # With Python's own thresholds a list of thousands of pods is mostly looked through for garbage.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    # Threads that read what jobs report must not make the others wait, such as the one that renews the lease.
    sys.setswitchinterval(SWITCH_S)


def main() -> int:
    """Return the exit status: 0 after a signal, 2 for wrong settings, 3 when another operator leads, 4 when
    it did not end in time.
    """
    try:
        config = parse()
        logs.configure(config.is_json_log, config.log_level)
        _make_room()
        return asyncio.run(run(config))
    except InputError as error:
        print(f"unbroken_operator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
