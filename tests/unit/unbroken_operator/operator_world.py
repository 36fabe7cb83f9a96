"""A cluster in memory for tests of the pure plan: it holds raw objects and does what actions say."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from unbroken_core.protocol.messages import PROTOCOL, JobStatus, Observation, PodStatus, Recovery
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase
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
)
from unbroken_operator.decisions.admission import held
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import (
    OperatorOptions,
    PlanMemory,
    SecretView,
    ServiceView,
    Snapshot,
    WriteRefusal,
    node_view,
    pod_view,
    service_view,
)

JsonObject = dict[str, Any]
CONTAINER: JsonObject = {"name": "trainer", "image": "torch:2", "command": ["python3", "t.py"]}
LAYERS = [{"name": "rack", "label": "example.com/rack"}, {"name": "nvlink", "label": "example.com/nvlink"}]


def a_job(name: str = "digits", **spec: Any) -> JsonObject:
    """Return a sound job as the API server would return it."""
    return {
        "apiVersion": layout.API_VERSION,
        "kind": layout.KIND,
        "metadata": {"name": name, "namespace": "ml", "uid": f"uid-of-{name}", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "replicas": 2,
            "spares": {"count": 1},
            "ranksPerPod": 2,
            "template": {"spec": {"containers": [dict(CONTAINER)]}},
            **spec,
        },
    }


def a_node(name: str, is_ready: bool = True, **labels: str) -> JsonObject:
    """Return a node; label names are given without their prefix example.com/."""
    return {
        "metadata": {"name": name, "labels": {f"example.com/{key}": value for key, value in labels.items()}},
        "status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]},
    }


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def _stored(manifest: Mapping[str, Any], uid: str) -> JsonObject:
    stored = copy.deepcopy(dict(manifest))
    stored["metadata"]["uid"] = uid
    return stored


class World:
    """What the API server and the rendezvous would hold."""

    def __init__(self, job: JsonObject | None = None, nodes: list[JsonObject] | None = None) -> None:
        self.job = job if job is not None else a_job()
        self.pods: dict[str, JsonObject] = {}
        self.nodes = {item["metadata"]["name"]: item for item in nodes or [a_node("a", rack="r1", nvlink="n1")]}
        self.secret: SecretView | None = None
        self.tokens: dict[int, SecretView] = {}
        self.has_job_key = True
        self.service_object: JsonObject | None = None
        self.released: list[JsonObject] = []
        self.events: dict[str, JsonObject] = {}
        self.pushed: list[tuple[str, int, Observation]] = []
        self.report: JobStatus | None = None
        self.report_from = ""
        self.is_reachable = False
        self.unreachable_because = ""
        self.is_report_refused = False
        self.unheard_for_s = 0.0
        self.heard_at = ""
        self.memory = PlanMemory()
        self.options = OperatorOptions("sidecar:1")
        self.network_policies: dict[str, dict[str, Any]] = {}
        self.now = "2026-01-01T00:00:00Z"
        self.num_status_writes = 0
        self.created: list[str] = []
        self.deleted: list[DeletePod] = []
        self.led: list[LetLead] = []
        self.hosts: set[str] = set()
        self.tainted_devices: dict[str, str] = {}
        """By uid of the pod."""
        self._next_uid = 0

    def snapshot(self) -> Snapshot:
        """Return what the operator would see now."""
        pods = tuple(pod_view(pod) for _, pod in sorted(self.pods.items()))
        self.hosts |= {pod.node for pod in pods if pod.has_run}
        return Snapshot(
            job=held(copy.deepcopy(self.job)),
            pods=pods,
            hosts=frozenset(self.hosts),
            nodes={name: node_view(item) for name, item in self.nodes.items()},
            secret=self.secret,
            tokens=dict(self.tokens),
            has_job_key=self.has_job_key,
            service=self.service,
            released=tuple(pod_view(pod) for pod in self.released),
            now=self.now,
            options=self.options,
            report=self.report,
            report_from=self.report_from,
            is_reachable=self.is_reachable,
            unreachable_because=self.unreachable_because,
            is_report_refused=self.is_report_refused,
            unheard_for_s=self.unheard_for_s,
            heard_at=self.heard_at,
            memory=self.memory,
            tainted_devices=dict(self.tainted_devices),
        )

    @property
    def service(self) -> ServiceView | None:
        """The Service as the operator would see it."""
        return None if self.service_object is None else service_view(self.service_object)

    def actions(self) -> tuple[Action, ...]:
        """Return what the plan asks for now."""
        decision = plan(self.snapshot())
        sound = decision.sound_spec or self.memory.sound_spec
        self.memory = dataclasses.replace(self.memory, sound_spec=copy.deepcopy(sound))
        return decision.actions

    def settle(self, limit: int = 10) -> int:
        """Plan and act until nothing is left to do; return the number of rounds with actions."""
        for number in range(limit):
            actions = self.actions()
            if not actions:
                return number
            for action in actions:
                self.apply(action)
        raise AssertionError(f"still actions after {limit} rounds: {self.actions()}")

    def apply(self, action: Action) -> None:
        """Do one action as the API server would; doing it again changes nothing."""
        match action:
            case PushObservation(pod_uid, term, observation):
                self.pushed.append((pod_uid, term, observation))
                self.memory = dataclasses.replace(self.memory, sent_to=pod_uid, sent_term=term, sent=observation)
            case PostEvent(manifest):
                self.events.setdefault(manifest["metadata"]["name"], dict(manifest))
                told = self.memory.posted | {manifest["metadata"]["name"]}
                self.memory = dataclasses.replace(self.memory, posted=told)
            case WriteStatus(patch):
                self.job["status"] = merge_patch(self.job.get("status") or {}, patch)
                self.num_status_writes += 1
            case CreateTokens(block, manifest):
                self.tokens.setdefault(block, SecretView(*self._owned(manifest)))
            case RepairTokens(block, _, uid):
                self._repair(block, uid)
            case LetLead(name, uid):
                self.led.append(action)
                labels = {layout.COMPONENT_LABEL: layout.RENDEZVOUS}
                self.apply(PatchPod(name, uid, labels, {layout.STANDBY_ANNOTATION: None}))
            case _:
                self._apply_to_objects(action)

    def _apply_to_objects(
        self,
        action: CreateSecret
        | CreateService
        | CreateNetworkPolicy
        | CreatePod
        | DeletePod
        | PatchPod
        | Revert
        | DeleteJob,
    ) -> None:
        match action:
            case CreateSecret(manifest):
                self.secret = self.secret or SecretView(*self._owned(manifest), has_certificates=self.options.encrypts)
            case CreateService(manifest):
                self.service_object = self.service_object or _stored(manifest, "uid-of-service")
            case CreateNetworkPolicy(manifest):
                self.network_policies.setdefault(manifest["metadata"]["name"], dict(manifest))
            case CreatePod(manifest):
                self._create_pod(manifest)
            case DeletePod():
                self._delete_pod(action)
            case PatchPod(name, uid, labels, annotations):
                if name in self.pods and self.pods[name]["metadata"]["uid"] == uid:
                    patch = {"metadata": {"labels": labels, "annotations": annotations}}
                    self.pods[name] = merge_patch(self.pods[name], patch)
            case Revert():
                self._revert(action)
            case DeleteJob():
                self._delete_job(action)
            case _:
                assert_never(action)

    def _repair(self, block: int | None, uid: str) -> None:
        if block is None and self.secret is not None and self.secret.uid == uid:
            self.secret = dataclasses.replace(self.secret, is_stale=False)
        if block is not None and self.tokens[block].uid == uid:
            self.tokens[block] = dataclasses.replace(self.tokens[block], is_stale=False)

    @staticmethod
    def _owned(manifest: Mapping[str, Any]) -> tuple[str, str, str]:
        name = manifest["metadata"]["name"]
        return name, f"uid-of-{name}", manifest["metadata"]["ownerReferences"][0]["uid"]

    def _create_pod(self, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return
        self._next_uid += 1
        pod = _stored(manifest, f"pod-{self._next_uid}")
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        self.created.append(name)

    def _delete_job(self, action: DeleteJob) -> None:
        metadata = self.job["metadata"]
        if (metadata["uid"], metadata["resourceVersion"]) == (action.uid, action.resource_version):
            metadata["deletionTimestamp"] = self.now

    def _revert(self, action: Revert) -> None:
        found = self.service_object if action.resource == "services" else self.pods.get(action.name)
        if found is None or found["metadata"]["uid"] != action.uid:
            return
        mended = merge_patch(found, action.patch)
        if action.owner is not None:
            mended["metadata"]["ownerReferences"] = [dict(action.owner)]
        if action.resource == "services":
            self.service_object = mended
        else:
            self.pods[action.name] = mended

    def _delete_pod(self, action: DeletePod) -> None:
        pod = self.pods.get(action.name)
        if pod is None or pod["metadata"]["uid"] != action.uid:
            return
        self.deleted.append(action)
        if action.is_forced or not pod["spec"].get("nodeName"):
            del self.pods[action.name]
        else:
            pod["metadata"]["deletionTimestamp"] = self.now

    # --------------------------------------------------------------------------------- the world outside the operator

    def run_pods(self, node: str = "a") -> None:
        """Let every pending pod run on a node."""
        for number, pod in enumerate(self.pods.values()):
            if pod["status"]["phase"] == "Pending":
                pod["spec"]["nodeName"] = node
                ready = {"type": "Ready", "status": "True"}
                pod["status"] = {"phase": "Running", "podIP": f"127.0.0.{number + 1}", "conditions": [ready]}

    def end_pod(self, name: str, phase: str) -> None:
        """Let a pod end."""
        self.pods[name]["status"] = {"phase": phase}

    def remove_pod(self, name: str) -> None:
        """Let a pod disappear, as by hand or by its kubelet."""
        del self.pods[name]

    def names(self, component: str = layout.TRAINER) -> list[str]:
        """Return the names of the pods of a component."""
        return sorted(
            name for name, pod in self.pods.items() if pod["metadata"]["labels"][layout.COMPONENT_LABEL] == component
        )

    def uid_of(self, name: str) -> str:
        """Return a pod's uid."""
        return str(self.pods[name]["metadata"]["uid"])

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        (found,) = (item for item in self.job["status"]["conditions"] if item["type"] == kind)
        return found["status"], found["reason"]

    def messages(self, reason: str) -> list[str]:
        """Return what the Events of a reason say."""
        return [item["message"] for item in self.events.values() if item["reason"] == reason]

    def told_to_leave(self) -> list[str]:
        """Return the pods of which the rendezvous was told last that they go."""
        return sorted(pod.pod for pod in self.pushed[-1][2].pods.values() if pod.gone is Cause.POD_LEAVING)

    def refuse(self, name: str, message: str) -> None:
        """Let the last round have been refused."""
        self.memory = dataclasses.replace(
            self.memory, refusals=(WriteRefusal(name, message),), num_refused_rounds=1, since_refusal_s=0.0
        )

    def rendezvous_says(self, phase: JobPhase, active: list[str], spare: list[str], **fields: Any) -> None:
        """Let the rendezvous report these pods."""
        pods = [self._member(name, Role.ACTIVE, index) for index, name in enumerate(active)]
        pods += [self._member(name, Role.SPARE, 0) for name in spare]
        reasons = {
            JobPhase.RUNNING: Reason.TRAINING,
            JobPhase.COMPLETE: Reason.COMPLETED,
            JobPhase.FAILED: Reason.BUDGET_EXHAUSTED,
            JobPhase.FORMING: Reason.WAITING_FOR_PODS,
        }
        previous = self.report
        values: dict[str, Any] = {
            "protocol": PROTOCOL,
            "job": self.job["metadata"]["name"],
            "term": 1,
            "revision": 1 if previous is None else previous.revision + 1,
            "phase": phase,
            "reason": reasons.get(phase, Reason.RECOVERING),
            "message": f"the job is {phase}",
            "iteration": -1 if phase is JobPhase.FORMING else 0,
            "world_size": 2 * len(active),
            "spare_ranks": 2 * len(spare),
            "lost_ranks": 0,
            "pods": tuple(pods),
            "restarts_by_rung": {},
            "restarts_by_cause": {},
            "recoveries": (),
            "max_step": -1,
            "ettr": None,
            **fields,
        }
        self.report = JobStatus(**values)
        (name,) = [name for name in self.names(layout.RENDEZVOUS) if self._is_up(name)][-1:]
        self.report_from = self.uid_of(name)
        self.is_reachable = True

    def _is_up(self, name: str) -> bool:
        return "deletionTimestamp" not in self.pods[name]["metadata"]

    def _member(self, name: str, role: Role, index: int) -> PodStatus:
        ranks = (2 * index, 2 * index + 1) if role is Role.ACTIVE else ()
        node = self.pods[name]["spec"].get("nodeName", "")
        phase = WorkerPhase.RUNNING if role is Role.ACTIVE else WorkerPhase.READY
        return PodStatus(name, self.uid_of(name), node, role, ranks, (), (phase,) * 2, True)


def running_world(**spec: Any) -> World:
    """Return a world with a job that trains: digits-0 and digits-1 active, digits-2 spare, all on node a."""
    world = World(a_job(**spec))
    world.settle()
    world.run_pods()
    world.settle()
    world.run_pods()
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    return world


def a_recovery(number: int = 1, **fields: Any) -> Recovery:
    """Return a finished recovery."""
    values: dict[str, Any] = {
        "number": number,
        "cause": Cause.EXCEPTION,
        "rung": Rung.IN_PROCESS,
        "rank": 3,
        "pod": "digits-1",
        "node": "a",
        "domain": "n1",
        "detail": "ValueError: boom",
        "iteration_before": 0,
        "iteration_after": 1,
        "replaced_by": (),
        "phase_s": {"detect": 0.01, "stop": 0.05},
        "started_at": "2026-01-01T00:01:00Z",
        "ended_at": "2026-01-01T00:01:01Z",
        "world_size_before": 4,
        "world_size_after": 4,
        **fields,
    }
    return Recovery(**values)
