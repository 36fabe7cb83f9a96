"""Pure: who may reach a job's rendezvous. Where a cluster's network enforces no policies, it does nothing."""

from unbroken_core.settings import JobSettings
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.objects.manifests import Manifest, object_metadata
from unbroken_operator.decisions.snapshot import PolicyOptions

API_GROUP = "networking.k8s.io"
OPERATOR_LABELS = {"app.kubernetes.io/name": "unbroken-operator"}
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Set by the API server itself."""


def has_network_policy(spec: Spec) -> bool:
    """Return whether a policy can tell the job's pods from others: those in their host's network have its address."""
    return not spec.template.model_dump(by_alias=True, exclude_none=True, mode="json")["spec"].get("hostNetwork")


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
