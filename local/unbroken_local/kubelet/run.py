"""One attempt to run a container: image, configuration, process, hooks, probes, end. A task of its pod's runner."""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError
from unbroken_local.kube.events import timestamp
from unbroken_local.kube.kubeconfig import account_kubeconfig
from unbroken_local.kubelet import probes
from unbroken_local.kubelet.container import ACCOUNT_PATH, CreateError, Launch, LaunchContext, plan_launch, references
from unbroken_local.kubelet.context import NodeContext
from unbroken_local.kubelet.decide import ContainerState, Phase, Termination, waiting
from unbroken_local.kubelet.environment import ConfigError, Sources
from unbroken_local.kubelet.images import find_image
from unbroken_local.kubelet.logs import tail_text
from unbroken_local.kubelet.paths import name_rewriter
from unbroken_local.kubelet.payload import MountError
from unbroken_local.kubelet.restart import exit_code_of
from unbroken_local.kubelet.spec import ContainerSpec, PodSpec, ProbeSpec
from unbroken_local.processes.host import Process, StartError

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4096
FALLBACK_BYTES, FALLBACK_LINES = 2048, 80
CONFIG_PAUSE_S = 2.0
LATE_GRACE_S = 2.0
"""What a container still gets after its preStop hook used up the grace."""


@dataclass(frozen=True)
class PodRuntime:
    """What a container needs from its pod."""

    spec: PodSpec
    node: NodeContext
    pod: Callable[[], Json]
    """The newest Pod object."""
    pod_ip: str
    volumes: Mapping[str, Path]
    grace_s: Callable[[], float]


