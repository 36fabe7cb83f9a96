"""Observes pods and nodes, asks `decide`, writes bindings and refusals. Woken by changes; idle otherwise."""

import asyncio
import logging

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient
from unbroken_local.kube.events import EventRecorder, timestamp
from unbroken_local.kube.informer import Informer
from unbroken_local.scheduler.decide import Binding, Decision, Refusal, decide
from unbroken_local.scheduler.world import Snapshot, is_over

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""After a write that failed."""
PARALLEL_WRITES = 16


class Scheduler:
    """Binds pods of `default-scheduler`."""

    def __init__(
        self,
        client: KubeClient,
        pods: Informer,
        nodes: Informer,
        events: EventRecorder,
        namespaces: Informer | None = None,
    ) -> None:
        self._client = client
        self._pods = pods
        self._nodes = nodes
        self._namespaces = namespaces
        self._events = events
        self._assumed: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._dirty = asyncio.Event()
        self._writes = asyncio.Semaphore(PARALLEL_WRITES)
        pods.listen(self._on_pod)
        nodes.listen(self._on_node)

    def _on_pod(self, old: Json | None, new: Json | None) -> None:
        pod = new or old or {}
        uid = pod["metadata"].get("uid", "")
        if new is None or pod["spec"].get("nodeName"):
            self._assumed.pop(uid, None)
            self._refused.pop(uid, None)
        if _pod_facts(old) != _pod_facts(new):
            self._dirty.set()

    def _on_node(self, old: Json | None, new: Json | None) -> None:
        if _node_facts(old) != _node_facts(new):
            self._dirty.set()

    async def run(self) -> None:
        """Schedule until cancelled."""
        await self._nodes.synced.wait()
        await self._pods.synced.wait()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            decision = decide(self._observe())
            if not await self._write(decision):
                await asyncio.sleep(RETRY_S)
                self._dirty.set()

    def _observe(self) -> Snapshot:
        namespaces = self._namespaces.objects.values() if self._namespaces is not None else ()
        return Snapshot(
            nodes=tuple(self._nodes.objects.values()),
            pods=tuple(self._pods.objects.values()),
            assumed=dict(self._assumed),
            namespace_labels={n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in namespaces},
        )

    async def _write(self, decision: Decision) -> bool:
        """Return whether all was written."""
        for (
            binding
        ) in decision.bindings:  # Assumed before the first await: no later decision may count them as waiting.
            self._assumed[binding.pod["metadata"]["uid"]] = binding.node
        done = await asyncio.gather(
            *(self._bind(binding) for binding in decision.bindings), *(self._refuse(item) for item in decision.refusals)
        )
        return all(done)

    async def _bind(self, binding: Binding) -> bool:
        metadata = binding.pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        async with self._writes:
            try:
                await self._client.create(path, body)
            except ApiError as error:
                self._assumed.pop(metadata["uid"], None)
                log.warning("pod not bound: pod=%s node=%s error=%s", metadata["name"], binding.node, error)
                return not error.is_passing  # Refused: it was deleted or bound meanwhile, and the watch will say so.
        message = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {binding.node}"
        self._events.record(binding.pod, "Normal", "Scheduled", message)
        return True

    async def _refuse(self, refusal: Refusal) -> bool:
        metadata = refusal.pod["metadata"]
        if self._refused.get(metadata["uid"]) == refusal.message:
            return True
        conditions = (refusal.pod.get("status") or {}).get("conditions") or []
        old: Json = next((c for c in conditions if c["type"] == "PodScheduled"), {})
        since = old.get("lastTransitionTime") if old.get("status") == "False" else None
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": refusal.message,
            "lastProbeTime": None,
            "lastTransitionTime": since or timestamp(),
        }
        others = [c for c in conditions if c["type"] != "PodScheduled"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        body = {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [*others, condition]}}
        async with self._writes:
            try:
                await self._client.merge_patch(path, body)
            except ApiError as error:
                log.warning("refusal not written: pod=%s error=%s", metadata["name"], error)
                return not error.is_passing
        self._refused[metadata["uid"]] = refusal.message
        self._events.record(refusal.pod, "Warning", "FailedScheduling", refusal.message)
        return True


def _pod_facts(pod: Json | None) -> object:
    if pod is None:
        return None
    metadata = pod["metadata"]
    return metadata.get("uid"), pod["spec"].get("nodeName"), pod["spec"].get("schedulingGates"), is_over(pod)


def _node_facts(node: Json | None) -> object:
    if node is None:
        return None
    spec, status = node.get("spec") or {}, node.get("status") or {}
    return node["metadata"].get("labels"), spec.get("taints"), spec.get("unschedulable"), status.get("allocatable")
