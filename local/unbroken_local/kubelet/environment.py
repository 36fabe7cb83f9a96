"""The environment of a container: its variables in the order and with the rules of the real kubelet. Pure."""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import cast

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_local.kube import Json
from unbroken_local.kube.quantity import parse_quantity

_REFERENCE = re.compile(r"\$\$|\$\(([^()]*)\)")
_ENV_NAME = re.compile(r"[^A-Z0-9_]")
_LEGAL_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


class ConfigError(UnbrokenError):
    """The container cannot be made yet: something that its spec names is not there (CreateContainerConfigError)."""


@dataclass(frozen=True)
class Sources:
    """What variables may refer to."""

    pod: Json
    host_ip: str
    pod_ip: str
    secrets: Mapping[str, Json | None] = field(default_factory=dict)
    """Objects by name; None for one that does not exist."""
    config_maps: Mapping[str, Json | None] = field(default_factory=dict)
    services: tuple[tuple[Json, str], ...] = ()
    """Services of the pod's namespace, each with the address that containers reach it at."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value and `$$` by `$`; an unknown reference stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def build_environment(container: Json, sources: Sources) -> dict[str, str]:
    """Return the container's variables. Raises ConfigError."""
    result: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        result |= _all_of(source, sources)
    links = service_variables(sources.services) if sources.pod["spec"].get("enableServiceLinks", True) else {}
    known = {**links, **result}
    for variable in container.get("env") or []:
        value = _value_of(variable, container, sources, known)
        if value is not None:
            known[variable["name"]] = result[variable["name"]] = value
    return {**links, **result}


def _value_of(variable: Json, container: Json, sources: Sources, known: Mapping[str, str]) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expand(str(variable.get("value") or ""), known)
    if "fieldRef" in source:
        return field_value(source["fieldRef"]["fieldPath"], sources)
    if "resourceFieldRef" in source:
        return resource_value(source["resourceFieldRef"], container, sources.pod)
    for key, objects, kind in (
        ("secretKeyRef", sources.secrets, "secret"),
        ("configMapKeyRef", sources.config_maps, "configmap"),
    ):
        if key in source:
            return _key_of(source[key], objects, kind)
    raise ConfigError(f"env {variable['name']}: unsupported valueFrom: {sorted(source)}")


def _key_of(reference: Json, objects: Mapping[str, Json | None], kind: str) -> str | None:
    owner = objects.get(reference["name"])
    is_optional = bool(reference.get("optional"))
    if owner is None:
        if is_optional:
            return None
        raise ConfigError(f'{kind} "{reference["name"]}" not found')
    data = text_data(owner)
    if reference["key"] not in data:
        if is_optional:
            return None
        raise ConfigError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    return data[reference["key"]]


def _all_of(source: Json, sources: Sources) -> dict[str, str]:
    prefix = source.get("prefix") or ""
    for key, objects, kind in (
        ("secretRef", sources.secrets, "secret"),
        ("configMapRef", sources.config_maps, "configmap"),
    ):
        if key in source:
            owner = objects.get(source[key]["name"])
            if owner is None:
                if source[key].get("optional"):
                    return {}
                raise ConfigError(f'{kind} "{source[key]["name"]}" not found')
            named = {f"{prefix}{name}": value for name, value in text_data(owner).items()}
            return {name: value for name, value in named.items() if _LEGAL_NAME.fullmatch(name)}
    return {}


def data_of(owner: Json) -> dict[str, bytes]:
    """Return the files of a Secret or ConfigMap."""
    if owner.get("kind") == "Secret":
        return {name: base64.b64decode(text or "") for name, text in (owner.get("data") or {}).items()}
    plain = {name: str(text).encode() for name, text in (owner.get("data") or {}).items()}
    return plain | {name: base64.b64decode(text) for name, text in (owner.get("binaryData") or {}).items()}


def text_data(owner: Json) -> dict[str, str]:
    """Return the values of a Secret or ConfigMap as text."""
    return {name: value.decode(errors="surrogateescape") for name, value in data_of(owner).items()}


def field_value(path: str, sources: Sources) -> str:
    """Return a downward API field. Raises ConfigError for a path that the kubelet does not know."""
    pod = sources.pod
    metadata, spec = pod["metadata"], pod["spec"]
    match = _SUBSCRIPT.fullmatch(path)
    if match is not None:
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    if path in {"metadata.labels", "metadata.annotations"}:
        return formatted_map(metadata.get(path.rpartition(".")[2]) or {})
    account = spec.get("serviceAccountName") or "default"
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", "default"),
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": account,
        "status.hostIP": sources.host_ip,
        "status.hostIPs": sources.host_ip,
        "status.podIP": sources.pod_ip,
        "status.podIPs": sources.pod_ip,
    }
    if path not in fields:
        raise ConfigError(f"unsupported fieldPath: {path}")
    return str(fields[path])


def formatted_map(values: Mapping[str, str]) -> str:
    """Return labels or annotations as the lines of a downward API file."""
    quoted = {key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()}
    return "\n".join(f'{key}="{value}"'.replace("\n", "\\n") for key, value in sorted(quoted.items()))


def resource_value(reference: Json, container: Json, pod: Json) -> str:
    """Return a resource of a container in units of the divisor, rounded up. Raises ConfigError."""
    name = reference.get("containerName")
    if name:
        everyone = [*(pod["spec"].get("containers") or []), *(pod["spec"].get("initContainers") or [])]
        found = [candidate for candidate in everyone if candidate["name"] == name]
        if not found:
            raise ConfigError(f"container {name} not found")
        container = found[0]
    kind, _, resource = reference["resource"].partition(".")
    resources = container.get("resources") or {}
    text = (resources.get(kind) or {}).get(resource) or (resources.get("limits") or {}).get(resource)
    amount = parse_quantity(text) if text is not None else Fraction(_machine_default(resource))
    divisor = parse_quantity(reference.get("divisor") or "1") or Fraction(1)
    return str(ceil(amount / divisor))


def _machine_default(resource: str) -> int:
    if resource == "cpu":
        return os.cpu_count() or 1
    if resource == "memory":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def service_variables(services: tuple[tuple[Json, str], ...]) -> dict[str, str]:
    """Return NAME_SERVICE_HOST, NAME_SERVICE_PORT and NAME_PORT_... of each Service that has an address."""
    result: dict[str, str] = {}
    for service, address in services:
        name = _ENV_NAME.sub("_", service["metadata"]["name"].upper())
        ports = cast("list[Json]", service["spec"].get("ports") or [])
        if not ports or not address:
            continue
        result[f"{name}_SERVICE_HOST"] = address
        result[f"{name}_SERVICE_PORT"] = str(ports[0]["port"])
        result[f"{name}_PORT"] = _url(ports[0], address)
        for port in ports:
            if port.get("name"):
                result[f"{name}_SERVICE_PORT_{_ENV_NAME.sub('_', port['name'].upper())}"] = str(port["port"])
            protocol = (port.get("protocol") or "TCP").upper()
            prefix = f"{name}_PORT_{port['port']}_{protocol}"
            result[prefix] = _url(port, address)
            result |= {
                f"{prefix}_PROTO": protocol.lower(),
                f"{prefix}_PORT": str(port["port"]),
                f"{prefix}_ADDR": address,
            }
    return result


def _url(port: Json, address: str) -> str:
    return f"{(port.get('protocol') or 'TCP').lower()}://{address}:{port['port']}"
