"""Validation of core kinds: names, labels, pods; what may change on update."""

import re
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.defaults import SERVICE_NETWORK
from unbroken_local.apiserver.definitions import check_definition
from unbroken_local.apiserver.documents import Document, as_dict, as_list, copy_of
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.problems import Cause
from unbroken_local.apiserver.store import Place

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_WORD = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]\Z")
_PATH_NAME = re.compile(r"(?!\.\.?\Z)[^/%]+\Z")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")

SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
LABEL_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
KEY_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
KEY_NAME_TEXT = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or "
    "'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)


def name_problems(text: str, pattern: re.Pattern[str], longest: int, rule: str) -> list[str]:
    """Return why the text is no name of this form; empty when it is one."""
    found = [f"must be no more than {longest} bytes"] if len(text) > longest else []
    return found if pattern.match(text) else [*found, rule]


def _name_rule(resource: Resource) -> tuple[re.Pattern[str], int, str]:
    if resource.place == ("", "namespaces"):
        return _LABEL, 63, LABEL_TEXT
    if resource.place == ("", "services"):
        return _LABEL_1035, 63, LABEL_1035_TEXT
    if resource.group == "rbac.authorization.k8s.io":
        return _PATH_NAME, 1 << 20, "may not contain '/' or '%'"
    return _SUBDOMAIN, 253, SUBDOMAIN_TEXT


def check_metadata(resource: Resource, document: Document) -> list[Cause]:
    """Return what is wrong with the object's name, labels, annotations, owners and finalizers."""
    metadata = document["metadata"]
    name = metadata.get("name", "")
    causes = [problems.invalid_value("metadata.name", name, why) for why in name_problems(name, *_name_rule(resource))]
    causes += label_problems(metadata.get("labels"), "metadata.labels")
    causes += _annotation_problems(metadata.get("annotations"))
    for number, owner in enumerate(as_list(metadata.get("ownerReferences"))):
        path = f"metadata.ownerReferences[{number}]"
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                causes.append(problems.invalid_value(f"{path}.{field}", "", f"{field} must not be empty"))
    if sum(bool(owner.get("controller")) for owner in as_list(metadata.get("ownerReferences"))) > 1:
        detail = "Only one reference can have Controller set to true"
        causes.append(problems.invalid_value("metadata.ownerReferences", "", detail))
    for finalizer in as_list(metadata.get("finalizers")):
        causes += _key_problems(finalizer, "metadata.finalizers", "name is neither a standard finalizer name nor is it "
                                "fully qualified")  # fmt: skip
    return causes


def _key_problems(key: str, path: str, bare: str = "") -> list[Cause]:
    prefix, slash, name = key.rpartition("/")
    found: list[Cause] = []
    if slash:
        if not prefix:
            found.append(problems.invalid_value(path, key, "prefix part must be non-empty"))
        else:
            found += [problems.invalid_value(path, key, f"prefix part {why}")
                      for why in name_problems(prefix, _SUBDOMAIN, 253, SUBDOMAIN_TEXT)]  # fmt: skip
    elif bare and "." not in key and key not in ("foregroundDeletion", "orphan", "kubernetes"):
        found.append(problems.invalid_value(path, key, bare))
    if not name:
        found.append(problems.invalid_value(path, key, "name part must be non-empty"))
    elif len(name) > 63:
        found.append(problems.invalid_value(path, key, "name part must be no more than 63 bytes"))
    if not _WORD.match(name):
        found.append(problems.invalid_value(path, key, KEY_TEXT))
    return found


def label_problems(labels: Any, path: str) -> list[Cause]:
    """Return what is wrong with a map of labels."""
    causes: list[Cause] = []
    for key, value in as_dict(labels).items():
        causes += _key_problems(key, path)
        if len(value) > 63:
            causes.append(problems.invalid_value(path, value, "must be no more than 63 bytes"))
        if value and not _WORD.match(value):
            causes.append(problems.invalid_value(path, value, VALUE_TEXT))
    return causes


def _annotation_problems(annotations: Any) -> list[Cause]:
    causes: list[Cause] = []
    total = 0
    for key, value in as_dict(annotations).items():
        causes += _key_problems(key.lower(), "metadata.annotations")
        total += len(key) + len(value.encode())
    if total > 256 * 1024:
        causes.append(problems.too_long("metadata.annotations", 256 * 1024))
    return causes


def check_finalizers(old: Document, document: Document) -> list[Cause]:
    """Return the refusal of finalizers that are added while the object is being deleted."""
    if "deletionTimestamp" not in old["metadata"]:
        return []
    before = as_list(old["metadata"].get("finalizers"))
    added = [entry for entry in as_list(document["metadata"].get("finalizers")) if entry not in before]
    if not added:
        return []
    listed = ", ".join(f'"{entry}"' for entry in added)
    detail = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{listed}}}"
    return [problems.forbidden_value("metadata.finalizers", detail)]


