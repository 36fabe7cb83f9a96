"""Pure: compute resources of our own containers: the job's, else the operator's, with limits where the template has."""

from collections.abc import Iterable, Mapping
from typing import Any

from unbroken_operator.api.model_base import Resources
from unbroken_operator.api.models import Spec
from unbroken_operator.api.quantities import quantity, size_bytes, with_bytes
from unbroken_operator.decisions.snapshot import OperatorOptions

Manifest = dict[str, Any]
GUARANTEED: Mapping[str, str] = {"cpu": "250m", "memory": "256Mi"}
"""Of an agent, or of the container that installs the library: far more than it uses, since a limit on CPU would make
a recovery wait."""
_CLASS = ("cpu", "memory")


def sidecar_resources(spec: Spec, options: OperatorOptions, pod: Manifest) -> Manifest:
    """Return the part of a container with its resources; empty without any. `pod` is the template's spec as it is.

    A pod is Guaranteed while each of its containers has limits for CPU and memory and requests as much. So ours have
    them where all of the template's have. Where all of those have a limit, ours get one, too: a ResourceQuota on limits
    refuses a pod with a container without one.
    """
    if spec.sidecar.resources is not None:
        return _given(spec.sidecar.resources)
    if _is_guaranteed(pod):
        return {"resources": {"requests": dict(GUARANTEED), "limits": dict(GUARANTEED)}}
    return _limited(_default(options.sidecar_resources), pod)


def agent_resources(spec: Spec, options: OperatorOptions, pod: Manifest) -> Manifest:
    """Return that part of the agent's container: its keeper's pages count as its own, so their limit comes on top.

    Where there is neither a request nor a limit of memory, the pages alone are requested: the scheduler must know.
    """
    made = sidecar_resources(spec, options, pod)
    if spec.memory is None:
        return made
    num_bytes = size_bytes(spec.memory.size_limit)
    resources = {key: dict(values) for key, values in made.get("resources", {}).items()}
    if not any("memory" in values for values in resources.values()):
        resources["requests"] = {**resources.get("requests", {}), "memory": 0}
    for values in resources.values():
        if "memory" in values:
            values["memory"] = with_bytes(values["memory"], num_bytes)
    return {"resources": resources}


def rendezvous_resources(spec: Spec, options: OperatorOptions) -> Manifest:
    """Return the part of the rendezvous' container with its resources; empty without any."""
    if spec.rendezvous.resources is not None:
        return _given(spec.rendezvous.resources)
    return _default(options.rendezvous_resources)


def _given(resources: Resources) -> Manifest:
    return {"resources": resources.model_dump(by_alias=True, exclude_none=True, mode="json")}


def _default(resources: Mapping[str, Any]) -> Manifest:
    return {"resources": {key: dict(value) for key, value in resources.items()}} if resources else {}


def _limited(made: Manifest, pod: Manifest) -> Manifest:
    given = made.get("resources", {})
    requests = given.get("requests", {})
    limits = {kind: _limit(kind, requests.get(kind)) for kind in _CLASS if _is_limited(pod, kind)}
    return {"resources": {**given, "limits": limits | given.get("limits", {})}} if limits else made


def _limit(kind: str, request: Any) -> Any:
    """Return the usual limit, or the request where that is more: a limit below it would be refused."""
    is_more = request is not None and (quantity(request) or 0) > (quantity(GUARANTEED[kind]) or 0)
    return request if is_more else GUARANTEED[kind]


def _is_limited(pod: Manifest, kind: str) -> bool:
    return all(kind in ((one.get("resources") or {}).get("limits") or {}) for one in _containers(pod))


def _is_guaranteed(pod: Manifest) -> bool:
    return all(map(_has_what_it_may_use, _containers(pod)))


def _containers(pod: Manifest) -> Iterable[Manifest]:
    return (*(pod.get("containers") or ()), *(pod.get("initContainers") or ()))


def _has_what_it_may_use(container: Manifest) -> bool:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    # Without a request Kubernetes requests the limit.
    return all(kind in limits and requests.get(kind, limits[kind]) == limits[kind] for kind in _CLASS)
