"""Does what a plan asks for. Every action is safe to repeat: what is there already is as good as created."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from unbroken_core.vocabulary.errors import assert_never
from unbroken_operator.adapters.errors import (
    KubeConflict,
    KubeNotFound,
    KubeNotServed,
    KubeRefused,
    KubeUnavailable,
    NotLeading,
    RendezvousUnreachable,
)
from unbroken_operator.adapters.job_secret import JobSecret
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.adapters.stores import NodeStore, PodStore, ServiceStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import (
    Action,
    CreateNetworkPolicy,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateTokens,
    DeleteJob,
    DeletePod,
    LetLead,
    PatchPod,
    PostEvent,
    PushObservation,
    RepairTokens,
    Revert,
    WriteStatus,
    lost_fields,
)
from unbroken_operator.decisions.limits.rollouts import Rollouts
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.snapshot import (
    OperatorOptions,
    PodView,
    ServiceView,
    WriteRefusal,
    controller_uid,
    pod_view,
    service_view,
)

logger = logging.getLogger(__name__)

NUM_PARALLEL = 32
"""Pods of one job that are created, deleted or patched at once."""
_PARALLEL = (CreateTokens, CreatePod, DeletePod, PatchPod)
_CREATIONS = (CreateSecret, CreateTokens, CreateService, CreatePod)
MAX_RELEASED = 64
"""So many pods without the job's label are remembered, until their Events have been posted."""


_OWN_FIELDS = frozenset(
    ("observedGeneration", "accepted", "nextPodOrdinal", "nextRendezvousOrdinal", "endedTerm", "selector", "replicas")
)
"""Of the status: numbers and words of the operator's own, which no report brings."""
_ORDINALS = frozenset(("nextPodOrdinal", "nextRendezvousOrdinal"))
"""Of the status: they only rise."""


class StatusRefused(KubeRefused):
    """A status was refused; what is the operator's own in it has been written."""


@dataclass(frozen=True)
class Services:
    """What all workers share."""

    kube: Kube
    client: RendezvousApi
    pods: PodStore
    services: ServiceStore
    nodes: NodeStore
    options: OperatorOptions
    metrics: OperatorMetrics
    may_act: Callable[[], bool] = lambda: True
    """Whether this process is the one operator that writes."""
    rollouts: Rollouts = field(default_factory=Rollouts)
    planner: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "planner"))
    """Makes the plans of large jobs, one after the other, beside the loop."""


