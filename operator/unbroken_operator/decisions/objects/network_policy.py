"""Pure: who may reach a job's rendezvous and its keepers. Networks that enforce no policies ignore them."""

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken_core.protocol.settings import JobSettings
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.objects.manifests import Manifest, object_metadata
from unbroken_operator.decisions.snapshot import PolicyOptions

API_GROUP = "networking.k8s.io"
OPERATOR_LABELS = {"app.kubernetes.io/name": "unbroken-operator"}
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Set by the API server itself."""
_MAX_DECLARED = 32
_PROTOCOLS = ("TCP", "UDP")
"""SCTP is refused by some networks, with all of the policy."""


def has_network_policy(spec: Spec) -> bool:
    """Return whether a policy can tell the job's pods from others: those in their host's network have its address."""
    return not spec.template.model_dump(by_alias=True, exclude_none=True, mode="json")["spec"].get("hostNetwork")


def network_policies(spec: Spec, settings: JobSettings, options: PolicyOptions | None) -> list[Manifest]:
    """Return those that a job gets."""
    if options is None or not has_network_policy(spec):
        return []
    keepers = [keepers_policy(spec, settings)] if settings.copies > 0 else []
    return [network_policy(settings, options), *keepers]


def keepers_policy(spec: Spec, settings: JobSettings) -> Manifest:
    """Return what closes the keepers' port to all but the job's pods, and leaves all other ports as they are.

    Some networks ignore `endPort`. There the job's pods still reach each other, and others the ports that are named.
    """
    named = {(layout.AGENT_METRICS_PORT, "TCP"), *_declared_ports(spec)}
    others: list[Manifest] = [
        {"port": 1, "endPort": layout.COPIES_PORT - 1, "protocol": "TCP"},
        {"port": layout.COPIES_PORT + 1, "endPort": 65535, "protocol": "TCP"},
        {"protocol": "UDP"},
        *({"port": port, "protocol": protocol} for port, protocol in sorted(named)),
    ]
    return {
        "apiVersion": f"{API_GROUP}/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(settings, layout.keepers_policy_name(settings.job), layout.TRAINER),
        "spec": {
            "podSelector": {"matchLabels": {layout.JOB_LABEL: settings.job, layout.COMPONENT_LABEL: layout.TRAINER}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {layout.JOB_LABEL: settings.job}}}]},
                {"ports": others},
            ],
        },
    }


def _declared_ports(spec: Spec) -> Iterator[tuple[int, str]]:
    """Yield the ports that the template's containers name; what makes no sense is the API server's to refuse."""
    template = spec.template.model_dump(by_alias=True, exclude_none=True, mode="json")["spec"]
    containers = (*_objects(template.get("containers")), *_objects(template.get("initContainers")))
    for port in [port for container in containers for port in _objects(container.get("ports"))][:_MAX_DECLARED]:
        number, protocol = port.get("containerPort"), port.get("protocol") or "TCP"
        if type(number) is int and 0 < number < 65536 and number != layout.COPIES_PORT and protocol in _PROTOCOLS:
            yield number, protocol


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def network_policy(settings: JobSettings, options: PolicyOptions) -> Manifest:
    """Return the policy: the API is for the job's pods and the operator, metrics for whom the options name."""
    operator = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: options.operator_namespace}},
        "podSelector": {"matchLabels": dict(OPERATOR_LABELS)},
    }
    agents = {"podSelector": {"matchLabels": {layout.JOB_LABEL: settings.job}}}
    metrics: Manifest = {"ports": [_port(layout.METRICS_PORT)]}
    if options.metrics_from:
        metrics["from"] = [dict(peer) for peer in options.metrics_from]
    return {
        "apiVersion": f"{API_GROUP}/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(settings, layout.rendezvous_name(settings.job), layout.RENDEZVOUS),
        "spec": {
            "podSelector": {"matchLabels": {layout.JOB_LABEL: settings.job, layout.COMPONENT_LABEL: layout.RENDEZVOUS}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [_port(layout.API_PORT)], "from": [agents, operator]}, metrics],
        },
    }


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}
