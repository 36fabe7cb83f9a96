"""Pure: changes that others made to the job's objects are reverted or reported, and no fight is begun.

    Service             leads to the rendezvous again
    pods                get owner, component, role and topology back
    Secrets             get the tokens of the present job key; all else in them is reported, since users replace it
    finalizers, the     are reported: somebody wants them. A pod without the job's label is no pod of the job, as
    job's label         with a ReplicaSet: users take a sick pod aside that way

Changes that come back are reverted with increasing back-off: another controller may insist on them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Reason, Role
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import Action, PatchPod, PostEvent, RepairTokens, Revert
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.limits.retry import retry_delay_s
from unbroken_operator.decisions.objects.manifests import owner_reference, service
from unbroken_operator.decisions.reporting.events import event
from unbroken_operator.decisions.snapshot import PlanMemory, PodView, ServiceView, Snapshot

NUM_FREE_STAMPS = 5
"""So many changes are free: recoveries change roles, too."""
NUM_INSISTED = 3
OWNER, LABELS = "metadata.ownerReferences", "metadata.labels"


@dataclass(frozen=True)
class Drift:
    """What to revert now, and the seconds until there may be more; 0 for nothing."""

    actions: tuple[Action, ...]
    wait_s: float


def drift(snapshot: Snapshot, settings: JobSettings, assessment: Assessment) -> Drift:
    """Return what to revert, with Events; stale labels and annotations are corrected without one."""
    actions: list[Action] = []
    waits: list[float] = []
    for revert in _reverts(snapshot, settings):
        num, wait_s = _held_back(snapshot.memory, revert.key)
        if wait_s > 0:
            waits.append(wait_s)
        else:
            actions += [*_revert_event(snapshot, revert, num), revert]
    for repair in _repairs(snapshot):
        _, wait_s = _held_back(snapshot.memory, repair.key)
        if wait_s > 0:
            waits.append(wait_s)
        else:
            actions.append(repair)
    for patch in _stamps(snapshot, settings, assessment):
        _, wait_s = _held_back(snapshot.memory, patch.key, NUM_FREE_STAMPS)
        if wait_s > 0:
            waits.append(wait_s)
        else:
            actions.append(patch)
    return Drift(tuple(actions), min(waits, default=0.0))


def notices(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield the Events of changes that are not reverted, as far as none was posted."""
    for manifest in _notices(snapshot):
        if manifest["metadata"]["name"] not in snapshot.memory.posted:
            yield manifest


def _held_back(memory: PlanMemory, key: str, num_free: int = 0) -> tuple[int, float]:
    """Return how often this was done lately, and the seconds until it may be done again."""
    num, since_s = memory.reverts.get(key, (0, 0.0))
    return num, max(0.0, retry_delay_s(num - num_free) - since_s)


def _reverts(snapshot: Snapshot, settings: JobSettings) -> Iterator[Revert]:
    owner = owner_reference(settings.job, settings.uid)
    if snapshot.service is not None:
        yield from _service_revert(snapshot.service, service(settings), owner)
    for pod in (*snapshot.rendezvous_pods(), *snapshot.trainers()):
        fields = tuple(name for name, is_wrong in ((OWNER, pod.is_orphan), (LABELS, pod.is_mislabelled)) if is_wrong)
        if fields and not pod.is_deleting:
            labels = {layout.COMPONENT_LABEL: pod.component} if pod.is_mislabelled else {}
            patch = {"metadata": {"labels": labels}} if labels else {}
            yield Revert("pods", pod.name, pod.uid, fields, patch, owner if pod.is_orphan else None)


def _repairs(snapshot: Snapshot) -> Iterator[RepairTokens]:
    named = [(None, snapshot.secret), *snapshot.tokens.items()]
    for block, secret in named:
        if secret is not None and secret.is_stale and secret.owner_uid == snapshot.uid:
            yield RepairTokens(block, secret.name, secret.uid)


def _service_revert(seen: ServiceView, made: Mapping[str, Any], owner: Mapping[str, Any]) -> Iterator[Revert]:
    labels, wanted = made["metadata"]["labels"], made["spec"]
    fields: list[str] = [OWNER] if seen.is_orphan else []
    patch: dict[str, Any] = {}
    if labels.items() - seen.labels.items():
        fields.append(LABELS)
        patch["metadata"] = {"labels": labels}
    spec = dict(_service_changes(seen.spec, wanted))
    if fields or spec:
        fields += [f"spec.{name}" for name in spec]
        yield Revert(
            "services",
            seen.name,
            seen.uid,
            tuple(fields),
            patch | ({"spec": spec} if spec else {}),
            owner if seen.is_orphan else None,
        )


