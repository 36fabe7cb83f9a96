"""Taints and tolerations."""

from unbroken_local.kube import Json


def tolerates(toleration: Json, taint: Json) -> bool:
    """Return whether one toleration covers a taint."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != taint["key"]:
        return False
    return operator == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")


def untolerated(pod: Json, taints: list[Json], effects: tuple[str, ...]) -> list[Json]:
    """Return the taints of these effects that no toleration of the pod covers."""
    tolerations = pod["spec"].get("tolerations") or []
    return [
        taint
        for taint in taints
        if taint.get("effect") in effects and not any(tolerates(t, taint) for t in tolerations)
    ]
