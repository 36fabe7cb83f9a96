"""Which pods are to leave: their node says that it is about to go, their kubelet that a device is broken, or a device
of theirs is tainted."""

from collections.abc import Iterable

from unbroken_operator.api.recovery_models import NodeSignals, Reaction
from unbroken_operator.decisions.snapshot import NodeView, PodView, Snapshot


def sign_of(node: NodeView, signals: NodeSignals) -> str:
    """Return why a node counts as about to go, "" when it does not."""
    if signals.cordon is Reaction.MOVE and node.is_cordoned:
        return "is cordoned"
    for taint in signals.taints:
        for key, effect in node.taints:
            if key == taint.key and (taint.effect is None or effect == taint.effect.value):
                return f"has taint {key}:{effect}"
    for condition in signals.all_conditions:
        if node.conditions.get(condition.type) == condition.status.value:
            return f"has condition {condition.type}={condition.status.value}"
    return ""


def troubled_pods(snapshot: Snapshot, signals: NodeSignals, pods: Iterable[PodView]) -> dict[str, str]:
    """Return the uids of the pods that are to leave their nodes, and why; what is marked stays so."""
    pods = list(pods)
    nodes = {pod.node for pod in pods if pod.node in snapshot.nodes}
    signs = {name: sign_of(snapshot.nodes[name], signals) for name in nodes}
    found = {pod.uid: pod.leaving or _why(snapshot, pod, signs.get(pod.node, ""), signals) for pod in pods}
    return {uid: why for uid, why in found.items() if why}


def _why(snapshot: Snapshot, pod: PodView, sign: str, signals: NodeSignals) -> str:
    if sign:
        return f"node {pod.node} {sign}"
    if signals.devices is not Reaction.MOVE:
        return ""
    return pod.broken_device or snapshot.tainted_devices.get(pod.uid, "")
