"""Pure: what a template must not have, so that a trainer does not reach what is its agent's: one table.

The API server checks `cel` (the messages there name no item), webhook and operator check `find`. What breaks the wall
between trainer and agent only by the node's hand is warned of: Pod Security is what forbids it.

    refused  a process namespace shared with the agent or the node   the token is in /proc/PID/root
    refused  a Secret of the operator: volume, variable, driver,      the token itself, or the rendezvous' key
             pull secret
    refused  a mount of the operator's volumes                        the token itself
    refused  the operator's names                                     two containers or volumes of one name
    refused  ephemeral containers                                     no pod can be made with them
    warned   privileged containers, CAP_SYS_ADMIN, the node's own     root on the node reads every token there
             folders
"""

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.pod.fault_orders import ALLOW
from unbroken_operator.api import layout

Part = Mapping[str, Any]
MAX_SHOWN = 80
"""Characters of what is shown of a template."""

_NAMES = sorted(layout.RESERVED_NAMES)
_IS_RESERVED = f"in {_NAMES}"
_SECRET = f".endsWith('{layout.SECRET_SUFFIX}')"
_IN_PROC = "must be false or left out: in /proc the trainer could read"
_OWN_TOKEN, _ALL_TOKENS = f"{_IN_PROC} its agent's token", f"{_IN_PROC} the tokens of all agents on its node"
_RESERVED = "is reserved for the operator"
_OURS = "is the operator's, who mounts it where it belongs"
_VOLUME_SECRETS: tuple[tuple[str, ...], ...] = (
    ("secret", "secretName"),
    ("azureFile", "secretName"),
    ("csi", "nodePublishSecretRef", "name"),
    *(
        (kind, "secretRef", "name")
        for kind in ("cephfs", "cinder", "flexVolume", "iscsi", "rbd", "scaleIO", "storageos")
    ),
)
"""Where a volume names a Secret: the kubelet reads it for the volume's driver, whatever that does with it."""
HELD = f"Secrets whose names end with {layout.SECRET_SUFFIX} hold the tokens of jobs"
_NODE_FOLDERS = (
    "/var/lib/kubelet",
    "/proc",
    *(
        f"{run}/{name}"
        for run in ("/run", "/var/run")
        for name in ("containerd", "crio", "docker.sock", "cri-dockerd.sock", "k3s", "k0s")
    ),
)
_STRONG = ("SYS_ADMIN", "CAP_SYS_ADMIN", "ALL")


@dataclass(frozen=True)
class TemplateRule:
    """One row."""

    find: Callable[[Part], Iterator[str]]
    """Yields `where: what is wrong with it`, below the pod's spec or the container."""
    cel: str
    """True of a pod's spec or a container that is sound."""
    message: str
    field_path: str


def _flag(name: str, why: str) -> TemplateRule:
    def find(pod: Part) -> Iterator[str]:
        if pod.get(name):
            yield f"{name}: {why}"

    return TemplateRule(find, f"!has(self.{name}) || !self.{name}", f"{name}: {why}", f".{name}")


def _volume_names(pod: Part) -> Iterator[str]:
    for index, volume in enumerate(pod.get("volumes") or ()):
        if volume.get("name") in layout.RESERVED_NAMES:
            yield f"volumes[{index}].name: {_RESERVED}: {volume['name']!r}"


def _volume_secrets(pod: Part) -> Iterator[str]:
    for index, volume in enumerate(pod.get("volumes") or ()):
        where = f"volumes[{index}]"
        for path in _VOLUME_SECRETS:
            yield from _secret(".".join((where, *path)), _value_at(volume, path))
        for place, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
            name = (source.get("secret") or {}).get("name")
            yield from _secret(f"{where}.projected.sources[{place}].secret.name", name)


def _pull_secrets(pod: Part) -> Iterator[str]:
    for index, reference in enumerate(pod.get("imagePullSecrets") or ()):
        yield from _secret(f"imagePullSecrets[{index}].name", reference.get("name"))