class ContainerRun:
    """One attempt. `state` is what the pod's runner sees; `changed` is called after each change of it."""

    def __init__(
        self, container: ContainerSpec, runtime: PodRuntime, state: ContainerState, changed: Callable[[], None]
    ) -> None:
        self.state = replace(state, is_busy=True)
        self.started_s: float | None = None
        """Monotonic time of the start; None when no process was started."""
        self.image_failed = False
        self._before = state
        self._container = container
        self._runtime = runtime
        self._changed = changed
        self._process: Process | None = None
        self._launch: Launch | None = None
        self._deadline_s: float | None = None
        self._deadline_moved = asyncio.Event()
        self._is_starting = True
        self._helpers: set[asyncio.Task[Any]] = set()
        self._stopper: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name=f"{runtime.spec.name}/{container.name}")

    @property
    def is_done(self) -> bool:
        """Whether nothing of this attempt is left."""
        return self._task.done()

    def stop(self, deadline_s: float) -> None:
        """End the container until `deadline_s` (monotonic); a later call may only bring it forward."""
        if self._process is None or self._is_starting:
            self._task.cancel()
            return
        if self._deadline_s is None or deadline_s < self._deadline_s:
            self._deadline_s = deadline_s
            self._deadline_moved.set()
        if self._stopper is None and not self._task.done():
            self._stopper = asyncio.create_task(self._stop(self._process))

    def kill(self) -> None:
        """End it at once."""
        if self._process is None or self._is_starting:
            self._task.cancel()
        if self._process is not None:
            self._process.kill()

    async def wait(self) -> None:
        """Wait until nothing of this attempt is left."""
        await asyncio.wait({self._task})

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._changed()

    async def _run(self) -> None:
        try:
            await self._attempt()
        except asyncio.CancelledError:
            if self._process is not None:
                self._process.kill()
            self.state = replace(self._before, is_busy=False)
        except Exception as error:  # A bug here must end this container, not the node.
            log.exception("container failed: pod=%s container=%s", self._runtime.spec.name, self._container.name)
            self._wait_again("CreateContainerError", f"internal error: {error!r}")
        finally:
            for task in self._helpers:
                task.cancel()
            if self._stopper is not None:
                self._stopper.cancel()
            self.state = replace(self.state, is_busy=False)
            self._changed()

    def _wait_again(self, reason: str, message: str) -> None:
        self.state = replace(
            waiting(self._before, reason, message, time.monotonic() + CONFIG_PAUSE_S), restarts=self._before.restarts
        )

    async def _attempt(self) -> None:
        launch = await self._prepare()
        if launch is None:
            return
        self._launch = launch
        node, began = self._runtime.node, timestamp()
        try:
            process = await node.host.start(launch.main)
        except StartError as error:
            self._event("Warning", "Failed", f"Error: {error}")
            message = f"failed to create containerd task: failed to create shim task: {error}: unknown"
            self._end(Termination(128, "StartError", began, timestamp(), message))
            return
        self._process = process
        self.started_s = time.monotonic()
        self._event("Normal", "Started", f"Started container {self._container.name}")
        has_startup, has_readiness = self._container.startup is not None, self._container.readiness is not None
        self.state = waiting(self._before, "")
        self._set(
            phase=Phase.RUNNING,
            started_at=timestamp(),
            is_started=not has_startup,
            is_ready=not has_startup and not has_readiness,
            restarts=self._restarts(),
            is_busy=False,
        )
        self._is_starting = False
        self._help(self._look_after())
        code = await process.wait()
        await self._finish(code)

    def _restarts(self) -> int:
        has_run = self._before.termination is not None or self._before.last is not None
        return self._before.restarts + 1 if has_run else 0

    async def _prepare(self) -> Launch | None:
        runtime, container = self._runtime, self._container
        rule = find_image(container.image, runtime.node.images)
        if rule is None:
            self._refuse_image()
            return None
        try:
            sources = await self._sources()
            termination_file = runtime.node.folders.termination_file(runtime.spec, container.name)
            termination_file.parent.mkdir(parents=True, exist_ok=True)
            termination_file.write_bytes(b"")
            log_file = runtime.node.folders.log(runtime.spec, container.name, self._restarts())
            log_file.parent.mkdir(parents=True, exist_ok=True)
            names = name_rewriter(runtime.node.services.address_of, runtime.node.services.address_by_cluster_ip())
            context = LaunchContext(rule, sources, runtime.volumes, termination_file, log_file, names)
            return self._with_account(plan_launch(container, context))
        except (ConfigError, MountError, ApiError) as error:
            self._event("Warning", "Failed", f"Error: {error}")
            self._wait_again("CreateContainerConfigError", str(error))
        except (CreateError, OSError, ValueError) as error:
            self._event("Warning", "Failed", f"Error: {error}")
            self._wait_again("CreateContainerError", str(error))
        return None

    def _with_account(self, launch: Launch) -> Launch:
        """Point KUBECONFIG to the pod's service account: its own path does not exist here."""
        runtime, spec = self._runtime, self._runtime.pod()["spec"]
        mounts = self._container.raw.get("volumeMounts") or []
        has_token = any(mount["mountPath"] == ACCOUNT_PATH for mount in mounts)
        is_named = (spec.get("serviceAccountName") or "default") != "default"
        wants_token = is_named and spec.get("automountServiceAccountToken") is not False
        if "KUBECONFIG" in launch.main.env or not (has_token or wants_token):
            return launch
        # A control plane that mounts no tokens has no accounts either: it knows one user only.
        token_file = launch.rewrite(f"{ACCOUNT_PATH}/token") if has_token else None
        path = runtime.node.folders.account_file(runtime.spec, self._container.name)
        config = account_kubeconfig(runtime.node.client.access, token_file, runtime.spec.namespace)
        path.write_text(json.dumps(config), encoding="utf-8")
        path.chmod(0o600)
        return replace(launch, main=replace(launch.main, env={**launch.main.env, "KUBECONFIG": str(path)}))

    def _refuse_image(self) -> None:
        image = self._container.image
        self.image_failed = True
        message = f'failed to pull image "{image}": no rule of this local cluster says what it is'
        self._event("Warning", "Failed", f"Error: ErrImagePull: {message}")
        self._wait_again("ErrImagePull", message)

    async def _sources(self) -> Sources:
        runtime = self._runtime
        namespace = runtime.spec.namespace
        found: dict[str, dict[str, Json | None]] = {"secrets": {}, "configmaps": {}}
        for plural, name in references(self._container):
            found[plural][name] = await runtime.node.fetch(namespace, plural, name)
        return Sources(
            pod=runtime.pod(),
            host_ip=runtime.node.address,
            pod_ip=runtime.pod_ip,
            secrets=found["secrets"],
            config_maps=found["configmaps"],
            services=runtime.node.services.of_namespace(namespace),
        )

    async def _finish(self, code: int) -> None:
        exit_code = exit_code_of(code)
        message = await asyncio.to_thread(self._termination_message, exit_code)
        reason = "Completed" if exit_code == 0 else "Error"
        self._end(Termination(exit_code, reason, self.state.started_at, timestamp(), message))

    def _end(self, termination: Termination) -> None:
        self.state = replace(
            waiting(self._before, ""), phase=Phase.TERMINATED, termination=termination, restarts=self._restarts()
        )

    def _termination_message(self, exit_code: int) -> str:
        runtime, name = self._runtime, self._container.name
        try:
            with runtime.node.folders.termination_file(runtime.spec, name).open("rb") as file:
                text = file.read(MESSAGE_BYTES).decode(errors="replace")
        except OSError:
            text = ""
        if text or exit_code == 0 or not self._container.has_log_fallback:
            return text
        return tail_text(runtime.node.folders.log(runtime.spec, name, self._restarts()), FALLBACK_LINES, FALLBACK_BYTES)

    async def _stop(self, process: Process) -> None:
        self._event("Normal", "Killing", f"Stopping container {self._container.name}")
        hook = (self._container.raw.get("lifecycle") or {}).get("preStop")
        if hook:
            await self._hook("preStop", hook, self._seconds_left())
        process.signal(signal.SIGTERM)
        late_until = time.monotonic() + LATE_GRACE_S if hook and self._seconds_left() <= 0 else 0.0
        while (left := max(self._seconds_left(), late_until - time.monotonic())) > 0:
            self._deadline_moved.clear()
            try:
                await asyncio.wait_for(self._deadline_moved.wait(), left)
            except TimeoutError:
                pass
        process.kill()

    def _seconds_left(self) -> float:
        return (self._deadline_s or 0.0) - time.monotonic()

    async def _hook(self, name: str, hook: Json, limit_s: float) -> str:
        """Run a lifecycle hook; return why it failed, or an empty string."""
        if limit_s <= 0:
            return "no time left"
        if "sleep" in hook:
            await asyncio.sleep(min(float(hook["sleep"].get("seconds") or 0), limit_s))
            return ""
        failure = await probes.check(hook, self._target(), limit_s)
        if failure:
            self._event("Warning", f"Failed{name[0].upper()}{name[1:]}Hook", f"{name} hook failed: {failure}")
        return failure

    def _help(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    async def _look_after(self) -> None:
        """Run the postStart hook, then the probes: the startup probe first, the others after it succeeded."""
        hook = (self._container.raw.get("lifecycle") or {}).get("postStart")
        if hook and await self._hook("postStart", hook, 3600.0):
            self.stop(time.monotonic() + self._runtime.grace_s())
            return
        startup = self._container.startup
        if startup is not None:
            await self._probe(startup, self._on_startup)
            if not self.state.is_started:
                return
        watchers = []
        if self._container.liveness is not None:
            watchers.append(self._probe(self._container.liveness, self._on_liveness))
        if self._container.readiness is not None:
            watchers.append(self._probe(self._container.readiness, self._on_readiness))
        await asyncio.gather(*watchers)

    async def _probe(self, spec: ProbeSpec, verdict: Callable[[bool, str], bool]) -> None:
        target = self._target()
        await probes.probe_loop(spec, lambda: probes.check(spec.handler, target, spec.timeout_s), verdict)

    def _on_startup(self, is_good: bool, failure: str) -> bool:
        if is_good:
            self._set(is_started=True, is_ready=self._container.readiness is None)
        else:
            self._unhealthy("Startup", failure)
        return False

    def _on_liveness(self, is_good: bool, failure: str) -> bool:
        if not is_good:
            self._unhealthy("Liveness", failure)
        return is_good

    def _on_readiness(self, is_good: bool, failure: str) -> bool:
        if is_good is not self.state.is_ready:
            self._set(is_ready=is_good)
        if not is_good:
            self._event("Warning", "Unhealthy", f"Readiness probe failed: {failure}")
        return True

    def _unhealthy(self, kind: str, failure: str) -> None:
        self._event("Warning", "Unhealthy", f"{kind} probe failed: {failure}")
        self._event(
            "Normal", "Killing", f"Container {self._container.name} failed {kind.lower()} probe, will be restarted"
        )
        self.stop(time.monotonic() + self._runtime.grace_s())

    def _target(self) -> probes.Target:
        return probes.Target(self._runtime.pod_ip, self._container.raw, self._execute, self._runtime.node.session)

    async def _execute(self, argv: list[str], limit_s: float) -> int:
        if self._launch is None or not argv:
            raise ValueError("exec: want a command, got none")
        process = await self._runtime.node.host.start(self._launch.command(argv, Path("/dev/null")))
        try:
            async with asyncio.timeout(limit_s):
                return await process.wait()
        finally:
            process.kill()

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._runtime.node.events.record(self._runtime.pod(), kind, reason, message, self._runtime.node.name)
