"""The life of one pod on one node: volumes, containers, status, end. One task a pod, beside one a running container."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, pause_s
from unbroken_local.kube.events import timestamp
from unbroken_local.kubelet.context import NodeContext
from unbroken_local.kubelet.decide import (
    ContainerState,
    Decision,
    Phase,
    StartContainer,
    Stop,
    StopContainer,
    decide,
    waiting,
    will_run_again,
)
from unbroken_local.kubelet.environment import ConfigError, Sources
from unbroken_local.kubelet.payload import MountError
from unbroken_local.kubelet.refresh import TokenCache, VolumeRefresher
from unbroken_local.kubelet.run import ContainerRun, PodRuntime
from unbroken_local.kubelet.spec import ContainerSpec, read_pod
from unbroken_local.kubelet.status import PodFacts, build_status
from unbroken_local.kubelet.status_writer import StatusWriter
from unbroken_local.kubelet.volumes import VolumeContext, make_volumes

log = logging.getLogger(__name__)

FORCED_GRACE_S = 2.0
"""What the containers of a pod get whose object is gone already."""


class PodRunner:
    """Runs one pod (one uid). `update`, `vanish`, `crash` and `recover` may be called at any time."""

    def __init__(self, pod: Json, node: NodeContext) -> None:
        self.pod = pod
        self.spec = read_pod(pod)
        self.states: dict[str, ContainerState] = {c.name: ContainerState() for c in self.spec.containers}
        self.pod_ip = node.address if self.spec.is_host_network else ""
        self._node = node
        self._runs: dict[str, ContainerRun] = {}
        self._failures: dict[str, int] = {}
        self._volumes: dict[str, Path] | None = None
        self._stop: Stop | None = None
        self._is_deleting = False
        self._is_gone = asyncio.Event()
        self._is_down = False
        self._wake = asyncio.Event()
        self._start_time = str((pod.get("status") or {}).get("startTime") or timestamp())
        self._began_s = time.monotonic()
        self._setup: asyncio.Task[None] | None = None
        self._tokens = TokenCache(lambda account, source: node.fetch_token(self.spec.namespace, account, source))
        self._refresher = VolumeRefresher(self._volume_context, self._warn_of_mount)
        self._refreshing: list[asyncio.Task[None]] = []
        self._writer = StatusWriter(node.client, self.spec, self._build_status)
        self._was_over = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}

    def start(self, done: Callable[["PodRunner"], None]) -> asyncio.Task[None]:
        """Run the pod in a task of its own; `done` is called when nothing of it is left."""
        task = asyncio.create_task(self._run(), name=f"pod {self.spec.namespace}/{self.spec.name}")
        task.add_done_callback(lambda _: done(self))
        self.update(self.pod)
        return task

    def update(self, pod: Json) -> None:
        """Take note of the newest object."""
        has_new_labels = any(pod["metadata"].get(k) != self.pod["metadata"].get(k) for k in ("labels", "annotations"))
        self.pod = pod
        self._writer.observe(pod)
        if pod["metadata"].get("deletionTimestamp"):
            grace = pod["metadata"].get("deletionGracePeriodSeconds")
            self._is_deleting = True
            self._stop_by(time.monotonic() + (self.spec.grace_s if grace is None else float(grace)))
        elif has_new_labels and self._volumes is not None:
            refresh = self._refresher.refresh(self._volumes, ("downwardAPI", "projected"))
            self._refreshing = [task for task in self._refreshing if not task.done()]
            self._refreshing.append(asyncio.create_task(refresh))
        self._wake.set()

    def vanish(self) -> None:
        """The object is gone: end what still runs, tell nobody."""
        self._is_gone.set()
        self._writer.close()
        self._stop_by(time.monotonic() + min(self.spec.grace_s, FORCED_GRACE_S))
        self._wake.set()

    def crash(self) -> None:
        """The node is down: everything dies at once, and nothing is said about it."""
        self._is_down = True
        self._writer.pause()
        if self._setup is not None:
            self._setup.cancel()
        for run in self._runs.values():
            run.kill()

    def fall_silent(self) -> None:
        """The node says nothing any more; what runs goes on."""
        self._writer.pause()

    def recover(self) -> None:
        """The node is back: go on with what is left."""
        self._is_down = False
        self._writer.resume()
        self._wake.set()

    def is_live(self, container: str, restarts: int) -> bool:
        """Return whether this run of a container may still write to its log."""
        run = self._runs.get(container)
        return run is not None and not run.is_done and self.states[container].restarts <= restarts

    def log_file(self, container: str, restarts: int) -> Path:
        """Return the log of one run of a container."""
        return self._node.folders.log(self.spec, container, restarts)

    def _stop_by(self, deadline_s: float, reason: str = "", message: str = "") -> None:
        old = self._stop
        if old is None:
            self._stop = Stop(deadline_s, reason, message)
        elif deadline_s < old.deadline_s:
            self._stop = replace(old, deadline_s=deadline_s)

    async def _run(self) -> None:
        writer = asyncio.create_task(self._writer.run())
        try:
            while not (await self._step()):
                pass
        except asyncio.CancelledError:
            for run in self._runs.values():
                run.kill()
            raise
        except Exception:
            log.exception("pod runner failed: pod=%s/%s", self.spec.namespace, self.spec.name)
            raise
        finally:
            writer.cancel()
            for task in self._refreshing:
                task.cancel()
            await asyncio.gather(*self._refreshing, return_exceptions=True)
            if self._setup is not None:
                self._setup.cancel()
            await asyncio.to_thread(self._node.folders.remove_volumes, self.spec)

    async def _step(self) -> bool:
        """Collect ended runs, decide, act, publish, wait. Returns whether nothing is left to do for ever."""
        self._wake.clear()
        self._collect()
        if self._is_down:
            is_quiet = not any(not run.is_done for run in self._runs.values())
            if self._is_gone.is_set() and is_quiet:
                return True
            await self._wait(None)
            return False
        now_s = time.monotonic()
        self._check_deadline(now_s)
        decision = self._decide(now_s)
        for action in decision.actions:
            self._act(action)
        self._writer.touch()
        is_quiet = all(run.is_done for run in self._runs.values())
        if decision.is_over and is_quiet and (self._is_gone.is_set() or self._is_deleting):
            await self._finish()
            return self._is_gone.is_set()
        if not self._wake.is_set():
            await self._wait(self._wake_at_s(decision))
        return False

    def _decide(self, now_s: float) -> Decision:
        if self._was_over:  # It ended before this kubelet started: there is nothing to run.
            return Decision(is_over=True)
        if self._stop is None and self._volumes is None:
            if self._setup is None or self._setup.done():
                self._setup = asyncio.create_task(self._make_volumes())
            return Decision()
        return decide(self.spec, self.states, self._stop, now_s)

    def _check_deadline(self, now_s: float) -> None:
        limit_s = self.spec.active_deadline_s
        if limit_s is not None and now_s >= self._began_s + limit_s and self._stop is None:
            message = "Pod was active on the node longer than the specified deadline"
            self._stop_by(now_s + self.spec.grace_s, "DeadlineExceeded", message)

    def _wake_at_s(self, decision: Decision) -> float | None:
        times = [decision.wake_at_s] if decision.wake_at_s is not None else []
        if self.spec.active_deadline_s is not None and self._stop is None and not decision.is_over:
            times.append(self._began_s + self.spec.active_deadline_s)
        return min(times, default=None)

    async def _wait(self, until_s: float | None) -> None:
        try:
            timeout = None if until_s is None else max(until_s - time.monotonic(), 0.001)
            await asyncio.wait_for(self._wake.wait(), timeout)
        except TimeoutError:
            pass

    def _act(self, action: StartContainer | StopContainer) -> None:
        run = self._runs.get(action.name)
        is_running = run is not None and not run.is_done
        if isinstance(action, StopContainer):
            if run is not None and is_running:
                run.stop(time.monotonic() + self.spec.grace_s if action.deadline_s is None else action.deadline_s)
        elif not is_running:
            container = next(c for c in self.spec.containers if c.name == action.name)
            runtime = PodRuntime(
                self.spec, self._node, lambda: self.pod, self.pod_ip, self._volumes or {}, lambda: self.spec.grace_s
            )
            self._runs[action.name] = run = ContainerRun(container, runtime, self.states[action.name], self._wake.set)
            self.states[action.name] = run.state

    def _collect(self) -> None:
        """Take over the state of every run; decide on the pause after those that ended."""
        for container in self.spec.containers:
            run = self._runs.get(container.name)
            if run is None:
                continue
            self.states[container.name] = run.state
            if run.is_done:
                del self._runs[container.name]
                self.states[container.name] = self._after(container, run)

    def _after(self, container: ContainerSpec, run: ContainerRun) -> ContainerState:
        state, now_s = run.state, time.monotonic()
        if state.phase is not Phase.TERMINATED and not run.image_failed:
            return state
        back_off = self._node.back_off
        has_lasted = run.started_s is not None and now_s - run.started_s > back_off.reset_s
        failures = self._failures[container.name] = 1 if has_lasted else self._failures.get(container.name, 0) + 1
        pause = back_off.pause_s(failures)
        if run.image_failed:
            return self._after_image(container, state, failures, now_s + max(pause, back_off.base_s))
        if not will_run_again(self.spec, container, state) or self._stop is not None or pause <= 0:
            return replace(state, not_before_s=now_s + pause)
        message = (
            f"back-off {pause:g}s restarting failed container={container.name} "
            f"pod={self.spec.name}_{self.spec.namespace}({self.spec.uid})"
        )
        self._node.events.record(self.pod, "Warning", "BackOff", message, self._node.name)
        return waiting(state, "CrashLoopBackOff", message, now_s + pause)

    def _after_image(
        self, container: ContainerSpec, state: ContainerState, failures: int, at_s: float
    ) -> ContainerState:
        if failures == 1:
            return replace(state, not_before_s=at_s)
        message = f'Back-off pulling image "{container.image}"'
        self._node.events.record(self.pod, "Normal", "BackOff", message, self._node.name)
        return replace(state, reason="ImagePullBackOff", message=message, not_before_s=at_s)

    async def _make_volumes(self) -> None:
        """Give the pod its address and volumes; tries again until it works or the pod is to stop."""
        self.pod_ip = self.pod_ip or self._node.take_pod_ip()
        failures = 0
        while True:
            try:
                self._volumes = await make_volumes(self._volume_context())
                self._refreshing.append(asyncio.create_task(self._refresher.run(self._volumes)))
                self._wake.set()
                return
            except (MountError, ConfigError, ApiError, OSError) as error:
                failures += 1
                self._warn_of_mount(str(error))
            await asyncio.sleep(pause_s(failures))

    def _volume_context(self) -> VolumeContext:
        sources = Sources(pod=self.pod, host_ip=self._node.address, pod_ip=self.pod_ip)
        namespace = self.spec.namespace
        return VolumeContext(
            self.spec,
            self._node.folders,
            sources,
            lambda plural, name: self._node.fetch(namespace, plural, name),
            self._tokens.fetch,
        )

    def _warn_of_mount(self, message: str) -> None:
        self._node.events.record(self.pod, "Warning", "FailedMount", message, self._node.name)

    def _build_status(self) -> Json | None:
        if self._was_over:
            return None
        facts = PodFacts(self._node.address, self.pod_ip, self._start_time, timestamp())
        return build_status(self.spec, self.states, self._stop, facts, self._writer.known(self.pod.get("status") or {}))

    async def _finish(self) -> None:
        """Everything has ended and the pod is to go: say so, delete the object for good, wait until it is gone."""
        failures = 0
        while not self._is_gone.is_set() and not self._is_down:
            if await self._writer.delete_pod():
                self._wake.clear()
                if not self._is_gone.is_set():
                    await self._wait(time.monotonic() + 5.0)  # Finalizers may hold it.
            else:
                failures += 1
                await asyncio.sleep(pause_s(failures))