def check_document(resource: Resource, document: Document, old: Document | None) -> list[Cause]:
    """Return what is wrong with a core object, `old` being the version that it replaces."""
    place: Place = resource.place
    causes: list[Cause] = []
    if place == ("", "pods"):
        causes += check_pod_spec(as_dict(document.get("spec")), "spec")
        causes += _pod_changes(as_dict(document.get("spec")), as_dict(old.get("spec"))) if old else []
    elif place == ("", "services"):
        causes += list(_service_problems(as_dict(document.get("spec")), as_dict(old.get("spec")) if old else None))
    elif place == ("apiextensions.k8s.io", "customresourcedefinitions"):
        causes += check_definition(document)
    elif place in _TEMPLATED:
        causes += list(_workload_problems(as_dict(document.get("spec"))))
    elif place in (("", "configmaps"), ("", "secrets")):
        causes += _data_problems(document, old)
    elif place == ("", "events") and old is None:
        causes += _event_problems(document)
    return causes


_TEMPLATED = (("apps", "deployments"), ("apps", "replicasets"), ("apps", "statefulsets"), ("apps", "daemonsets"))


def check_pod_spec(spec: Document, path: str) -> list[Cause]:
    """Return what is wrong with a pod's spec."""
    causes: list[Cause] = []
    if not as_list(spec.get("containers")):
        causes.append(problems.required(f"{path}.containers"))
    volumes = [entry.get("name") for entry in as_list(spec.get("volumes"))]
    causes += _names(as_list(spec.get("volumes")), f"{path}.volumes", set())
    seen: set[str] = set()
    for group in ("initContainers", "containers"):
        entries = as_list(spec.get(group))
        causes += _names(entries, f"{path}.{group}", seen)
        for number, container in enumerate(entries):
            causes += _container_problems(container, f"{path}.{group}[{number}]", volumes)
    policy = spec.get("restartPolicy")
    if policy not in ("Always", "OnFailure", "Never"):
        causes.append(problems.unsupported(f"{path}.restartPolicy", policy, ["Always", "Never", "OnFailure"]))
    grace_s = spec.get("terminationGracePeriodSeconds")
    if isinstance(grace_s, int) and grace_s < 0:
        detail = "must be greater than or equal to 0"
        causes.append(problems.invalid_value(f"{path}.terminationGracePeriodSeconds", grace_s, detail))
    causes += label_problems(spec.get("nodeSelector"), f"{path}.nodeSelector")
    return causes


def _names(entries: list[Any], path: str, seen: set[str]) -> list[Cause]:
    causes: list[Cause] = []
    for number, entry in enumerate(entries):
        name = entry.get("name") or ""
        if not name:
            causes.append(problems.required(f"{path}[{number}].name"))
            continue
        for why in name_problems(name, _LABEL, 63, LABEL_TEXT):
            causes.append(problems.invalid_value(f"{path}[{number}].name", name, why))
        if name in seen:
            causes.append(problems.duplicate(f"{path}[{number}].name", name))
        seen.add(name)
    return causes


def _container_problems(container: Document, path: str, volumes: list[Any]) -> list[Cause]:
    causes: list[Cause] = []
    if not container.get("image"):
        causes.append(problems.required(f"{path}.image"))
    for number, variable in enumerate(as_list(container.get("env"))):
        name = variable.get("name") or ""
        if not name:
            causes.append(problems.required(f"{path}.env[{number}].name"))
        elif variable.get("value") and variable.get("valueFrom"):
            detail = "may not be specified when `value` is not empty"
            causes.append(problems.invalid_value(f"{path}.env[{number}].valueFrom", "", detail))
    for number, mount in enumerate(as_list(container.get("volumeMounts"))):
        name = mount.get("name") or ""
        if name not in volumes:
            found = Cause(
                "FieldValueNotFound", f"{path}.volumeMounts[{number}].name", f"Not found: {problems.shown(name)}"
            )
            causes.append(found if name else problems.required(f"{path}.volumeMounts[{number}].name"))
        if not mount.get("mountPath"):
            causes.append(problems.required(f"{path}.volumeMounts[{number}].mountPath"))
    for number, port in enumerate(as_list(container.get("ports"))):
        value = port.get("containerPort")
        if not isinstance(value, int) or not 0 < value < 65536:
            where = f"{path}.ports[{number}].containerPort"
            causes.append(problems.invalid_value(where, value, "must be between 1 and 65535, inclusive")
                          if value else problems.required(where))  # fmt: skip
    return causes + _resource_problems(as_dict(container.get("resources")), f"{path}.resources")


_QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?\Z")


def _resource_problems(resources: Document, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for part in ("limits", "requests"):
        for name, amount in as_dict(resources.get(part)).items():
            if not _QUANTITY.match(str(amount)):
                message = ("quantities must match the regular expression "
                           "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")  # fmt: skip
                raise problems.bad_request(f"{path}.{part}[{name}]: {message}")
            if str(amount).startswith("-"):
                detail = "must be greater than or equal to 0"
                causes.append(problems.invalid_value(f"{path}.{part}[{name}]", amount, detail))
    return causes


_MUTABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def _pod_changes(spec: Document, old: Document) -> list[Cause]:
    """Return the refusal of a change to a pod's spec that is not allowed."""
    mine, theirs = copy_of(spec), copy_of(old)
    for entry in (mine, theirs):
        entry.pop("activeDeadlineSeconds", None)
        for group in ("initContainers", "containers"):
            for container in as_list(entry.get(group)):
                container.pop("image", None)
        entry.pop("schedulingGates", None)
    added, kept = as_list(mine.pop("tolerations", None)), as_list(theirs.pop("tolerations", None))
    if mine == theirs and all(entry in added for entry in kept):
        return []
    return [problems.forbidden_value("spec", _MUTABLE)]


def _service_problems(spec: Document, old: Document | None) -> Iterator[Cause]:
    ports = as_list(spec.get("ports"))
    if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield problems.required("spec.ports")
    for number, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            yield problems.required(f"spec.ports[{number}].name")
        if not isinstance(port.get("port"), int) or not 0 < port["port"] < 65536:
            detail = "must be between 1 and 65535, inclusive"
            yield problems.invalid_value(f"spec.ports[{number}].port", port.get("port", 0), detail)
    address = spec.get("clusterIP")
    if old is not None and old.get("clusterIP") not in (None, "", address) and spec.get("type") != "ExternalName":
        yield problems.invalid_value("spec.clusterIPs[0]", address or "", "may not change once set")
    elif address not in (None, "", "None"):
        try:
            inside = ip_address(address) in SERVICE_NETWORK
        except ValueError:
            yield problems.invalid_value("spec.clusterIPs", [address], "must be a valid IP address")
            return
        if not inside:
            detail = f"failed to allocate IP {address}: the provided IP ({address}) is not in the valid range. " \
                     f"The range of valid IPs is {SERVICE_NETWORK}"  # fmt: skip
            yield problems.invalid_value("spec.clusterIPs", f"[{address}]", detail)


def _workload_problems(spec: Document) -> Iterator[Cause]:
    if not spec.get("selector"):
        yield problems.required("spec.selector")
    template = as_dict(spec.get("template"))
    yield from check_pod_spec(as_dict(template.get("spec")), "spec.template.spec")
    labels = as_dict(as_dict(template.get("metadata")).get("labels"))
    wanted = as_dict(as_dict(spec.get("selector")).get("matchLabels"))
    if any(labels.get(key) != value for key, value in wanted.items()):
        yield problems.invalid_value(
            "spec.template.metadata.labels", labels, "`selector` does not match template `labels`"
        )


def _data_problems(document: Document, old: Document | None) -> list[Cause]:
    causes: list[Cause] = []
    total = 0
    for field in ("data", "binaryData"):
        for name, value in as_dict(document.get(field)).items():
            total += len(value)
            if not re.match(r"[-._a-zA-Z0-9]+\Z", name) or len(name) > 253:
                causes.append(problems.invalid_value(f"{field}[{name}]", name, KEY_NAME_TEXT))
    if total > 1024 * 1024 * 4 // 3:
        causes.append(problems.too_long("", 1048576))
    if (
        old is not None
        and old.get("immutable")
        and any(document.get(field) != old.get(field) for field in ("data", "binaryData", "immutable"))
    ):
        causes.append(problems.forbidden_value("data", "field is immutable when `immutable` is set"))
    if old is not None and document.get("type") != old.get("type"):
        causes.append(problems.invalid_value("type", document.get("type"), "field is immutable"))
    return causes


def _event_problems(document: Document) -> list[Cause]:
    about = as_dict(document.get("involvedObject")).get("namespace") or "default"
    if about != document["metadata"].get("namespace"):
        detail = "does not match event.namespace"
        return [
            problems.invalid_value(
                "involvedObject.namespace", as_dict(document.get("involvedObject")).get("namespace", ""), detail
            )
        ]
    return []
