"""What the operator sees of one job: small frozen views of objects of the API server, and the snapshot of them all."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unbroken_core.conventions.printable import printable
from unbroken_core.protocol.messages import EarlierRun, GonePod, JobStatus, Observation, RungUse
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, Reason
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_SUSPECTS
from unbroken_operator.decisions.limits.budgets import Budget
from unbroken_operator.decisions.limits.stored_status import MAX_ORDINAL, STORED_STATUS
from unbroken_operator.decisions.limits.weight import exceeds

MAX_DOMAIN = 63
"""Characters of a label's value."""
MAX_UID = 128
MAX_DIGEST = 64
MAX_LEAVING = 400
MAX_TOPOLOGY = 8192
"""Characters of annotations of ours. Anybody who may create pods can write them, and as much as they like."""
MAX_AVOIDED, MAX_AVOIDS = MAX_SUSPECTS, 254 * MAX_SUSPECTS
"""Nodes that a pod may avoid, and characters of all of them."""
MAX_LABELS, MAX_LABELS_CHARACTERS = 128, 8192
"""Labels of others, and as many annotations, that are kept of a pod, and the characters of either."""
MAX_FINALIZERS, MAX_FINALIZER = 16, 317
MAX_CLAIMS, MAX_CLAIM = 16, 253
"""ResourceClaims of a pod that are looked at, and characters of the name of each."""
MAX_SERVICE_VALUES, MAX_SERVICE_CHARACTERS = 500, 8192
TERMINAL_PHASES = ("Failed", "Succeeded")
MIN_AGENT_RESTARTS = 3
"""An agent whose kubelet waits before it starts it once more does not stay up: half a minute has passed then."""
MAX_AHEAD = 10_000
"""So far beyond what is known otherwise a report may say that ordinals were used."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint that asserts to Kubernetes that a node is off."""

_WAITING_REASONS = {
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": Reason.CONTAINER_NOT_STARTED,
    "CreateContainerError": Reason.CONTAINER_NOT_STARTED,
    "RunContainerError": Reason.CONTAINER_NOT_STARTED,
    "CrashLoopBackOff": Reason.CONTAINER_NOT_STARTED,
}


@dataclass(frozen=True)
class Problem:
    """Why a pod does not come up."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class PodView:
    """One pod of a job."""

    name: str
    uid: str
    owner_uid: str
    """Uid of the controller; "" for none."""
    component: str
    role: str
    """Value of the role label."""
    ordinal: int
    node: str
    phase: str
    ip: str
    is_deleting: bool
    is_ready: bool
    settings: str
    """Digest of the settings that a rendezvous pod runs with."""
    topology: str
    """The topology annotation as it is."""
    is_standby: bool = False
    """Of a rendezvous pod: whether it was not told to lead yet."""
    made_from: str = ""
    """Digest of what else a rendezvous pod was made from; "" when it does not say."""
    problem: Problem | None = None
    agent_crashes: str = ""
    """How its agent ends again and again, for people; "" when it does not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those that may name a domain: not ours, and no longer than a label's value."""
    template: str = ""
    """Digest of the template that a training pod was made from; "" when it does not say."""
    leaving: str = ""
    """Why the pod will be deleted as soon as its ranks have moved; "" if it will not."""
    avoids: tuple[str, ...] = ()
    """Nodes on which it was made not to run."""
    end: str = ""
    """How the containers of a failed pod ended, for people."""
    is_orphan: bool = False
    """Whether its owner reference was removed."""
    is_mislabelled: bool = False
    """Whether its component is known by its annotations only."""
    finalizers: tuple[str, ...] = ()
    """Of others: ours have none."""
    has_ended: bool = False
    """Whether its kubelet reported that all containers ended for good, or it never had a node."""
    broken_device: str = ""
    """A device of its containers that its kubelet calls Unhealthy, for people; "" where it says so of none."""
    claims: tuple[str, ...] = ()
    """Names of the ResourceClaims that were made for it alone."""
    cut: str = ""
    """What of it is longer than anything that the operator makes, and was left out, for people; "" for nothing."""

    @property
    def is_terminal(self) -> bool:
        """Whether all containers have ended for good."""
        return self.phase in TERMINAL_PHASES

    @property
    def has_run(self) -> bool:
        """Whether a kubelet took it up: a node name alone may be anybody's word."""
        return bool(self.node) and (self.phase != "Pending" or bool(self.ip))


