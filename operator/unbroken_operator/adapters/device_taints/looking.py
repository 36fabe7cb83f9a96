"""Looks now and then whether devices of training pods were tainted, node by node. One for all jobs.

    pods with claims of their own ──by node──> slices of that node ──a device is tainted──> claims of the pods there
                                                     └──none──> nothing more is asked

A cluster may have thousands of slices: never are all listed, nor more than so many nodes looked at in one round.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from unbroken_operator.adapters.errors import KubeError, KubeNotFound, KubeNotServed, KubeRefused
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.decisions.device_taints.reading import (
    DeviceId,
    DeviceTaint,
    sign_of_claim,
    slice_view,
    tainted_devices,
)

logger = logging.getLogger(__name__)

GROUP_VERSION = "resource.k8s.io/v1"
LOOK_S = 30.0
REST_S = 600.0
"""So long nothing is asked after the API server has said that it serves no slices, or shows them to others only."""
MAX_NODES, MAX_SLICES, MAX_CLAIMS = 200, 200, 64
"""Nodes of one round, the ones that waited longest first; slices of a node; claims that are read on a node."""
MAX_TOLD = 100


@dataclass(frozen=True)
class Claimant:
    """A training pod that has claims of its own."""

    namespace: str
    uid: str
    node: str
    claims: tuple[str, ...]


class DeviceTaints:
    """`claimants` returns the pods to look at, `tell` gets why pods are to leave, by uid."""

    def __init__(
        self,
        kube: Kube,
        claimants: Callable[[], Iterable[Claimant]],
        tell: Callable[[Mapping[str, str]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._claimants = claimants
        self._tell = tell
        self._clock = clock
        self._found: dict[str, str] = {}
        self._looked_at: dict[str, float] = {}
        """By node."""
        self._rests_until: float | None = None
        self._told: set[str] = set()
        """What cannot be read, or not all of it, and was said."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once; what cannot be read now stays as it was."""
        nodes: dict[str, list[Claimant]] = {}
        for pod in self._claimants():
            nodes.setdefault(pod.node, []).append(pod)
        present = {pod.uid for pods in nodes.values() for pod in pods}
        self._found = {uid: why for uid, why in self._found.items() if uid in present}
        self._looked_at = {node: at for node, at in self._looked_at.items() if node in nodes}
        try:
            if self._rests_until is None or self._clock() >= self._rests_until:
                await self._look_at(nodes)
        finally:
            self._tell(dict(self._found))

    async def _look_at(self, nodes: Mapping[str, list[Claimant]]) -> None:
        order = sorted(nodes, key=lambda node: (self._looked_at.get(node, float("-inf")), node))
        for node in order[:MAX_NODES]:
            # Also where it fails: a node whose slices cannot be read must not be the first of each round.
            self._looked_at[node] = self._clock()
            try:
                slices, _ = await self._kube.list(
                    collection_path("resourceslices", None, GROUP_VERSION),
                    fields=f"spec.nodeName={node}",
                    most=MAX_SLICES + 1,
                    read=slice_view,
                )
            except (KubeNotServed, KubeNotFound):
                self._rests_until = self._clock() + REST_S
                self._found = {}
                self._say("slices", f"the API server does not serve {GROUP_VERSION}", logging.INFO)
                return
            except KubeError as error:
                if isinstance(error, KubeRefused):
                    self._rests_until = self._clock() + REST_S
                self._say("slices", str(error))
                return
            self._note_rest(f"slices of {node}", len(slices) - MAX_SLICES, f"it has more than {MAX_SLICES}")
            await self._look_for_claims(node, nodes[node], tainted_devices(slices[:MAX_SLICES], node))
        self._told.discard("slices")

    async def _look_for_claims(
        self, node: str, pods: Sequence[Claimant], tainted: Mapping[DeviceId, tuple[DeviceTaint, ...]]
    ) -> None:
        num_left = MAX_CLAIMS
        num_more = sum(len(pod.claims) for pod in pods) - MAX_CLAIMS if tainted else 0
        self._note_rest(f"claims of pods on {node}", num_more, f"they have more than {MAX_CLAIMS}")
        for pod in pods:
            why: str | None = ""
            for name in pod.claims if tainted else ():
                if num_left <= 0:
                    return
                num_left -= 1
                why = await self._sign_of(pod, name, tainted)
                if why != "":
                    break
            if why:
                self._found[pod.uid] = why
            elif why is not None:
                self._found.pop(pod.uid, None)

    async def _sign_of(
        self, pod: Claimant, name: str, tainted: Mapping[DeviceId, tuple[DeviceTaint, ...]]
    ) -> str | None:
        """Return why a pod is to leave because of a claim; None where the claim cannot be read now."""
        path = f"{collection_path('resourceclaims', pod.namespace, GROUP_VERSION)}/{quote(name, safe='')}"
        try:
            claim = await self._kube.get(path)
        except KubeNotFound:
            return ""
        except KubeError as error:
            self._say(f"claims of {pod.namespace}", str(error))
            return None
        self._told.discard(f"claims of {pod.namespace}")
        return sign_of_claim(claim, pod.uid, tainted)

    def _note_rest(self, what: str, num_more: int, why: str) -> None:
        """Say once that some are not looked at, until all are."""
        if num_more > 0:
            self._say(what, f"{why}; the rest are not looked at")
        else:
            self._told.discard(what)

    def _say(self, what: str, error: str, level: int = logging.WARNING) -> None:
        """Say once that something cannot be read, until it could be."""
        if what not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(what)
            logger.log(level, "taints of devices are not read what=%s error=%s", what, error)
