"""Pure: where a job's rendezvous pod may run, and as whom: as its training pods, but not beside them."""

import hashlib
import json
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec

Manifest = dict[str, Any]
GPU_LABELS = ("nvidia.com/gpu.present", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator")
"""Labels of nodes with GPUs, set by NVIDIA's GPU operator, Google and Amazon."""


def rendezvous_place(spec: Spec, job: str) -> Manifest:
    """Return the part of the pod's spec that says so.

    Pull secrets, service account and priority are those of the template unless spec.rendezvous names others. It prefers
    nodes without the job's pods: a node that is lost or drained should not cost ranks and coordinator at once.
    """
    own, template = spec.rendezvous, spec.template.spec.model_extra or {}
    theirs = [
        item.model_dump(by_alias=True, exclude_none=True, mode="json")
        for item in spec.template.spec.image_pull_secrets or ()
    ]
    secrets: Any = [{"name": name} for name in own.image_pull_secrets or ()] or theirs
    found = {
        "imagePullSecrets": secrets,
        "serviceAccountName": own.service_account_name or template.get("serviceAccountName"),
        "priorityClassName": own.priority_class_name or template.get("priorityClassName"),
        "nodeSelector": dict(own.node_selector or {}),
        "tolerations": [
            item.model_dump(by_alias=True, exclude_none=True, mode="json") for item in own.tolerations or ()
        ],
        "affinity": _affinity(job),
    }
    return {key: value for key, value in found.items() if value}


def made_from(spec: Spec) -> str:
    """Return a short name of all that a job's spec says about its rendezvous pod, but for settings."""
    said = [
        spec.rendezvous.model_dump(by_alias=True, exclude_defaults=True, mode="json"),
        spec.sidecar.image,
        rendezvous_place(spec, ""),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _affinity(job: str) -> Manifest:
    trainers = {"matchLabels": {layout.JOB_LABEL: job, layout.COMPONENT_LABEL: layout.TRAINER}}
    term = {"labelSelector": trainers, "topologyKey": layout.HOSTNAME_LABEL}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    without = [{"key": label, "operator": "DoesNotExist"} for label in GPU_LABELS]
    return {
        "podAntiAffinity": {key: [{"weight": 100, "podAffinityTerm": term}]},
        "nodeAffinity": {key: [{"weight": 50, "preference": {"matchExpressions": without}}]},
    }
