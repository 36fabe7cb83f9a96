"""All fake nodes of a cluster in one event loop: one watch of all pods and nodes, spread to the nodes by name."""

import asyncio
import logging

from unbroken_local.kube import Json
from unbroken_local.kube.informer import Informer
from unbroken_local.kubelet.node import FakeNode

log = logging.getLogger(__name__)


class Kubelets:
    """Spreads pods and Node objects to the fake nodes that they belong to."""

    def __init__(self, nodes: list[FakeNode], pods: Informer, node_objects: Informer) -> None:
        self.nodes = {node.spec.name: node for node in nodes}
        pods.listen(self._on_pod)
        node_objects.listen(self._on_node)

    async def run(self) -> None:
        """Run all nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for node in self.nodes.values():
                group.create_task(node.run())

    def _on_pod(self, old: Json | None, new: Json | None) -> None:
        name = ((new or old or {}).get("spec") or {}).get("nodeName")
        node = self.nodes.get(name) if name else None
        if node is None:
            return
        try:
            node.observe_pod(old, new)
        except Exception:  # One odd object must not end every node's pods.
            log.exception("pod not understood: pod=%s", (new or old or {}).get("metadata", {}).get("name"))

    def _on_node(self, old: Json | None, new: Json | None) -> None:
        node = self.nodes.get((new or old or {})["metadata"]["name"])
        if node is not None:
            node.observe_node(new)
