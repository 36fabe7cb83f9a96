"""Pure: the Secret, the Service and the rendezvous pod of a job, and what all of its objects share."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from unbroken_core.protocol.messages import Earlier
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import encode, settings_to_json
from unbroken_operator.api import layout
from unbroken_operator.api.model_base import Model
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.objects.rendezvous_place import made_from, rendezvous_place
from unbroken_operator.decisions.objects.resources import rendezvous_resources
from unbroken_operator.decisions.snapshot import OperatorOptions

Manifest = dict[str, Any]
NOTHING_EARLIER = Earlier()


def settings_digest(settings: JobSettings) -> str:
    """Return a short name of the settings: a rendezvous pod with another one is replaced.

    Without defaults: a setting that a later release adds is no change of the job.
    """
    return hashlib.sha256(json.dumps(_without_defaults(settings), sort_keys=True).encode()).hexdigest()[:16]


def _without_defaults(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_without_defaults(item) for item in value]
    if not is_dataclass(value):
        return value
    found = {}
    for item in fields(value):
        usual = item.default_factory() if item.default_factory is not MISSING else item.default
        seen = _without_defaults(getattr(value, item.name))
        if seen != _without_defaults(usual):
            found[item.name] = seen
    return found


def object_metadata(settings: JobSettings, name: str, component: str) -> Manifest:
    """Return the metadata that every object of the job bears."""
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": {layout.JOB_LABEL: settings.job, layout.COMPONENT_LABEL: component},
        "annotations": {layout.JOB_UID_ANNOTATION: settings.uid},
        "ownerReferences": [owner_reference(settings.job, settings.uid)],
    }


def owner_reference(name: str, uid: str) -> Manifest:
    """Return the reference that makes the API server remove an object with its job."""
    return {
        "apiVersion": layout.API_VERSION,
        "kind": layout.KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def secret(settings: JobSettings) -> Manifest:
    """Return the Secret of the job, still without its token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(settings, layout.rendezvous_name(settings.job), layout.RENDEZVOUS),
        "type": "Opaque",
    }


def tokens_secret(settings: JobSettings, block: int) -> Manifest:
    """Return the Secret with the nth block of pods' tokens, still without them."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(settings, layout.tokens_name(settings.job, block), layout.TOKENS),
        "type": "Opaque",
    }


def service(settings: JobSettings) -> Manifest:
    """Return the Service that agents reach the rendezvous by."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(settings, layout.rendezvous_name(settings.job), layout.RENDEZVOUS),
        "spec": {
            "selector": {layout.JOB_LABEL: settings.job, layout.COMPONENT_LABEL: layout.RENDEZVOUS},
            # Agents may come before the probes have passed, and the rendezvous must be reachable while it starts.
            "publishNotReadyAddresses": True,
            "ports": [
                _service_port("rendezvous", layout.API_PORT),
                _service_port("metrics", layout.METRICS_PORT),
            ],
        },
    }