@dataclass(frozen=True)
class NodeView:
    """One node."""

    name: str
    labels: Mapping[str, str]
    is_ready: bool
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """Quantity of each resource that its pods can have together."""
    is_cordoned: bool = False
    taints: tuple[tuple[str, str], ...] = ()
    """Key and effect of each."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Status by type."""
    quarantined: str = ""
    """When and why it was quarantined, also after a person removed the taint; "" for neither."""
    offends_since: str = ""
    """Since when it bears the condition of nodes on which jobs fail again and again; "" without it."""

    @property
    def is_out_of_service(self) -> bool:
        """Whether a taint asserts that nothing runs there any more."""
        return any(key == OUT_OF_SERVICE for key, _effect in self.taints)


@dataclass(frozen=True)
class ObjectView:
    """A Secret or Service."""

    name: str
    uid: str
    owner_uid: str
    is_orphan: bool = False
    """Whether its owner reference was removed."""


@dataclass(frozen=True)
class ServiceView(ObjectView):
    """The Service of a job."""

    labels: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Those of its fields that lead agents to the rendezvous."""
    changed_by: str = ""
    """Who wrote it last, in the API server's words."""


@dataclass(frozen=True)
class SecretView(ObjectView):
    """The Secret of a job."""

    has_certificates: bool = True
    """Else the job's traffic is not encrypted: the operator's options say so, or a user removed them."""
    lacks: tuple[str, ...] = ()
    """Keys that pods read and that are not there any more, or cannot be read."""
    refused: str = ""
    """Which certificates are more than the operator reads, and what it wants; "" for none."""
    is_stale: bool = False
    """Whether it holds tokens that do not follow from the present key of the job."""


@dataclass(frozen=True)
class WriteRefusal:
    """A write that the API server refused for good: quota, admission, a template that it finds invalid."""

    name: str
    message: str


