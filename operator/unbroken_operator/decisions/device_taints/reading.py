"""Pure: which devices a node's ResourceSlices call tainted, and whether a pod's ResourceClaim holds one of them.

Slices come from drivers, and claims from tenants: nothing is believed of the shape of either, and of both a bounded
part is kept. Only claims that were made for one pod count. One that pods share would go along with the ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_operator.decisions.snapshot import controller_uid, shorten

MAX_DEVICES, MAX_TAINTS, MAX_TOLERATIONS = 1024, 16, 32
"""Tainted devices of a node, taints of each, and tolerations of an allocated one: more than the API has."""
MAX_RESULTS = 128
"""Devices of one claim; the API allows 32."""
MAX_NAME, MAX_SHOWN = 317, 80
"""Characters of a name, and those of it that are shown."""
EFFECTS = ("NoSchedule", "NoExecute")
"""Others, such as None, are information."""

DeviceId = tuple[str, str, str]
"""Driver, pool and name."""


@dataclass(frozen=True)
class DeviceTaint:
    """One taint that keeps pods off a device."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class SliceView:
    """What is kept of a ResourceSlice."""

    driver: str
    pool: str
    generation: int
    node: str
    tainted: Mapping[str, tuple[DeviceTaint, ...]]
    """By name of the device."""


def slice_view(item: Mapping[str, Any]) -> SliceView:
    """Read a ResourceSlice."""
    spec = _fields(item.get("spec"))
    pool = _fields(spec.get("pool"))
    generation = pool.get("generation")
    tainted: dict[str, tuple[DeviceTaint, ...]] = {}
    for device in map(_fields, _items(spec.get("devices"), MAX_DEVICES)):
        taints = tuple(_taints(device))
        if taints:
            tainted[_text(device.get("name"))] = taints
    return SliceView(
        _text(spec.get("driver")),
        _text(pool.get("name")),
        generation if isinstance(generation, int) else 0,
        _text(spec.get("nodeName")),
        tainted,
    )


def tainted_devices(slices: Iterable[SliceView], node: str) -> dict[DeviceId, tuple[DeviceTaint, ...]]:
    """Return the tainted devices of a node. Of each pool the newest generation counts: a driver replaces slices."""
    slices = [item for item in slices if item.node == node]
    newest: dict[tuple[str, str], int] = {}
    for item in slices:
        pool = (item.driver, item.pool)
        newest[pool] = max(newest.get(pool, item.generation), item.generation)
    found: dict[DeviceId, tuple[DeviceTaint, ...]] = {}
    for item in slices:
        if item.generation == newest[item.driver, item.pool]:
            for name, taints in item.tainted.items():
                if len(found) < MAX_DEVICES:
                    found[item.driver, item.pool, name] = taints
    return found


def sign_of_claim(claim: Mapping[str, Any], pod_uid: str, tainted: Mapping[DeviceId, tuple[DeviceTaint, ...]]) -> str:
    """Return which tainted device a claim holds for this very pod, for people; "" for none that is not tolerated."""
    if not pod_uid or controller_uid(claim) != pod_uid:
        return ""
    allocation = _fields(_fields(claim.get("status")).get("allocation"))
    for result in map(_fields, _items(_fields(allocation.get("devices")).get("results"), MAX_RESULTS)):
        device = _text(result.get("driver")), _text(result.get("pool")), _text(result.get("device"))
        tolerations = [_fields(item) for item in _items(result.get("tolerations"), MAX_TOLERATIONS)]
        for taint in tainted.get(device, ()):
            if not any(_tolerates(item, taint) for item in tolerations):
                return _sentence(device, taint)
    return ""


def _sentence(device: DeviceId, taint: DeviceTaint) -> str:
    driver, pool, name = (text[:MAX_SHOWN] for text in device)
    value = f"={taint.value[:MAX_SHOWN]}" if taint.value else ""
    return shorten(f"device {name} of pool {pool} ({driver}) has taint {taint.key[:MAX_SHOWN]}{value}:{taint.effect}")


def _tolerates(toleration: Mapping[str, Any], taint: DeviceTaint) -> bool:
    """Whether it does so for good: what is tolerated for some seconds only is to leave before they are over."""
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if key not in ("", taint.key) or effect not in ("", taint.effect):
        return False
    if taint.effect == "NoExecute" and toleration.get("tolerationSeconds") is not None:
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Exists":
        return True
    return operator == "Equal" and bool(key) and (toleration.get("value") or "") == taint.value


def _taints(device: Mapping[str, Any]) -> Iterator[DeviceTaint]:
    for taint in map(_fields, _items(device.get("taints"), MAX_TAINTS)):
        effect = taint.get("effect")
        if effect in EFFECTS:
            yield DeviceTaint(_text(taint.get("key")), _text(taint.get("value")), str(effect))


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: Any, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:MAX_NAME] if isinstance(value, str) else ""