def rendezvous_pod(
    spec: Spec,
    settings: JobSettings,
    ordinal: int,
    options: OperatorOptions,
    earlier: Earlier = NOTHING_EARLIER,
    *,
    is_standby: bool = False,
) -> Manifest:
    """Return the nth rendezvous pod of the job; one that stands by leads when it is told to."""
    component = layout.STANDBY if is_standby else layout.RENDEZVOUS
    metadata = object_metadata(settings, layout.rendezvous_pod_name(settings.job, ordinal), component)
    metadata["annotations"] |= {
        layout.SETTINGS_ANNOTATION: settings_digest(settings),
        layout.MADE_FROM_ANNOTATION: made_from(spec),
        **({layout.STANDBY_ANNOTATION: "true"} if is_standby else {}),
    }
    rendezvous = spec.rendezvous
    identity_key = layout.JOB_KEY_KEY if options.has_job_key else layout.TOKEN_KEY
    identity_variable = "UNBROKEN_JOB_KEY_FILE" if options.has_job_key else "UNBROKEN_TOKEN_FILE"
    keys = [identity_key, *([layout.CERTIFICATE_KEY, layout.PRIVATE_KEY_KEY] if options.encrypts else [])]
    probe = {"httpGet": {"path": "/healthz", "port": "metrics"}, "timeoutSeconds": 5}
    container: Manifest = {
        "name": layout.RENDEZVOUS,
        "image": rendezvous.image or spec.sidecar.image or options.sidecar_image,
        # An image of an earlier release lacks the module: it ends at once, instead of leading beside the other one.
        "command": ["python", "-m", "unbroken.rendezvous.standby" if is_standby else "unbroken.rendezvous"],
        "env": [
            *downward_variables(),
            settings_variable(settings),
            variable(identity_variable, f"{layout.TOKEN_PATH}/{identity_key}"),
            variable("UNBROKEN_LISTEN", f"$(UNBROKEN_POD_IP):{layout.API_PORT}"),
            variable("UNBROKEN_METRICS_LISTEN", f"$(UNBROKEN_POD_IP):{layout.METRICS_PORT}"),
            variable("UNBROKEN_DIR", layout.RUN_PATH),
            *(_certificate_variables() if options.encrypts else []),
            *([] if earlier == NOTHING_EARLIER else [variable("UNBROKEN_EARLIER", encode(earlier))]),
        ],
        "ports": [
            {"name": "rendezvous", "containerPort": layout.API_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": layout.METRICS_PORT, "protocol": "TCP"},
        ],
        "volumeMounts": [{"name": layout.RUN_VOLUME, "mountPath": layout.RUN_PATH}, secret_mount()],
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "initialDelaySeconds": 5, "failureThreshold": 6},
        "securityContext": container_security(),
        **sidecar_pull_policy(spec),
        **rendezvous_resources(spec, options),
    }
    pod: Manifest = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [{"name": layout.RUN_VOLUME, "emptyDir": {}}, secret_volume(settings, keys)],
    }
    pod |= rendezvous_place(spec, settings.job)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def variable(name: str, value: str) -> Manifest:
    """Return one environment variable."""
    return {"name": name, "value": value}


def settings_variable(settings: JobSettings) -> Manifest:
    """Return the variable with a job's settings. Patterns of log rules may have what the kubelet would replace."""
    return variable("UNBROKEN_SETTINGS", settings_to_json(settings).replace("$(", "$$("))


def downward_variables() -> list[Manifest]:
    """Return the variables with which a container knows its pod."""
    paths = {
        "UNBROKEN_POD": "metadata.name",
        "UNBROKEN_POD_UID": "metadata.uid",
        "UNBROKEN_NODE": "spec.nodeName",
        "UNBROKEN_POD_IP": "status.podIP",
    }
    return [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in paths.items()
    ]


def _certificate_variables() -> list[Manifest]:
    return [
        variable("UNBROKEN_TLS_CERTIFICATE", f"{layout.TOKEN_PATH}/{layout.CERTIFICATE_KEY}"),
        variable("UNBROKEN_TLS_KEY", f"{layout.TOKEN_PATH}/{layout.PRIVATE_KEY_KEY}"),
    ]


def secret_volume(settings: JobSettings, keys: Sequence[str]) -> Manifest:
    """Return the volume with these keys of the job's Secret."""
    return {
        "name": layout.TOKEN_VOLUME,
        "secret": {
            "secretName": layout.rendezvous_name(settings.job),
            "defaultMode": 0o444,
            "items": [{"key": key, "path": key} for key in keys],
        },
    }


def secret_mount() -> Manifest:
    """Return the mount of what the pod gets of the job's Secret."""
    return {"name": layout.TOKEN_VOLUME, "mountPath": layout.TOKEN_PATH, "readOnly": True}


def container_security() -> Manifest:
    """Return the security context of our own containers: all that a template could set for the whole pod."""
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsUser": layout.OWN_USER,
        "runAsGroup": layout.OWN_USER,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def sidecar_pull_policy(spec: Spec) -> Manifest:
    """Return the pull policy of our containers as a part of a container."""
    policy = spec.sidecar.image_pull_policy
    return {} if policy is None else {"imagePullPolicy": policy.value}


def dumped(key: str, model: Model | None) -> Manifest:
    """Return a model as a part of a manifest, nothing when there is none."""
    return {} if model is None else {key: model.model_dump(by_alias=True, exclude_none=True, mode="json")}


def _service_port(name: str, port: int) -> Manifest:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
