"""Pure: a training pod, made from the user's template.

The user's containers stay as they are, but for the first one's command, which the launcher starts, and its
environment and mounts. An agent, an install container and four volumes are added, five with checkpoints in memory.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from unbroken_core.protocol.settings import HealthMode, JobSettings
from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.api.pod_models import SidecarMode
from unbroken_operator.api.quantities import size_bytes
from unbroken_operator.decisions.objects.affinity import (
    NO_AVOIDED_NODES,
    AvoidedNodes,
    Preference,
    away_from,
    with_affinity,
)
from unbroken_operator.decisions.objects.manifests import (
    Manifest,
    container_security,
    downward_variables,
    object_metadata,
    secret_mount,
    secret_volume,
    settings_variable,
    sidecar_pull_policy,
    variable,
)
from unbroken_operator.decisions.objects.resources import agent_resources, sidecar_resources
from unbroken_operator.decisions.snapshot import OperatorOptions

_DEFAULT_GRACE_S = 30
"""terminationGracePeriodSeconds of a pod that says nothing, by the API of Kubernetes."""
_GPUS = "nvidia.com/gpu"
_LAST_S = 2.0
"""What is left of it for the launcher's own end."""


@dataclass(frozen=True)
class DumpedTemplate:
    """The user's template as JSON objects, which the pods that are made of it share: nobody changes them."""

    body: Manifest
    digest: str
    size: int
    """Characters of what pods are made from."""


def dumped_template(spec: Spec) -> DumpedTemplate:
    """Return the template for all pods of one plan: to dump it for each of them took most of the plan's time."""
    body = spec.template.model_dump(by_alias=True, exclude_none=True, mode="json")
    text = _made_from(spec, body)
    return DumpedTemplate(body, _digest_of(text), len(text))