class Executor:
    """Acts for one job."""

    def __init__(self, shared: Services, secret: JobSecret, poller: Poller, memory: JobMemory) -> None:
        self._shared = shared
        self._key = secret.key
        self._uid = secret.uid
        self._secret = secret
        self._poller = poller
        self._memory = memory
        self.foreign_service: ServiceView | None = None
        """A Service of our name that does not bear our labels, so that the watch does not show it."""
        self.lost_fields: frozenset[str] = frozenset()
        """Of the status, because the CRD does not have them."""
        self.written_job: Mapping[str, Any] | None = None
        """The job as the last write of the status returned it."""
        self.num_done = 0
        """Actions that succeeded."""
        self.attempts: Counter[type] = Counter()
        """Actions that were tried, by kind; emptied by the worker."""
        self.released: dict[str, PodView] = {}
        """Training pods, by name, that live without the job's label."""
        self._tried: set[int] = set()
        """Ordinals of training pods of this plan that may have been created."""
        self._job_version = ""
        """Of the job that the present plan was made of."""
        self._unsure: set[str] = set()
        """Names of pods that may or may not have been created."""

    async def apply(self, actions: tuple[Action, ...], job_version: str = "") -> tuple[WriteRefusal, ...]:
        """Do all of it, in order; return what the API server refused for good. Raises KubeError for the rest.

        `job_version`: the resource version of the job that the plan was made of.
        A report that makes the API server refuse the status is told after all else has been done: pods matter more.
        """
        planned = [ordinal for action in actions if (ordinal := _trainers_ordinal(action)) is not None]
        self._tried, self._job_version = set(), job_version
        try:
            return await self._apply_groups(actions)
        finally:
            self._memory.note_tried(planned, self._tried)

    async def _apply_groups(self, actions: tuple[Action, ...]) -> tuple[WriteRefusal, ...]:
        untold: StatusRefused | None = None
        for kind, group in itertools.groupby(actions, type):
            try:
                refusals = await self._apply_group(group, NUM_PARALLEL if kind in _PARALLEL else 1)
            except StatusRefused as error:
                untold = error
                continue
            if refusals:
                # The rest would be refused as well: a quota, or the template.
                return refusals
        if untold is not None:
            raise untold
        return ()

    async def _apply_group(self, actions: Iterator[Action], num_parallel: int) -> tuple[WriteRefusal, ...]:
        """Do all of it, some at a time; begin nothing more after the first that fails."""
        refusals: list[WriteRefusal] = []
        failures: list[Exception] = []

        async def some() -> None:
            for action in actions:
                try:
                    await self._do(action)
                except Exception as error:
                    if isinstance(error, KubeRefused) and isinstance(action, _CREATIONS):
                        refusals.append(WriteRefusal(str(action.manifest["metadata"]["name"]), str(error)))
                    else:
                        failures.append(error)
                if refusals or failures:
                    return

        await asyncio.gather(*(some() for _ in range(num_parallel)))
        if failures:
            raise failures[0]
        return tuple(refusals)

    async def _do(self, action: Action) -> None:
        if not self._shared.may_act():
            raise NotLeading
        self.attempts[type(action)] += 1
        await self._dispatch(action)
        self.num_done += 1
        self._shared.metrics.actions.labels(type(action).__name__).inc()

    async def _dispatch(self, action: Action) -> None:
        match action:
            case PushObservation():
                await self._push(action)
            case PostEvent():
                await self._post_event(action)
            case WriteStatus():
                await self._write_status(action)
            case CreateSecret():
                await self._secret.create(action.manifest)
            case CreateTokens():
                await self._secret.create_tokens(action.block, action.manifest)
            case CreateService():
                await self._create_service(action)
            case CreatePod():
                await self._create_pod(action)
            case CreateNetworkPolicy():
                await self._create_network_policy(action)
            case _:
                await self._dispatch_change(action)

    async def _dispatch_change(
        self, action: RepairTokens | DeletePod | LetLead | PatchPod | Revert | DeleteJob
    ) -> None:
        match action:
            case RepairTokens():
                await self._secret.repair(action)
            case DeletePod():
                await self._delete_pod(action)
            case LetLead():
                await self._let_lead(action)
            case PatchPod():
                await self._patch_pod(action)
            case Revert():
                await self._revert(action)
            case DeleteJob():
                await self._delete_job(action)
            case _:
                assert_never(action)

    def _path(self, resource: str) -> str:
        return collection_path(resource, self._key[0])

    def job_path(self) -> str:
        """Return the path of the job."""
        return f"{collection_path(layout.PLURAL, self._key[0], layout.API_VERSION)}/{self._key[1]}"

    async def refresh_foreign_service(self) -> None:
        """Look whether another owner's Service still has our name."""
        if self.foreign_service is not None:
            self.foreign_service = await self._read_service()

    async def _push(self, action: PushObservation) -> None:
        target = self._poller.target
        if target is None or target.pod_uid != action.pod_uid:
            return
        try:
            await self._shared.client.observe(target, action.observation)
        except RendezvousUnreachable as error:
            # The poller notices as well, and brings the Observation up again with its next report.
            logger.warning("observation was not taken job=%s/%s error=%s", *self._key, error)
            self._poller.doubt()
            return
        self._memory.remember_sent(action.pod_uid, action.term, action.observation)

    async def _post_event(self, action: PostEvent) -> None:
        try:
            await self._shared.kube.create(self._path("events"), action.manifest)
        except KubeConflict:
            pass
        except KubeRefused as error:
            # An Event is a courtesy: a job must not stop because a namespace does not take any.
            logger.warning("event was refused job=%s/%s error=%s", *self._key, error)
        self._memory.note_posted(str(action.manifest["metadata"]["name"]))

    async def _write_status(self, action: WriteStatus) -> None:
        try:
            await self._merge_status(action.patch)
        except KubeRefused as error:
            # What comes from a report may be at fault. Ordinals must be written before their pods are created.
            own = {key: value for key, value in action.patch.items() if key in _OWN_FIELDS}
            if own:
                await self._merge_status(own)
            raise StatusRefused(str(error)) from error

    async def _merge_status(self, patch: Mapping[str, Any]) -> None:
        # The uid makes the API server refuse a write that is meant for an earlier job of this name.
        metadata = {"uid": self._uid}
        if self._job_version and not _ORDINALS.isdisjoint(patch):
            # A write that was given up for lost may take effect later: it must not take back what was reserved since.
            metadata["resourceVersion"] = self._job_version
        whole = {"metadata": metadata, "status": patch}
        written = await self._shared.kube.merge(f"{self.job_path()}/status", whole)
        self.written_job = written
        self._job_version = str((written.get("metadata") or {}).get("resourceVersion", ""))
        lost = lost_fields(patch, written.get("status") or {})
        if lost - self.lost_fields:
            names = ",".join(sorted(lost))
            logger.error("status is not kept, update the CRD to this release job=%s/%s fields=%s", *self._key, names)
        self.lost_fields |= lost

    async def _create_service(self, action: CreateService) -> None:
        try:
            self._shared.services.upsert(await self._shared.kube.create(self._path("services"), action.manifest))
        except KubeConflict:
            self.foreign_service = await self._read_service()

    async def _create_network_policy(self, action: CreateNetworkPolicy) -> None:
        path = collection_path("networkpolicies", self._key[0], action.manifest["apiVersion"])
        try:
            await self._shared.kube.create(path, action.manifest)
        except KubeConflict:
            pass
        except (KubeRefused, KubeNotServed) as error:
            # The token keeps strangers out as well: a job must not stop because a namespace takes no policies.
            logger.warning("network policy was refused job=%s/%s error=%s", *self._key, error)

    async def _read_service(self) -> ServiceView | None:
        try:
            item = await self._shared.kube.get(f"{self._path('services')}/{layout.rendezvous_name(self._key[1])}")
        except KubeNotFound:
            return None
        if (item["metadata"].get("labels") or {}).get(layout.JOB_LABEL) == self._key[1]:
            self._shared.services.upsert(item)
            return None
        return service_view(item)

    async def _create_pod(self, action: CreatePod) -> None:
        name, ordinal = str(action.manifest["metadata"]["name"]), _trainers_ordinal(action)
        if ordinal is not None:
            self._tried.add(ordinal)
        try:
            item = await self._shared.kube.create(self._path("pods"), action.manifest)
        except KubeRefused:
            self._tried.discard(-1 if ordinal is None else ordinal)
            raise
        except KubeConflict:
            # Created already, or a stranger's pod: then the next plan takes the next ordinal.
            item = await self._conflicting_pod(name)
        except KubeUnavailable:
            self._unsure.add(name)
            raise
        if controller_uid(item) != self._uid:
            logger.warning("pod's name is taken, trying the next ordinal job=%s/%s pod=%s", *self._key, name)
            return
        self._memory.note_created(str(item["metadata"]["uid"]), time.monotonic())
        self._take_pod(item)

    async def look_for_unsure_pods(self) -> None:
        """Take in the pods whose creation was not answered: else others would be made in their place. Raises KubeError.

        The watch reports them as well, but perhaps later.
        """
        for name in sorted(self._unsure):
            with contextlib.suppress(KubeNotFound):
                self._take_pod(await self._shared.kube.get(f"{self._path('pods')}/{name}"))
            self._unsure.discard(name)

    async def look_for_released_pods(self) -> None:
        """Tell pods that live without the job's label from those that are gone. Raises KubeError."""
        for seen in self._shared.pods.vanished(self._key):
            try:
                item = await self._shared.kube.get(f"{self._path('pods')}/{seen.name}")
            except KubeNotFound:
                item = None
            self._shared.pods.explain(self._key, seen.name)
            labels = {} if item is None else item["metadata"].get("labels") or {}
            if item is not None and item["metadata"]["uid"] == seen.uid and labels.get(layout.JOB_LABEL) is None:
                self.released[seen.name] = pod_view(item)
                while len(self.released) > MAX_RELEASED:
                    del self.released[next(iter(self.released))]

    def _take_pod(self, item: dict[str, Any]) -> None:
        if (item["metadata"].get("labels") or {}).get(layout.JOB_LABEL) == self._key[1]:
            self._shared.pods.upsert(item)

    async def _conflicting_pod(self, name: str) -> dict[str, Any]:
        try:
            return await self._shared.kube.get(f"{self._path('pods')}/{name}")
        except KubeNotFound as error:
            # A quota that others change at this moment is a conflict as well.
            raise KubeUnavailable(f"pod {name} could not be created, and does not exist") from error

    async def _delete_pod(self, action: DeletePod) -> None:
        path = f"{self._path('pods')}/{action.name}"
        logger.info(
            "delete pod job=%s/%s pod=%s forced=%s why=%s", *self._key, action.name, action.is_forced, action.why
        )
        try:
            item = await self._shared.kube.delete(path, action.uid, action.is_forced)
        except (KubeNotFound, KubeConflict):
            self._shared.pods.forget(self._key, action.name, action.uid)
            return
        if item.get("kind") == "Pod" and not action.is_forced:
            self._shared.pods.upsert(item)
        else:
            self._shared.pods.forget(self._key, action.name, action.uid)

    async def _let_lead(self, action: LetLead) -> None:
        """Lead agents to a rendezvous, and tell it to lead them; said again until it is noted that it was told."""
        await self._patch_pod(PatchPod(action.name, action.uid, {layout.COMPONENT_LABEL: layout.RENDEZVOUS}, {}))
        host = layout.rendezvous_host(self._key[1], self._key[0])
        secret = self._secret
        target = RendezvousTarget(action.uid, action.name, action.address, secret.token, secret.authority, host)
        try:
            await self._shared.client.lead(target, action.earlier)
        except RendezvousUnreachable as error:
            logger.warning("rendezvous was not told to lead, trying again job=%s/%s error=%s", *self._key, error)
            return
        logger.info("rendezvous leads job=%s/%s pod=%s", *self._key, action.name)
        await self._patch_pod(PatchPod(action.name, action.uid, {}, {layout.STANDBY_ANNOTATION: None}))

    async def _patch_pod(self, action: PatchPod) -> None:
        patch = {"metadata": {"uid": action.uid, "labels": action.labels, "annotations": action.annotations}}
        try:
            self._shared.pods.upsert(await self._shared.kube.merge(f"{self._path('pods')}/{action.name}", patch))
        except (KubeNotFound, KubeConflict):
            self._shared.pods.forget(self._key, action.name, action.uid)

    async def _revert(self, action: Revert) -> None:
        """Revert a change. If the object has been replaced, the watch reports what is there now."""
        path = f"{self._path(action.resource)}/{action.name}"
        fields = ",".join(action.fields)
        logger.info("revert a change by hand job=%s/%s name=%s fields=%s", *self._key, action.name, fields)
        try:
            metadata: dict[str, Any] = {"uid": action.uid, **action.patch.get("metadata", {})}
            if action.owner is not None:
                found = (await self._shared.kube.get(path))["metadata"]
                others = [item for item in found.get("ownerReferences") or () if not item.get("controller")]
                metadata |= {"ownerReferences": [*others, action.owner], "resourceVersion": found["resourceVersion"]}
            item = await self._shared.kube.merge(path, {**action.patch, "metadata": metadata})
        except (KubeNotFound, KubeConflict):
            return
        except KubeRefused as error:
            # The job can do without it. The chart's role may be of an earlier release, or a policy forbids it.
            logger.warning("revert was refused job=%s/%s error=%s", *self._key, error)
            return
        if action.resource == "services":
            self._shared.services.upsert(item)
        else:
            self._take_pod(item)

    async def _delete_job(self, action: DeleteJob) -> None:
        logger.info("delete job job=%s/%s why=%s", *self._key, action.why)
        with contextlib.suppress(KubeNotFound):
            await self._shared.kube.delete(self.job_path(), action.uid, resource_version=action.resource_version)


def _trainers_ordinal(action: Action) -> int | None:
    """Return the ordinal of the training pod that an action makes; None for any other action."""
    if not isinstance(action, CreatePod):
        return None
    metadata = action.manifest["metadata"]
    is_trainer = metadata["labels"].get(layout.COMPONENT_LABEL) == layout.TRAINER
    return layout.pod_ordinal(str(metadata["name"])) if is_trainer else None