def _service_changes(seen: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what to merge into the spec; added ports and other fields do no harm."""
    if seen.get("type") == "ExternalName":
        yield from (("type", "ClusterIP"), ("externalName", None))
    selector = seen.get("selector") or {}
    if selector != wanted["selector"]:
        yield "selector", {**dict.fromkeys(selector), **wanted["selector"]}
    ports = [{key: port.get(key) for key in wanted["ports"][0]} for port in seen.get("ports") or ()]
    if not all(port in ports for port in wanted["ports"]):
        yield "ports", wanted["ports"]
    if not seen.get("publishNotReadyAddresses"):
        yield "publishNotReadyAddresses", True


def _revert_event(snapshot: Snapshot, revert: Revert, num: int) -> Iterator[PostEvent]:
    what = f"{'Service' if revert.resource == 'services' else 'Pod'} {revert.name}"
    fields = ", ".join(revert.fields)
    by = snapshot.service.changed_by if snapshot.service is not None and revert.resource == "services" else ""
    whom = f"somebody else (last written by {by})" if by else "somebody else"
    message, key = f"{what}: {fields} changed by {whom}; reverted", ("mended", revert.key)
    if num >= NUM_INSISTED:
        message = (
            f"{what}: {fields} changed by {whom} again and again; reverted with increasing back-off. Leave it alone"
        )
        key = ("fight", revert.key)
    manifest = event(snapshot, key, Reason.CHANGED_BY_HAND.value, "Warning", message)
    if manifest["metadata"]["name"] not in snapshot.memory.posted:
        yield PostEvent(manifest)


def _notices(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    secret = snapshot.secret
    if secret is not None and secret.is_orphan and secret.owner_uid == snapshot.uid:
        message = (
            f"Secret {secret.name}: {OWNER} changed by somebody else: it would stay when the job is deleted. "
            "Delete it, and the operator recreates it with its content"
        )
        yield event(snapshot, ("orphan", secret.uid), Reason.CHANGED_BY_HAND.value, "Warning", message)
    for pod in (*snapshot.rendezvous_pods(), *snapshot.trainers()):
        if pod.is_deleting and pod.has_ended and pod.finalizers:
            message = (
                f"pod {pod.name} has ended and stays because of the finalizer {', '.join(pod.finalizers)}: whoever "
                "set it has to remove it; the job goes on without the pod"
            )
            yield event(snapshot, ("held", pod.uid), Reason.HELD_BY_FINALIZER.value, "Warning", message)
    for pod in snapshot.released:
        if pod.owner_uid == snapshot.uid:
            yield event(snapshot, ("released", pod.uid), Reason.POD_RELEASED.value, "Warning", _released(pod))


def _released(pod: PodView) -> str:
    where = f" on node {pod.node}" if pod.node else ""
    return (
        f"pod {pod.name} has lost the label {layout.JOB_LABEL}: it counts as deleted and is replaced, but keeps running"
        f"{where} until it is deleted, or the job is"
    )


def _stamps(snapshot: Snapshot, settings: JobSettings, assessment: Assessment) -> Iterator[PatchPod]:
    """Yield the labels and annotations of pods that are not as things stand."""
    metadata = snapshot.job["spec"]["template"].get("metadata") or {}
    gang = (metadata.get("labels") or {}).get(layout.GANG_LABEL)
    names = [layer.name for layer in settings.layers]
    for pod in assessment.alive:
        role = assessment.role(pod).value
        labels: dict[str, str | None] = {layout.ROLE_LABEL: role} if role != pod.role else {}
        if gang is not None and (role == Role.ACTIVE.value) is not (layout.GANG_LABEL in pod.labels):
            labels[layout.GANG_LABEL] = gang if role == Role.ACTIVE.value else None
        annotations = {}
        if names and pod.uid in assessment.domains.by_pod:
            topology = json.dumps(dict(zip(names, assessment.domains.by_pod[pod.uid], strict=True)))
            annotations = {layout.TOPOLOGY_ANNOTATION: topology} if topology != pod.topology else {}
        if (labels or annotations) and not pod.is_terminal:
            yield PatchPod(pod.name, pod.uid, labels, annotations)
