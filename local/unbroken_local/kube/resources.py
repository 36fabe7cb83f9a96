"""What pods ask for and nodes have: exact amounts by resource name."""

from collections.abc import Mapping
from fractions import Fraction

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.kube import Json
from unbroken_local.kube.quantity import parse_quantity

Amounts = Mapping[str, Fraction]
ZERO = Fraction(0)


def read_amounts(raw: Mapping[str, object] | None) -> dict[str, Fraction]:
    """Return amounts; what is no quantity counts as 0."""
    result = {}
    for name, text in (raw or {}).items():
        try:
            result[name] = parse_quantity(text)
        except InputError:
            result[name] = ZERO
    return result


def requests_of(pod: Json) -> dict[str, Fraction]:
    """Return what a pod asks of its node: its main containers and sidecars together, or its largest init container."""
    spec = pod["spec"]
    total = read_amounts(spec.get("overhead"))
    for container in spec.get("containers") or []:
        total = _sum(total, _requests(container))
    sidecars: dict[str, Fraction] = {}
    peak: dict[str, Fraction] = {}
    for container in spec.get("initContainers") or []:
        own = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = _sum(sidecars, own)
            peak = _max(peak, sidecars)
        else:
            peak = _max(peak, _sum(sidecars, own))
    return _max(_sum(total, sidecars), peak) | {"pods": Fraction(1)}


def _requests(container: Json) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    return read_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _sum(left: Amounts, right: Amounts) -> dict[str, Fraction]:
    return {name: left.get(name, ZERO) + right.get(name, ZERO) for name in {**left, **right}}


def _max(left: Amounts, right: Amounts) -> dict[str, Fraction]:
    return {name: max(left.get(name, ZERO), right.get(name, ZERO)) for name in {**left, **right}}