@dataclass(frozen=True)
class PolicyOptions:
    """Who may reach the rendezvous of jobs, beside their own pods."""

    operator_namespace: str
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicy peers that may read metrics; empty: everybody."""


@dataclass(frozen=True)
class OperatorOptions:
    """What the plan needs to know about the operator itself."""

    sidecar_image: str
    has_native_sidecars: bool = True
    force_delete_after_s: float = 30.0
    """A pod that is being deleted on a dead node is forced away after this."""
    linger_s: float = 60.0
    """Pods that still run so long after the job's end are deleted."""
    encrypts: bool = True
    """Whether agents and operator use TLS to the rendezvous."""
    has_job_key: bool = True
    """Whether each pod has a token of its own; else the job has one for all, as in earlier releases."""
    rendezvous_images: tuple[str, ...] = ()
    """Images that a rendezvous may have, and prefixes of such with a * at their end; empty: any."""
    lease: str = ""
    """The Lease that this operator holds, NAMESPACE/NAME; "" when it runs without one."""
    sidecar_resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """`requests` and `limits` of agents in jobs that name none."""
    rendezvous_resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Likewise of the rendezvous."""
    network_policy: PolicyOptions | None = None
    """None: jobs get no NetworkPolicy."""


@dataclass(frozen=True)
class PlanMemory:
    """What the operator remembers between two snapshots; losing it costs time, never correctness."""

    sent_to: str = ""
    """Uid of the rendezvous pod that took the last Observation."""
    sent_term: int = 0
    sent: Observation | None = None
    deleting_for_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since a pod was first seen being deleted, by uid."""
    finished_for_s: float = 0.0
    num_early_failures: int = 0
    """Pods that failed one after the other without ever joining."""
    since_failure_s: float = 0.0
    refusals: tuple[WriteRefusal, ...] = ()
    """Of the last round."""
    num_refused_rounds: int = 0
    since_refusal_s: float = 0.0
    uses: tuple[tuple[Cause, RungUse], ...] = ()
    """Recoveries of all coordinators that ended while this process looked, oldest first."""
    reverts: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """How often each change was reverted lately, and the seconds since the last time, by key of the action."""
    posted: frozenset[str] = frozenset()
    """Names of Events that need not be posted again."""
    num_circles: int = 0
    """How often in a row pods went before they were of use, and others were made in their place."""
    since_circle_s: float = 0.0
    last_circle: str = ""
    """The last such pod and why it went."""
    creations_left: int | None = None
    """So many pods may be created now; None: any number."""
    creation_wait_s: float = 0.0
    """Until the next one may be."""
    throttled: tuple[Budget, ...] = ()
    """Of what there was too much lately."""
    next_pod_ordinal: int = 0
    """No lower one is free, whatever the status says: it may be that of a backup."""
    unused_ordinals: frozenset[int] = frozenset()
    """Reserved for training pods that were certainly never made: the API server refused them, or was not asked."""
    next_rendezvous_ordinal: int = 0
    sound_spec: Mapping[str, Any] | None = None
    """The last spec of the job that was sound; None when this process has seen none."""
    rival: str = ""
    """The Lease of another operator that leads this job as well; "" for none lately."""
    rival_for_s: float = 0.0
    """Since when."""
    gone: tuple[GonePod, ...] = ()
    """Pods of the last world that have gone, for a coordinator that has yet to take it over."""
    earlier: EarlierRun | None = None
    """How the job did under the coordinator before the present one."""
    earlier_term: int = 0
    """The term of that one."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that a plan depends on."""

    job: Mapping[str, Any]
    """The ResilientTrainingJob object."""
    pods: tuple[PodView, ...]
    """Every pod that bears the job's label, sorted by name; some may belong to an earlier job of that name."""
    nodes: Mapping[str, NodeView]
    secret: SecretView | None
    service: ServiceView | None
    now: str
    """Wall-clock time, RFC 3339 UTC."""
    options: OperatorOptions
    num_ended: int = 0
    """Training pods of this job that were seen to end, and are deleted by now."""
    report: JobStatus | None = None
    """The last report of the rendezvous."""
    report_from: str = ""
    """Uid of the rendezvous pod that it came from."""
    is_reachable: bool = False
    """Whether the last attempt to reach the rendezvous worked."""
    unreachable_because: str = ""
    is_report_refused: bool = False
    """Whether that is because its report is not one of a job of this size."""
    unheard_for_s: float = 0.0
    """Seconds since the first attempt to reach it that failed, or since there is nobody to be reached."""
    heard_at: str = ""
    """Wall-clock time of its last answer, RFC 3339 UTC; "" when this process has heard none."""
    memory: PlanMemory = PlanMemory()
    released: tuple[PodView, ...] = ()
    """Training pods that run on after their job label was removed."""
    may_replace_rendezvous: bool = True
    """Whether one that works may be replaced now because its settings are others: not all jobs do so at once."""
    has_job_key: bool = True
    """Else an earlier release began the job, and its pods share one token."""
    tokens: Mapping[int, SecretView] = field(default_factory=dict)
    """Secrets with pods' tokens that are known to exist, by block."""
    hosts: frozenset[str] = frozenset()
    """Nodes on which the operator saw pods of this job run: reports may name any."""
    tainted_devices: Mapping[str, str] = field(default_factory=dict)
    """Tainted devices of pods of all jobs, for people, by uid of the pod."""
    unseen_nodes: frozenset[str] = frozenset()
    """Nodes of pods that this process has not seen yet: the watch of nodes may be behind that of pods."""

    @property
    def uid(self) -> str:
        """Uid of the job."""
        return str(self.job["metadata"]["uid"])

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def status(self) -> Mapping[str, Any]:
        """What is believed of the stored status."""
        return self.job.get("status") or {}

    @property
    def stored_status(self) -> Mapping[str, Any]:
        """Status as it is stored, whoever has written it."""
        return self.job.get(STORED_STATUS) or self.status

    @property
    def secrets(self) -> tuple[SecretView, ...]:
        """All Secrets that are known to exist."""
        return (*(() if self.secret is None else (self.secret,)), *self.tokens.values())

    @property
    def is_encrypted(self) -> bool:
        """Whether the job's traffic is encrypted, as its Secret says."""
        return self.options.encrypts if self.secret is None else self.secret.has_certificates

    @property
    def options_of_job(self) -> OperatorOptions:
        """The operator's options as they hold for this job."""
        return replace(self.options, encrypts=self.is_encrypted, has_job_key=self.has_job_key)

    @property
    def reserved_pod_ordinals(self) -> int:
        """The lowest ordinal that was never reserved for a training pod, as far as status and memory tell."""
        return max(self.status.get("nextPodOrdinal") or 0, self.memory.next_pod_ordinal)

    @cached_property
    def next_pod_ordinal(self) -> int:
        """The lowest ordinal that no training pod ever had, as far as status, pods, memory and report tell.

        After a restore of etcd the status may not know the last ones; nor does an operator that was started since. Pods
        and the rendezvous know them, and are believed up to a bound: anybody who may create pods in the namespace can
        make one that looks like the job's, and the image of the rendezvous is the user's.
        """
        told = self.reserved_pod_ordinals
        while told - 1 in self.memory.unused_ordinals:
            told -= 1
        known = max([told, *(number + 1 for number in self._ordinals(layout.TRAINER) if number < told + MAX_AHEAD)])
        members = () if self.report is None else self.report.pods
        ordinals = {pod.pod: layout.pod_ordinal(pod.pod) for pod in members}
        own = (number for name, number in ordinals.items() if name == layout.training_pod_name(self.name, number))
        return max([known, *(number + 1 for number in own if number < known + MAX_AHEAD)])

    @cached_property
    def next_rendezvous_ordinal(self) -> int:
        """The lowest ordinal that no rendezvous pod ever had, as far as status, pods and memory tell."""
        told = max(self.status.get("nextRendezvousOrdinal") or 0, self.memory.next_rendezvous_ordinal)
        return max([told, *(number + 1 for number in self._ordinals(layout.RENDEZVOUS) if number < told + MAX_AHEAD)])

    def trainers(self) -> tuple[PodView, ...]:
        """Training pods of this very job."""
        return self._trainers

    def rendezvous_pods(self) -> tuple[PodView, ...]:
        """Rendezvous pods of this very job."""
        return self._rendezvous_pods

    @cached_property
    def _trainers(self) -> tuple[PodView, ...]:
        return self._owned(layout.TRAINER)

    @cached_property
    def _rendezvous_pods(self) -> tuple[PodView, ...]:
        return self._owned(layout.RENDEZVOUS)

    def _owned(self, component: str) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if pod.owner_uid == self.uid and is_named_as(pod, component, self.name))

    def _ordinals(self, component: str) -> Iterator[int]:
        return (pod.ordinal for pod in self.pods if is_named_as(pod, component, self.name))