def _value_at(part: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _names_none_at(path: tuple[str, ...]) -> str:
    """Return CEL that is true of a volume `v` which names no Secret of a job there."""
    places = [".".join(("v", *path[: depth + 1])) for depth in range(len(path))]
    return f"({''.join(f'!has({place}) || ' for place in places)}!{places[-1]}{_SECRET})"


def _container_name(container: Part) -> Iterator[str]:
    if container.get("name") in layout.RESERVED_NAMES:
        yield f"name: {_RESERVED}: {container['name']!r}"


def _mounts(container: Part) -> Iterator[str]:
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") in layout.RESERVED_NAMES:
            yield f"volumeMounts[{index}].name: {_OURS}: {mount['name']!r}"


def _variables(container: Part) -> Iterator[str]:
    for index, variable in enumerate(container.get("env") or ()):
        name = ((variable.get("valueFrom") or {}).get("secretKeyRef") or {}).get("name")
        yield from _secret(f"env[{index}].valueFrom.secretKeyRef.name", name)
    for index, source in enumerate(container.get("envFrom") or ()):
        yield from _secret(f"envFrom[{index}].secretRef.name", (source.get("secretRef") or {}).get("name"))


def _secret(where: str, name: Any) -> Iterator[str]:
    if isinstance(name, str) and name.endswith(layout.SECRET_SUFFIX):
        yield f"{where}: {HELD}, got {_shown(name)}"


EPHEMERAL = "ephemeralContainers: a pod cannot be created with any: remove them, and add one to a pod that runs"
"""The API server refuses such pods. No rule of the schema's, which does not have the field."""


def _ephemeral_containers(pod: Part) -> Iterator[str]:
    if pod.get("ephemeralContainers"):
        yield EPHEMERAL


POD_RULES = (
    _flag("shareProcessNamespace", _OWN_TOKEN),
    _flag("hostPID", _ALL_TOKENS),
    TemplateRule(
        _volume_names,
        f"!has(self.volumes) || self.volumes.all(v, !(v.name {_IS_RESERVED}))",
        f"volumes: a name {_RESERVED}",
        ".volumes",
    ),
    TemplateRule(
        _volume_secrets,
        f"!has(self.volumes) || self.volumes.all(v, {' && '.join(map(_names_none_at, _VOLUME_SECRETS))} && "
        "(!has(v.projected) || !has(v.projected.sources) || v.projected.sources.all(s, "
        f"!has(s.secret) || !has(s.secret.name) || !s.secret.name{_SECRET})))",
        f"volumes: {HELD}",
        ".volumes",
    ),
    TemplateRule(
        _pull_secrets,
        f"!has(self.imagePullSecrets) || self.imagePullSecrets.all(s, !has(s.name) || !s.name{_SECRET})",
        f"imagePullSecrets: {HELD}",
        ".imagePullSecrets",
    ),
)
OWN_VARIABLES = f"names that begin with {layout.RESERVED_VARIABLE_PREFIX} are the operator's"
USERS_VARIABLES = ("UNBROKEN_PREIMPORT", ALLOW)
VARIABLES_CEL = (
    "!has(self.containers[0].env) || self.containers[0].env.all(e, "
    f"!e.name.startsWith('{layout.RESERVED_VARIABLE_PREFIX}') || e.name in {list(USERS_VARIABLES)})"
)
"""Of the trainer: other containers may be given what they like."""
PULL_SECRETS_CEL = f"!has(self.imagePullSecrets) || self.imagePullSecrets.all(name, !name{_SECRET})"
"""The same of `spec.rendezvous`, which has names only."""
CONTAINER_RULES = (
    TemplateRule(_container_name, f"!(self.name {_IS_RESERVED})", f"name: {_RESERVED}", ".name"),
    TemplateRule(
        _mounts,
        f"!has(self.volumeMounts) || self.volumeMounts.all(m, !(m.name {_IS_RESERVED}))",
        f"volumeMounts: a volume {_OURS}",
        ".volumeMounts",
    ),
    TemplateRule(
        _variables,
        "(!has(self.env) || self.env.all(e, !has(e.valueFrom) || !has(e.valueFrom.secretKeyRef) || "
        f"!has(e.valueFrom.secretKeyRef.name) || !e.valueFrom.secretKeyRef.name{_SECRET})) && "
        "(!has(self.envFrom) || self.envFrom.all(e, !has(e.secretRef) || !has(e.secretRef.name) || "
        f"!e.secretRef.name{_SECRET}))",
        f"env: {HELD}",
        "",
    ),
)


def refusals(pod: Part) -> Iterator[str]:
    """Yield what is refused of a template's pod spec, as the API has it, each with its place below it."""
    for rule in POD_RULES:
        yield from rule.find(pod)
    yield from _ephemeral_containers(pod)
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(kind) or ()):
            for rule in CONTAINER_RULES:
                yield from (f"{kind}[{index}].{found}" for found in rule.find(container))


def pull_secret_refusals(names: Iterable[str], where: str) -> Iterator[str]:
    """Yield what is refused of names of pull secrets."""
    for index, name in enumerate(names):
        yield from _secret(f"{where}[{index}]", name)


def warnings(pod: Part) -> Iterator[str]:
    """Yield what lets the trainer become root on its node, and read there what is any agent's."""
    for index, volume in enumerate(pod.get("volumes") or ()):
        path = volume.get("hostPath", {}).get("path") if isinstance(volume.get("hostPath"), dict) else None
        if isinstance(path, str) and _reaches_node(path):
            yield f"volumes[{index}].hostPath.path: shows the tokens of other jobs on the node, got {_shown(path)}"
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(kind) or ()):
            yield from (f"{kind}[{index}].securityContext.{found}" for found in _strong(container))


def _strong(container: Part) -> Iterator[str]:
    security = container.get("securityContext")
    security = security if isinstance(security, dict) else {}
    if security.get("privileged") is True:
        yield "privileged: is root on the node, and can read the tokens of all jobs there"
    added = security.get("capabilities")
    added = added.get("add") if isinstance(added, dict) else ()
    for name in (name for name in _STRONG if isinstance(added, list) and name in added):
        yield f"capabilities.add: {name} is as good as root on the node, which can read the tokens of all jobs there"


def _reaches_node(path: str) -> bool:
    clean = posixpath.normpath(f"/{path.lstrip('/')}").rstrip("/")
    return any(
        folder == clean or folder.startswith(f"{clean}/") or clean.startswith(f"{folder}/") for folder in _NODE_FOLDERS
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}...")
