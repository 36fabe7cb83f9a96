"""The scale subresource: `autoscaling/v1 Scale` read from and written to an object."""

from typing import Any

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.documents import Document, as_dict, copy_of, look_up
from unbroken_local.apiserver.kinds import Resource, Scale
from unbroken_local.apiserver.operations import PatchType
from unbroken_local.apiserver.patches import json_patch, merge_patch

_CORE = Scale("spec.replicas", "status.replicas", "")


def read_scale(resource: Resource, document: Document) -> Document:
    """Return the object's scale."""
    paths = resource.scale or _CORE
    metadata = document["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: Document = {"replicas": look_up(document, *paths.status_path.split(".")) or 0}
    selector = _selector(resource, document, paths)
    if selector:
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"replicas": look_up(document, *paths.spec_path.split(".")) or 0},
        "status": status,
    }


def _selector(resource: Resource, document: Document, paths: Scale) -> str:
    if resource.custom:
        return str(look_up(document, *paths.selector_path.split(".")) or "") if paths.selector_path else ""
    labels = as_dict(look_up(document, "spec", "selector", "matchLabels"))
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def scaled_document(resource: Resource, document: Document, kind: PatchType | None, body: Any) -> Document:
    """Return the object with the replicas of the Scale (or of the patch on its Scale) set. Raises ApiProblem."""
    scale = read_scale(resource, document)
    if kind == "json":
        wanted = json_patch(scale, body)
    elif kind is not None:
        wanted = as_dict(merge_patch(scale, body))
    else:
        wanted = as_dict(body)
    replicas = look_up(wanted, "spec", "replicas")
    replicas = 0 if replicas is None else replicas
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise problems.bad_request('Scale in version "v1" cannot be handled as a Scale: spec.replicas: want a number')
    if replicas < 0:
        cause = problems.invalid_value("spec.replicas", replicas, "must be greater than or equal to 0")
        raise problems.invalid("autoscaling", "Scale", document["metadata"]["name"], [cause])
    result: Document = copy_of(document)
    result["metadata"]["resourceVersion"] = (
        look_up(wanted, "metadata", "resourceVersion") or (document["metadata"]["resourceVersion"])
    )
    place = result
    *parents, last = (resource.scale or _CORE).spec_path.split(".")
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = replicas
    return result
