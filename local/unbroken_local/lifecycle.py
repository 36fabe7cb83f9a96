"""The node lifecycle of a local cluster: a silent node becomes unreachable, and its pods are evicted.

`decide` is pure. A node's age counts from the last change of its Lease, on this process's own clock, and in steps of at
most two ticks: a process that was itself stopped does not take its pause for the nodes' silence.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Union

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient
from unbroken_local.kube.events import timestamp
from unbroken_local.kube.informer import Informer
from unbroken_local.kube.taints import tolerates
from unbroken_local.kubelet.node import LEASE_NAMESPACE

log = logging.getLogger(__name__)

UNREACHABLE = "node.kubernetes.io/unreachable"
TAINTS = tuple({"key": UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute"))


@dataclass(frozen=True)
class LifecycleSettings:
    """Seconds."""

    grace_s: float = 8.0
    """Without a renewed Lease a node is unreachable after this."""
    eviction_s: float = 1.0
    """In place of the 300 s that API servers give pods that say nothing about the taint."""
    tick_s: float = 0.5


@dataclass(frozen=True)
class NodeView:
    """One node as the controller knows it."""

    name: str
    silent_s: float
    is_ready: bool
    has_taints: bool
    unreachable_s: float | None
    """Seconds since it was found unreachable; None when it is not."""
    pods: tuple[Json, ...] = ()


@dataclass(frozen=True)
class MarkUnreachable:
    """Condition Ready=Unknown, both taints, pods not ready."""

    node: str


@dataclass(frozen=True)
class MarkReachable:
    """Take the taints away."""

    node: str


@dataclass(frozen=True)
class Evict:
    """Delete this pod, gracefully: it stays until its kubelet, or somebody with force, lets it go."""

    pod: Json


Action = Union[MarkUnreachable, MarkReachable, Evict]


def decide(nodes: tuple[NodeView, ...], settings: LifecycleSettings) -> list[Action]:
    """Return what to do now; every action is safe to repeat."""
    actions: list[Action] = []
    for node in nodes:
        if node.silent_s >= settings.grace_s:
            if node.is_ready or not node.has_taints:
                actions.append(MarkUnreachable(node.name))
            elif node.unreachable_s is not None:
                actions += [Evict(pod) for pod in node.pods if _is_due(pod, node.unreachable_s, settings)]
        elif node.is_ready and node.has_taints:
            actions.append(MarkReachable(node.name))
    return actions


def _is_due(pod: Json, unreachable_s: float, settings: LifecycleSettings) -> bool:
    if pod["metadata"].get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
        return False
    covering = [t for t in pod["spec"].get("tolerations") or [] if tolerates(t, TAINTS[1])]
    if not covering:
        return True
    limits = [t["tolerationSeconds"] for t in covering if t.get("tolerationSeconds") is not None]
    if not limits:
        return False
    # API servers add 300 s to pods without a toleration: too long to wait on a laptop.
    wanted = [settings.eviction_s if limit == 300 else float(limit) for limit in limits]
    return unreachable_s >= min(wanted)


@dataclass
class _Silence:
    renewal: str = ""
    silent_s: float = 0.0
    unreachable_s: float | None = None


@dataclass
class NodeLifecycle:
    """The shell: counts silence, writes conditions, taints and deletions."""

    client: KubeClient
    pods: Informer
    nodes: Informer
    leases: Informer
    settings: LifecycleSettings
    _silences: dict[str, _Silence] = field(default_factory=dict)

    async def run(self) -> None:
        """Control until cancelled."""
        for informer in (self.nodes, self.pods, self.leases):
            await informer.synced.wait()
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(self.settings.tick_s)
            now_s = time.monotonic()
            passed_s = min(now_s - before_s, 2 * self.settings.tick_s)
            before_s = now_s
            if not self.leases.is_connected:
                continue  # Blind: nobody's silence is known.
            for action in decide(self._observe(passed_s), self.settings):
                try:
                    await self._act(action)
                except ApiError as error:
                    log.warning("node lifecycle: action=%r error=%s", type(action).__name__, error)

    def _observe(self, passed_s: float) -> tuple[NodeView, ...]:
        names = {node["metadata"]["name"] for node in self.nodes.objects.values()}
        self._silences = {name: self._silences.get(name, _Silence()) for name in names}
        views = tuple(self._view(node, passed_s) for node in self.nodes.objects.values())
        silent = {view.name for view in views if view.unreachable_s is not None}
        if not silent:
            return views
        by_node: dict[str, list[Json]] = {}
        for pod in self.pods.objects.values():
            if pod["spec"].get("nodeName") in silent:
                by_node.setdefault(pod["spec"]["nodeName"], []).append(pod)
        return tuple(replace(view, pods=tuple(by_node.get(view.name, ()))) for view in views)

    def _view(self, node: Json, passed_s: float) -> NodeView:
        name = node["metadata"]["name"]
        silence = self._silences[name]
        lease = self.leases.objects.get((LEASE_NAMESPACE, name)) or {"spec": {}}
        renewal = str(lease["spec"].get("renewTime") or "")
        if renewal != silence.renewal:
            silence.renewal, silence.silent_s = renewal, 0.0
        else:
            silence.silent_s += passed_s
        taints = (node.get("spec") or {}).get("taints") or []
        present = {(taint["key"], taint["effect"]) for taint in taints}
        has_all = all((taint["key"], taint["effect"]) in present for taint in TAINTS)
        is_silent = silence.silent_s >= self.settings.grace_s
        if is_silent and has_all:
            silence.unreachable_s = 0.0 if silence.unreachable_s is None else silence.unreachable_s + passed_s
        elif not is_silent:
            silence.unreachable_s = None
        has_any = any(key == UNREACHABLE for key, _ in present)
        return NodeView(
            name, silence.silent_s, is_ready(node), has_all if is_silent else has_any, silence.unreachable_s
        )

    async def _act(self, action: Action) -> None:
        if isinstance(action, Evict):
            metadata = action.pod["metadata"]
            log.info("pod evicted: pod=%s node=%s", metadata["name"], action.pod["spec"].get("nodeName"))
            body: Json = {"preconditions": {"uid": metadata["uid"]}, "apiVersion": "v1", "kind": "DeleteOptions"}
            await _ignore_missing(self.client.delete(_pod_path(metadata), body))
            return
        node = self.nodes.objects.get(("", action.node))
        if node is None:
            return
        kept = [t for t in (node.get("spec") or {}).get("taints") or [] if t["key"] != UNREACHABLE]
        if isinstance(action, MarkReachable):
            log.info("node reachable again: node=%s", action.node)
            await self.client.merge_patch(f"/api/v1/nodes/{action.node}", {"spec": {"taints": kept}})
            return
        log.warning("node unreachable: node=%s", action.node)
        await self._mark_unknown(node)
        taints = [*kept, *({**taint, "timeAdded": timestamp()} for taint in TAINTS)]
        await self.client.merge_patch(f"/api/v1/nodes/{action.node}", {"spec": {"taints": taints}})
        await self._mark_pods(action.node)

    async def _mark_unknown(self, node: Json) -> None:
        conditions = (node.get("status") or {}).get("conditions") or []
        now = timestamp()
        unknown = [
            {**c, "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status.",
             "lastTransitionTime": now}
            for c in conditions
        ]  # fmt: skip
        await self.client.merge_patch(
            f"/api/v1/nodes/{node['metadata']['name']}/status", {"status": {"conditions": unknown}}
        )

    async def _mark_pods(self, name: str) -> None:
        for pod in list(self.pods.objects.values()):
            conditions = (pod.get("status") or {}).get("conditions") or []
            if pod["spec"].get("nodeName") != name or not any(_is_true(c, "Ready") for c in conditions):
                continue
            changed = [
                {**c, "status": "False", "lastTransitionTime": timestamp()} if _is_true(c, "Ready") else c
                for c in conditions
            ]
            body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": changed}}
            await _ignore_missing(self.client.merge_patch(f"{_pod_path(pod['metadata'])}/status", body))


async def _ignore_missing(call: Awaitable[Json]) -> None:
    try:
        await call
    except ApiError as error:
        if error.status not in {404, 409}:
            raise


def _is_true(condition: Json, kind: str) -> bool:
    return bool(condition["type"] == kind and condition["status"] == "True")


def is_ready(node: Json) -> bool:
    """Return whether a Node object says Ready."""
    return any(_is_true(condition, "Ready") for condition in (node.get("status") or {}).get("conditions") or [])


def _pod_path(metadata: Json) -> str:
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