def is_named_as(pod: PodView, component: str, job: str) -> bool:
    """Return whether a pod bears the name of one of the job's: whoever may create pods there can forge all else."""
    if pod.component != component or not 0 <= pod.ordinal < MAX_ORDINAL:
        return False
    if component == layout.TRAINER:
        return pod.name == layout.training_pod_name(job, pod.ordinal)
    return component == layout.RENDEZVOUS and pod.name == layout.rendezvous_pod_name(job, pod.ordinal)


def controller_uid(item: Mapping[str, Any]) -> str:
    """Return the uid of an object's controller; of the job that it was made for if it has none any more."""
    for reference in item["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return _uid(reference["uid"])
    return _uid((item["metadata"].get("annotations") or {}).get(layout.JOB_UID_ANNOTATION, ""))


def _uid(text: Any) -> str:
    """Return a uid; "" for one that is longer than the API server makes any."""
    return text if isinstance(text, str) and len(text) <= MAX_UID else ""


def is_orphan(item: Mapping[str, Any]) -> bool:
    """Return whether an object has no controller."""
    return not any(reference.get("controller") for reference in item["metadata"].get("ownerReferences") or ())


def service_view(item: Mapping[str, Any]) -> ServiceView:
    """Read a Service."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    shown = {key: spec.get(key) for key in ("type", "selector", "ports", "publishNotReadyAddresses")}
    writes = [entry for entry in metadata.get("managedFields") or () if not entry.get("subresource")]
    return ServiceView(
        metadata["name"],
        metadata["uid"],
        controller_uid(item),
        is_orphan(item),
        labels=_kept(metadata.get("labels") or {}),
        spec={} if exceeds(shown, MAX_SERVICE_VALUES, MAX_SERVICE_CHARACTERS) else shown,
        changed_by=max(writes, key=lambda entry: entry.get("time") or "")["manager"] if writes else "",
    )


def node_view(item: Mapping[str, Any]) -> NodeView:
    """Read a Node."""
    status = item.get("status") or {}
    conditions = status.get("conditions") or ()
    is_ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    labels, allocatable = item["metadata"].get("labels") or {}, status.get("allocatable") or {}
    spec = item.get("spec") or {}
    return NodeView(
        item["metadata"]["name"],
        dict(labels),
        is_ready,
        dict(allocatable),
        is_cordoned=bool(spec.get("unschedulable")),
        taints=tuple((taint["key"], taint.get("effect", "")) for taint in spec.get("taints") or ()),
        conditions={condition["type"]: condition["status"] for condition in conditions},
        quarantined=(item["metadata"].get("annotations") or {}).get(layout.QUARANTINE, ""),
        offends_since=_offends_since(conditions),
    )


def _offends_since(conditions: Iterable[Mapping[str, Any]]) -> str:
    times = (item.get("lastTransitionTime") for item in conditions if item["type"] == layout.OFFENDER_CONDITION)
    return next((str(time or "?") for time in times), "")


def pod_view(item: Mapping[str, Any]) -> PodView:
    """Read a Pod."""
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    own = {key: annotations.get(key, "")[:most] for key, most in _OWN.items()}
    phase = status.get("phase") or "Pending"
    component, made_as = labels.get(layout.COMPONENT_LABEL, ""), _made_as(annotations)
    is_standby = made_as == layout.RENDEZVOUS and layout.STANDBY_ANNOTATION in annotations
    is_mislabelled = bool(made_as) and component != made_as and not (is_standby and component == layout.STANDBY)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(item),
        component=made_as or component,
        role=labels.get(layout.ROLE_LABEL, ""),
        ordinal=layout.pod_ordinal(metadata["name"]),
        node=spec.get("nodeName") or "",
        phase=phase,
        ip=status.get("podIP") or "",
        is_deleting=bool(metadata.get("deletionTimestamp")),
        is_ready=_is_true(status, "Ready"),
        settings=own[layout.SETTINGS_ANNOTATION],
        made_from=own[layout.MADE_FROM_ANNOTATION],
        topology=own[layout.TOPOLOGY_ANNOTATION],
        labels=_kept({key: value for key, value in labels.items() if not layout.is_reserved_key(key)}),
        annotations=_kept(
            {
                key: value
                for key, value in annotations.items()
                if len(value) <= MAX_DOMAIN and not layout.is_reserved_key(key)
            }
        ),
        template=own[layout.TEMPLATE_ANNOTATION],
        leaving=own[layout.LEAVING_ANNOTATION],
        avoids=tuple(filter(None, own[layout.AVOIDS_ANNOTATION].split(",")))[:MAX_AVOIDED],
        problem=None if phase in TERMINAL_PHASES else _problem(spec, status),
        agent_crashes=_agent_crashes(status) if phase == "Running" else "",
        end=_end(status) if phase == "Failed" else "",
        is_orphan=is_orphan(item),
        is_mislabelled=is_mislabelled,
        is_standby=is_standby,
        finalizers=tuple(text[:MAX_FINALIZER] for text in (metadata.get("finalizers") or ())[:MAX_FINALIZERS]),
        has_ended=_has_ended(item),
        broken_device=_broken_device(status),
        claims=_own_claims(status),
        cut=_cut(metadata),
    )


_OWN = {
    layout.SETTINGS_ANNOTATION: MAX_DIGEST,
    layout.MADE_FROM_ANNOTATION: MAX_DIGEST,
    layout.TEMPLATE_ANNOTATION: MAX_DIGEST,
    layout.TOPOLOGY_ANNOTATION: MAX_TOPOLOGY,
    layout.LEAVING_ANNOTATION: MAX_LEAVING,
    layout.AVOIDS_ANNOTATION: MAX_AVOIDS,
}
"""Characters that are kept of each annotation of ours: what is longer somebody else has written."""


def _kept(items: Mapping[str, str]) -> dict[str, str]:
    """Return the first of a pod's labels or annotations, as many as any sound pod has."""
    kept: dict[str, str] = {}
    num_left = MAX_LABELS_CHARACTERS
    for key, value in items.items():
        num_left -= len(key) + len(value)
        if num_left < 0 or len(kept) >= MAX_LABELS:
            break
        kept[key] = value
    return kept


def _cut(metadata: Mapping[str, Any]) -> str:
    """Return which field of a pod's metadata is not kept as it is; "" for none."""
    annotations = metadata.get("annotations") or {}
    for key, most in (*_OWN.items(), (layout.JOB_UID_ANNOTATION, MAX_UID)):
        if len(annotations.get(key, "")) > most:
            return f"metadata.annotations[{key}]: want at most {most} characters, got {len(annotations[key])}"
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller") and len(str(reference["uid"])) > MAX_UID:
            return f"metadata.ownerReferences: want a uid of at most {MAX_UID} characters, got {len(reference['uid'])}"
    short = {key: value for key, value in annotations.items() if len(value) <= MAX_DOMAIN}
    for kind, items in (("labels", metadata.get("labels") or {}), ("annotations of a label's length", short)):
        num = sum(len(key) + len(value) for key, value in items.items())
        if len(items) > MAX_LABELS or num > MAX_LABELS_CHARACTERS:
            wanted = f"{MAX_LABELS} with {MAX_LABELS_CHARACTERS} characters"
            return f"metadata, {kind}: want at most {wanted}, got {len(items)} with {num}"
    finalizers = metadata.get("finalizers") or ()
    if len(finalizers) > MAX_FINALIZERS:
        return f"metadata.finalizers: want at most {MAX_FINALIZERS}, got {len(finalizers)}"
    return ""


def _made_as(annotations: Mapping[str, str]) -> str:
    """Return the component that a pod was made as; "" when its annotations do not tell."""
    # Every training pod has this one, and no rendezvous: earlier releases took over any other from the template.
    if layout.TEMPLATE_ANNOTATION in annotations:
        return layout.TRAINER
    return layout.RENDEZVOUS if layout.SETTINGS_ANNOTATION in annotations else ""


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in status.get("conditions") or ())


