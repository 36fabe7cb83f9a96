"""One moment of a job as the demonstration sees it: nodes, pods, ranks, from API server and rendezvous. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from unbroken_core.protocol.messages import JobStatus, PodStatus, Recovery
from unbroken_core.vocabulary.reasons import JobPhase, Role, WorkerPhase
from unbroken_local.kube import Json

RACK_LABEL = "unbroken.dev/rack"
NVLINK_LABEL = "unbroken.dev/nvlink-domain"
JOB_LABEL = "unbroken.dev/job"
COMPONENT_LABEL = "unbroken.dev/component"


@dataclass(frozen=True)
class PodView:
    """One pod of the job."""

    name: str
    uid: str
    node: str
    ip: str
    is_trainer: bool
    phase: str
    """Phase as the API server shows it."""
    is_ending: bool
    role: Role | None = None
    """Role as the rendezvous sees it; None while it does not know the pod."""
    ranks: tuple[int, ...] = ()
    """Active ranks in local order."""
    workers: tuple[WorkerPhase, ...] = ()
    is_connected: bool = False

    @property
    def is_ready_spare(self) -> bool:
        """Whether the pod could take over at this moment."""
        is_ready = bool(self.workers) and all(phase is WorkerPhase.READY for phase in self.workers)
        return self.role is Role.SPARE and self.is_connected and is_ready and not self.is_ending


@dataclass(frozen=True)
class NodeView:
    """One node and the job's pods on it."""

    name: str
    rack: str
    nvlink: str
    is_ready: bool
    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class Snapshot:
    """The job and its cluster at one moment."""

    nodes: tuple[NodeView, ...] = ()
    status: JobStatus | None = None
    """The rendezvous' word; None before it spoke for the first time."""
    state: str = ""
    """`.status.state` of the job: the operator's word."""
    history: tuple[Json, ...] = ()
    """`.status.history` of the job, newest last."""
    conditions: tuple[Json, ...] = ()

    @property
    def pods(self) -> tuple[PodView, ...]:
        """All pods of the job that have a node."""
        return tuple(pod for node in self.nodes for pod in node.pods)

    @property
    def active_pods(self) -> tuple[PodView, ...]:
        """Pods that hold ranks, in order of the ranks."""
        return tuple(sorted((pod for pod in self.pods if pod.ranks), key=lambda pod: pod.ranks))

    @property
    def num_ready_spares(self) -> int:
        """Pods that could take over at this moment."""
        return sum(pod.is_ready_spare for pod in self.pods)

    @property
    def is_training(self) -> bool:
        """Whether the rendezvous says that all active ranks train."""
        return self.status is not None and self.status.phase is JobPhase.RUNNING

    @property
    def finished_recoveries(self) -> tuple[Recovery, ...]:
        """Recoveries that are over, oldest first."""
        recoveries = self.status.recoveries if self.status else ()
        return tuple(recovery for recovery in recoveries if recovery.ended_at)


def take_snapshot(nodes: Iterable[Json], pods: Iterable[Json], job: Json | None, status: JobStatus | None) -> Snapshot:
    """Join what the API server and the rendezvous say."""
    known = {pod.uid: pod for pod in status.pods} if status else {}
    by_node: dict[str, list[PodView]] = {}
    for pod in pods:
        view = _view_pod(pod, known)
        by_node.setdefault(view.node, []).append(view)
    job_status = (job or {}).get("status") or {}
    return Snapshot(
        nodes=tuple(_view_node(node, by_node) for node in sorted(nodes, key=_place)),
        status=status,
        state=str(job_status.get("state") or ""),
        history=tuple(job_status.get("history") or ()),
        conditions=tuple(job_status.get("conditions") or ()),
    )


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts node-2 before node-10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


def _view_pod(pod: Json, known: Mapping[str, PodStatus]) -> PodView:
    metadata, status = pod["metadata"], pod.get("status") or {}
    member = known.get(metadata["uid"])
    view = PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        node=(pod.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        is_trainer=(metadata.get("labels") or {}).get(COMPONENT_LABEL) == "trainer",
        phase=status.get("phase") or "Pending",
        is_ending="deletionTimestamp" in metadata,
    )
    if member is None:
        return view
    return replace(view, role=member.role, ranks=member.ranks, workers=member.workers, is_connected=member.is_connected)


def _view_node(node: Json, by_node: Mapping[str, list[PodView]]) -> NodeView:
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    return NodeView(
        name=name,
        rack=labels.get(RACK_LABEL, ""),
        nvlink=labels.get(NVLINK_LABEL, ""),
        is_ready=any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions),
        pods=tuple(sorted(by_node.get(name, ()), key=lambda pod: natural_key(pod.name))),
    )


def _place(node: Json) -> tuple[tuple[tuple[int, str], ...], ...]:
    labels = node["metadata"].get("labels") or {}
    names = (labels.get(RACK_LABEL, ""), labels.get(NVLINK_LABEL, ""), node["metadata"]["name"])
    return tuple(natural_key(name) for name in names)