def training_pod(
    spec: Spec,
    settings: JobSettings,
    ordinal: int,
    role: Role,
    options: OperatorOptions,
    *,
    preferences: Sequence[Preference] = (),
    avoided_nodes: AvoidedNodes = NO_AVOIDED_NODES,
    dumped: DumpedTemplate | None = None,
) -> Manifest:
    """Return the nth training pod of the job; `preferences` say where a spare is missed."""
    dumped = dumped or dumped_template(spec)
    template, pod = dumped.body, dumped.body["spec"]
    drain_s = _drain_s(settings, pod.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))
    affinity = with_affinity(pod.get("affinity") or {}, spec, settings.job, role, preferences)
    containers = [_with_launcher(pod["containers"][0], spec, settings, drain_s), *pod["containers"][1:]]
    image = spec.sidecar.image or options.sidecar_image
    init_containers = [_install_container(spec, image) | sidecar_resources(spec, options, pod)]
    agent = _agent_container(spec, settings, image, options.encrypts) | agent_resources(spec, options, pod)
    if _is_native(spec.sidecar.mode, options):
        init_containers.append({**agent, "restartPolicy": "Always"})
    else:
        containers.append(agent)
    pod = {
        **pod,
        "restartPolicy": "Never",
        "automountServiceAccountToken": pod.get("automountServiceAccountToken", False),
        "containers": containers,
        "initContainers": [*init_containers, *pod.get("initContainers", [])],
        "volumes": [*pod.get("volumes", []), *_volumes(settings, ordinal, options), *_state_volume(spec)],
        "affinity": away_from(affinity, avoided_nodes),
    }
    metadata = _metadata(template, settings, ordinal, role)
    metadata["annotations"] |= {layout.TEMPLATE_ANNOTATION: dumped.digest}
    if avoided_nodes.forbidden:
        metadata["annotations"] |= {layout.AVOIDS_ANNOTATION: ",".join(avoided_nodes.forbidden)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def launched_command(command: list[str]) -> list[str]:
    """Return the command under the launcher, which runs in the command's own interpreter when that is a Python."""
    is_python = PurePosixPath(command[0]).name.startswith("python")
    return [command[0] if is_python else "python3", "-m", "unbroken.launch", "--", *command]


def _is_native(mode: SidecarMode, options: OperatorOptions) -> bool:
    return options.has_native_sidecars if mode is SidecarMode.AUTO else mode is SidecarMode.NATIVE


def _metadata(template: Manifest, settings: JobSettings, ordinal: int, role: Role) -> Manifest:
    metadata = object_metadata(settings, layout.training_pod_name(settings.job, ordinal), layout.TRAINER)
    users = template.get("metadata") or {}
    own = _users_own(users.get("labels"))
    if role is Role.SPARE:
        # A group waits for its members, and a spare for nobody: it is one of them once it has ranks.
        own.pop(layout.GANG_LABEL, None)
    metadata["labels"] = {**own, **metadata["labels"], layout.ROLE_LABEL: role.value}
    metadata["annotations"] = {**_users_own(users.get("annotations")), **metadata["annotations"]}
    return metadata


def _users_own(items: Mapping[str, str] | None) -> dict[str, str]:
    # Admission refuses the others. By them the operator knows its pods: should one get past it, it must not count.
    return {key: value for key, value in (items or {}).items() if not layout.is_reserved_key(key)}


def _drain_s(settings: JobSettings, grace_s: float) -> float:
    """Return how long workers of a deleted pod may go on, for their ranks to move, within the pod's grace."""
    if not settings.is_in_process:
        return 0.0
    timeouts = settings.timeouts
    return max(min(timeouts.drain_s, grace_s - timeouts.termination_grace_s - _LAST_S), 0.0)


def _with_launcher(container: Manifest, spec: Spec, settings: JobSettings, drain_s: float) -> Manifest:
    ours = [
        *downward_variables(),
        variable("UNBROKEN_DIR", layout.RUN_PATH),
        variable("UNBROKEN_RANKS_PER_POD", str(settings.ranks_per_pod)),
    ]
    if drain_s > 0:
        ours.append(variable("UNBROKEN_DRAIN", f"{drain_s:g}"))
    if spec.logs is not None:
        ours.append(variable("UNBROKEN_LOG_DIR", spec.logs.directory))
    ours += [*_watch_variables(spec), *_preflight_variables(spec)]
    ours += [*_memory_variables(spec), *_checkpoint_variables(spec)]
    mounts = [
        {"name": layout.LIB_VOLUME, "mountPath": layout.LIB_PATH, "readOnly": True},
        {"name": layout.RUN_VOLUME, "mountPath": layout.RUN_PATH},
        *_state_mount(spec),
    ]
    return {
        **container,
        "command": launched_command(container["command"]),
        # Ours come first, so that the user's variables may refer to them.
        "env": [*ours, *_with_library_path(container.get("env") or [])],
        "volumeMounts": [*(container.get("volumeMounts") or []), *mounts],
    }


def _with_library_path(variables: list[Manifest]) -> list[Manifest]:
    result: list[Manifest] = []
    path = layout.LIB_PATH
    for item in variables:
        if item.get("name") != "PYTHONPATH":
            result.append(item)
        elif "valueFrom" in item:
            result.append({**item, "name": "UNBROKEN_USER_PYTHONPATH"})
            path = f"{layout.LIB_PATH}:$(UNBROKEN_USER_PYTHONPATH)"
        elif item.get("value"):
            path = f"{layout.LIB_PATH}:{item['value']}"
    return [*result, variable("PYTHONPATH", path)]


def _install_container(spec: Spec, image: str) -> Manifest:
    return {
        "name": layout.INSTALL_CONTAINER,
        "image": image,
        "command": ["python", "-m", "unbroken.install", layout.LIB_PATH],
        "volumeMounts": [{"name": layout.LIB_VOLUME, "mountPath": layout.LIB_PATH}],
        "securityContext": container_security(),
        **sidecar_pull_policy(spec),
    }


def _agent_container(spec: Spec, settings: JobSettings, image: str, is_encrypted: bool) -> Manifest:
    scheme = "https" if is_encrypted else "http"
    address = f"{scheme}://{layout.rendezvous_host(settings.job, settings.namespace)}:{layout.API_PORT}"
    authority = variable("UNBROKEN_RENDEZVOUS_CA", f"{layout.TOKEN_PATH}/{layout.AUTHORITY_KEY}")
    return {
        "name": layout.AGENT_CONTAINER,
        "image": image,
        "command": ["python", "-m", "unbroken.agent"],
        "env": [
            *downward_variables(),
            settings_variable(settings),
            variable("UNBROKEN_TOKEN_FILE", f"{layout.TOKEN_PATH}/{layout.TOKEN_KEY}"),
            variable("UNBROKEN_METRICS_LISTEN", f"$(UNBROKEN_POD_IP):{layout.AGENT_METRICS_PORT}"),
            variable("UNBROKEN_RENDEZVOUS_URL", address),
            *([authority] if is_encrypted else []),
            variable("UNBROKEN_DIR", layout.RUN_PATH),
            variable("UNBROKEN_PRIVATE_DIR", layout.PRIVATE_PATH),
            variable("UNBROKEN_TERMINATION_LOG", layout.TERMINATION_LOG),
            *_memory_variables(spec),
            *_keeper_variables(spec),
        ],
        # What keeps the agent out of the job is in it, for `kubectl describe pod`; else the end of its log.
        "terminationMessagePath": layout.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "ports": [_port("unbroken", layout.AGENT_METRICS_PORT), *_keeper_ports(spec)],
        "volumeMounts": [
            {"name": layout.RUN_VOLUME, "mountPath": layout.RUN_PATH},
            {"name": layout.PRIVATE_VOLUME, "mountPath": layout.PRIVATE_PATH},
            secret_mount(),
            *_state_mount(spec),
        ],
        "securityContext": container_security(),
        **sidecar_pull_policy(spec),
    }


def _volumes(settings: JobSettings, ordinal: int, options: OperatorOptions) -> list[dict[str, Any]]:
    authority = [layout.AUTHORITY_KEY] if options.encrypts else []
    return [
        {"name": layout.LIB_VOLUME, "emptyDir": {}},
        {"name": layout.RUN_VOLUME, "emptyDir": {"medium": "Memory"}},
        # In memory: a plan is written before its workers enter it, and a slow disk must not hold them up.
        {"name": layout.PRIVATE_VOLUME, "emptyDir": {"medium": "Memory"}},
        _token_volume(settings, ordinal, authority)
        if options.has_job_key
        else secret_volume(settings, [layout.TOKEN_KEY, *authority]),
    ]


def _watch_variables(spec: Spec) -> list[Manifest]:
    if spec.health.mode is HealthMode.OFF:
        return []
    paths, probes = ":".join(spec.health.storage), ""
    if spec.health.probes:
        dumped = [probe.model_dump(by_alias=True, mode="json") for probe in spec.health.probes]
        probes = json.dumps(dumped, separators=(",", ":"))
    wanted = {"UNBROKEN_WATCH": "1", "UNBROKEN_WATCH_STORAGE": paths, "UNBROKEN_WATCH_PROBES": probes}
    # A pair of $ is one: the kubelet replaces $(NAME).
    return [variable(name, value.replace("$(", "$$(")) for name, value in wanted.items() if value]


def _preflight_variables(spec: Spec) -> list[Manifest]:
    preflight = spec.health.preflight
    if preflight.mode is HealthMode.OFF:
        return []
    wanted = [variable("UNBROKEN_PREFLIGHT", str(preflight.timeout_seconds))]
    if preflight.pairs:
        wanted.append(variable("UNBROKEN_PREFLIGHT_PAIRS", "1"))
    container = spec.template.spec.containers[0].model_dump(by_alias=True, exclude_none=True, mode="json")
    limits = (container.get("resources") or {}).get("limits") or {}
    num_gpus = str(limits.get(_GPUS, ""))
    # Any other quantity says nothing that could be compared.
    return [*wanted, variable("UNBROKEN_PREFLIGHT_DEVICES", num_gpus)] if num_gpus.isdigit() else wanted


def _memory_variables(spec: Spec) -> list[Manifest]:
    if spec.memory is None:
        return []
    return [variable("UNBROKEN_MEMORY_LIMIT", str(size_bytes(spec.memory.size_limit)))]


def _checkpoint_variables(spec: Spec) -> list[Manifest]:
    """Return what holds where the script does not say it."""
    memory = spec.memory
    if memory is None:
        return []
    disk = memory.disk
    wanted = {
        "UNBROKEN_MEMORY_EVERY": memory.every,
        # A pair of $ is one: the kubelet replaces $(NAME).
        "UNBROKEN_MEMORY_DISK": None if disk is None else disk.directory.replace("$(", "$$("),
        "UNBROKEN_MEMORY_DISK_EVERY": None if disk is None else disk.every,
        "UNBROKEN_MEMORY_DISK_KEEP": None if disk is None else disk.keep,
    }
    return [variable(name, str(value)) for name, value in wanted.items() if value is not None]


def _keeper_variables(spec: Spec) -> list[Manifest]:
    if spec.memory is None:
        return []
    return [
        variable("UNBROKEN_MEMORY_DIR", layout.STATE_PATH),
        # It listens there only in a job that copies checkpoints to other pods, as its rendezvous says.
        variable("UNBROKEN_MEMORY_PORT", str(layout.COPIES_PORT)),
    ]


def _keeper_ports(spec: Spec) -> list[Manifest]:
    return [] if spec.memory is None else [_port("unbroken-copies", layout.COPIES_PORT)]


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _state_mount(spec: Spec) -> list[Manifest]:
    return [] if spec.memory is None else [{"name": layout.STATE_VOLUME, "mountPath": layout.STATE_PATH}]


def _state_volume(spec: Spec) -> list[Manifest]:
    """Return the volume with checkpoints: with a limit, since what is written there is memory of the node."""
    if spec.memory is None:
        return []
    limit = str(spec.memory.size_limit)
    return [{"name": layout.STATE_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]


def _token_volume(settings: JobSettings, ordinal: int, authority: list[str]) -> Manifest:
    """Return the volume with this pod's token, and no other, and with the job's authority."""
    pod, job = layout.training_pod_name(settings.job, ordinal), settings.job
    tokens = {
        "name": layout.tokens_name(job, layout.token_block(ordinal)),
        "items": [{"key": pod, "path": layout.TOKEN_KEY}],
    }
    others = {"name": layout.rendezvous_name(job), "items": [{"key": key, "path": key} for key in authority]}
    sources = [{"secret": tokens}, *([{"secret": others}] if authority else [])]
    return {"name": layout.TOKEN_VOLUME, "projected": {"defaultMode": 0o444, "sources": sources}}


def template_digest(spec: Spec) -> str:
    """Return a short name of what training pods are made from; settings that the rendezvous sends them are left out."""
    return dumped_template(spec).digest


def _made_from(spec: Spec, template: Any) -> str:
    """Return what training pods are made from as text."""
    # Without defaults: other defaults in another release of the operator are no change by the user.
    others = [part and part.model_dump(exclude_defaults=True, mode="json") for part in (spec.sidecar, spec.logs)]
    parts = [template, *others]
    if spec.memory is not None:
        # Only then: the pods of a job without it are those of an earlier release.
        # Who keeps whose copies the coordinator says to pods as they are.
        ours = spec.memory.model_dump(exclude_defaults=True, exclude={"replicas", "across"}, mode="json")
        parts.append(ours)
    watch = [item["value"] for item in _watch_variables(spec)]
    if watch != ["1"]:
        # What is done about findings the rendezvous is told; pods differ only in what they look at.
        parts.append(watch)
    preflight = [item["value"] for item in _preflight_variables(spec)]
    if preflight:
        parts.append(preflight[0])
    if preflight and spec.health.preflight.pairs:
        parts.append("pairs")
    return json.dumps(parts, sort_keys=True)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