def _container_statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    # The user's own first: our agent ends when they do, which explains nothing.
    return [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]


def _has_ended(item: Mapping[str, Any]) -> bool:
    status = item.get("status") or {}
    if not (item.get("spec") or {}).get("nodeName"):
        return bool(item["metadata"].get("deletionTimestamp"))
    if not item["metadata"].get("deletionTimestamp") and status.get("phase") not in TERMINAL_PHASES:
        return False
    # A phase alone is no proof: controllers that give up a node write it, too.
    states = [container.get("state") or {} for container in _container_statuses(status)]
    return bool(states) and not any("running" in state for state in states)


def _problem(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Problem | None:
    gates = [gate["name"] for gate in spec.get("schedulingGates") or ()]
    if gates:
        return Problem(Reason.PODS_GATED, shorten(f"held back by scheduling gate {', '.join(gates)}"))
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Problem(Reason.UNSCHEDULABLE, shorten(condition.get("message") or condition.get("reason") or ""))
    for container in _container_statuses(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = _WAITING_REASONS.get(waiting.get("reason", ""))
        if reason is not None:
            text = f"container {container['name']}: {waiting['reason']}: {waiting.get('message', '')}"
            return Problem(reason, shorten(text.rstrip(": ")))
    return None


def _agent_crashes(status: Mapping[str, Any]) -> str:
    for container in _container_statuses(status):
        if container.get("name") != layout.AGENT_CONTAINER:
            continue
        state, num = container.get("state") or {}, container.get("restartCount") or 0
        is_looping = (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff" and num >= MIN_AGENT_RESTARTS
        # As a plain container of a pod that restarts none it does not come back; as a native sidecar it does at once.
        is_over = container in (status.get("containerStatuses") or ()) and bool(
            (state.get("terminated") or {}).get("exitCode")
        )
        if is_looping or is_over:
            last = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
            words = f"{last.get('reason', '')} {last.get('message', '')}".strip()
            code = last.get("exitCode", "unknown")
            return shorten(f"exit code {code}, {counted(num, 'restart')} {words}".rstrip())
    return ""


def _broken_device(status: Mapping[str, Any]) -> str:
    # Of device plug-ins and of resource claims alike; Unknown is no finding.
    for container in _container_statuses(status):
        for allocated in container.get("allocatedResourcesStatus") or ():
            for device in allocated.get("resources") or ():
                if device.get("health") == "Unhealthy":
                    name, device_id = str(allocated.get("name", ""))[:100], str(device.get("resourceID", ""))[:100]
                    return shorten(f"device {device_id} ({name}) of container {container['name'][:100]} is Unhealthy")
    return ""


def _own_claims(status: Mapping[str, Any]) -> tuple[str, ...]:
    # Not those that a pod's spec names: others may share them, and ranks would move from a device to the same one.
    names = [item.get("resourceClaimName") for item in (status.get("resourceClaimStatuses") or ())[:MAX_CLAIMS]]
    names.append((status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName"))
    return tuple(name for name in names if isinstance(name, str) and 0 < len(name) <= MAX_CLAIM)


def _end(status: Mapping[str, Any]) -> str:
    if status.get("reason"):
        return shorten(f"{status['reason']}: {status.get('message', '')}".rstrip(": "))
    for container in _container_statuses(status):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            details = f"{ended.get('reason', '')} {ended.get('message', '')}".strip()
            return shorten(f"container {container['name']} ended with exit code {ended['exitCode']} {details}".rstrip())
    return "no container says why"


def shorten(text: str) -> str:
    """Return what others say as one line that may stand in the annotation of a pod that is to leave."""
    # It goes into annotations, which a terminal may show as they are.
    line = printable(" ".join(text.split())[: MAX_LEAVING + 1])
    return line if len(line) <= MAX_LEAVING else f"{line[: MAX_LEAVING - 3]}..."
