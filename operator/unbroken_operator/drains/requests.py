"""Pure: what a DrainRequest wants, which of its pods are still there, and what is due for them.

The contract is NVSentinel's ("Writing a Drain Plugin"): drain exactly `spec.podsToDrain`, and set the condition
DrainComplete to True once they are gone, not earlier.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout

GROUP_VERSION = "nvsentinel.nvidia.com/v1alpha1"
PLURAL = "drainrequests"
CONDITION = "DrainComplete"
MAX_PODS = 1000
"""Of one request. A kubelet runs 110 by default."""
MAX_NAMED = 5
"""Pods that a message names."""
MAX_REFUSAL = 300
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class DrainReason(str, Enum):
    """Why a request is, or is not, complete."""

    DRAINED = "Drained"
    RANKS_MOVE = "RanksMove"
    PODS_END = "PodsEnd"
    EVICTION_REFUSED = "EvictionRefused"
    INVALID = "Invalid"


class Need(Enum):
    """What one pod needs before its node is empty of it."""

    NOTHING = "nothing"
    MOVE = "move"
    """Its ranks are to leave first."""
    EVICTION = "eviction"
    END = "end"


@dataclass(frozen=True)
class PodName:
    """Where a pod is found."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class DrainRequest:
    """One request, as far as it matters."""

    path: str
    """Of the object, below the collection's."""
    node: str
    pods: tuple[PodName, ...]
    known_s: float
    """For so long this program has known it."""


@dataclass(frozen=True)
class FoundPod:
    """One pod of a request that still exists."""

    uid: str
    node: str
    is_ending: bool
    is_over: bool
    """Its containers have ended for good."""
    has_ranks: bool
    """A training pod of a job, active by its label."""
    is_leaving: bool
    """It has been asked to leave."""


@dataclass(frozen=True)
class Due:
    """What is to be done for a request now."""

    ask: tuple[PodName, ...]
    """Pods whose ranks are asked to leave."""
    evict: tuple[PodName, ...]
    moving: tuple[PodName, ...]
    """Pods that ranks have not left yet."""
    left: tuple[PodName, ...]
    """Pods that are not gone."""


def read_request(path: str, spec: Mapping[str, Any], known_s: float) -> DrainRequest:
    """Return the request. Raises InputError for one that names what no pod is called."""
    node, listed = spec.get("nodeName") or "", spec.get("podsToDrain") or {}
    if not isinstance(node, str) or not (node and len(node) < 254 and _NAME.fullmatch(node)):
        raise InputError(f"spec.nodeName: must be the name of a node, is {_short(node)}")
    if not isinstance(listed, Mapping):
        raise InputError(f"spec.podsToDrain: must map namespaces to lists of pods, is {_short(listed)}")
    pods: dict[PodName, None] = {}
    for namespace, listed_names in listed.items():
        names = listed_names or ()  # A template may leave the list of a namespace out.
        if not isinstance(namespace, str) or not _LABEL.fullmatch(namespace):
            raise InputError(f"spec.podsToDrain: keys must be namespaces, one is {_short(namespace)}")
        if not isinstance(names, Sequence) or isinstance(names, str):
            raise InputError(f"spec.podsToDrain.{namespace}: must be a list of pods, is {_short(names)}")
        if len(pods) + len(names) > MAX_PODS:
            raise InputError(f"spec.podsToDrain: must have at most {MAX_PODS} pods, has more")
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InputError(f"spec.podsToDrain.{namespace}: must be names of pods, one is {_short(name)}")
            pods[PodName(namespace, name)] = None
    return DrainRequest(path, node, tuple(pods), known_s)


def read_pod(item: Mapping[str, Any]) -> FoundPod:
    """Return what matters of a pod of the API server."""
    metadata, labels = item["metadata"], item["metadata"].get("labels") or {}
    is_trainer = layout.JOB_LABEL in labels and labels.get(layout.COMPONENT_LABEL) == layout.TRAINER
    return FoundPod(
        uid=metadata["uid"],
        node=(item.get("spec") or {}).get("nodeName") or "",
        is_ending=bool(metadata.get("deletionTimestamp")),
        is_over=(item.get("status") or {}).get("phase") in ("Succeeded", "Failed"),
        has_ranks=is_trainer and labels.get(layout.ROLE_LABEL) == Role.ACTIVE.value,
        is_leaving=bool((metadata.get("annotations") or {}).get(layout.LEAVING_ANNOTATION)),
    )


def decide(request: DrainRequest, found: Mapping[PodName, FoundPod], patience_s: float) -> Due:
    """Return what is due. `found` lacks the pods that do not exist."""
    needs = {name: _need(request, found.get(name), patience_s) for name in request.pods}
    moving = tuple(name for name, need in needs.items() if need is Need.MOVE)
    return Due(
        ask=tuple(name for name in moving if not found[name].is_leaving),
        evict=tuple(name for name, need in needs.items() if need is Need.EVICTION),
        moving=moving,
        left=tuple(name for name, need in needs.items() if need is not Need.NOTHING),
    )


def _need(request: DrainRequest, pod: FoundPod | None, patience_s: float) -> Need:
    # A pod of that name on another node, or on none yet, is the next of a StatefulSet.
    if pod is None or pod.node != request.node or pod.is_over:
        return Need.NOTHING
    if pod.is_ending:
        return Need.END
    return Need.MOVE if pod.has_ranks and request.known_s < patience_s else Need.EVICTION


def condition(
    request: DrainRequest, due: Due, refusals: Mapping[PodName, str], patience_s: float
) -> tuple[bool, DrainReason, str]:
    """Return status, reason and message of DrainComplete. `refusals`: what the API server said to evictions now."""
    if not due.left:
        return True, DrainReason.DRAINED, f"{_counted(len(request.pods))} drained from {request.node}"
    if refusals:
        name, text = next(iter(refusals.items()))
        more = f" and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        return False, DrainReason.EVICTION_REFUSED, f"no eviction of {name}{more}: {text[:MAX_REFUSAL]}"
    if due.moving:
        what = f"ranks are to leave {_named(due.moving)}; they have {patience_s:.0f} s in all before these are evicted"
        return False, DrainReason.RANKS_MOVE, what
    return False, DrainReason.PODS_END, f"{_named(due.left)} not gone yet"


def with_condition(status: Mapping[str, Any], wanted: tuple[bool, DrainReason, str], now: str) -> list[Any] | None:
    """Return the conditions of a status with this one; None where it says so already. Others stay as they are."""
    is_complete, reason, message = wanted
    value = str(is_complete)
    conditions = _conditions(status)
    present = next((item for item in conditions if item.get("type") == CONDITION), None)
    new = {"type": CONDITION, "status": value, "reason": reason.value, "message": message}
    if present is not None and all(present.get(key) == text for key, text in new.items()):
        return None
    is_same = present is not None and present.get("status") == value
    since = present.get("lastTransitionTime") if present is not None and is_same else None
    others = [item for item in conditions if item.get("type") != CONDITION]
    return [*others, {**new, "lastTransitionTime": since or now}]


def is_complete(status: Mapping[str, Any]) -> bool:
    """Whether the request is over: nothing is ever done for it again."""
    return any(item.get("type") == CONDITION and item.get("status") == "True" for item in _conditions(status))


def whose_turn(items: Sequence[Any], first: int, most: int) -> list[Any]:
    """Return so many of these at most, from this one on and round about: none waits for ever for others."""
    start = first % len(items) if items else 0
    return [*items[start:], *items[:start]][:most]


def _conditions(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return those that can be read: another plugin's CRD may take anything."""
    found = status.get("conditions")
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _counted(number: int) -> str:
    return "1 pod" if number == 1 else f"{number} pods"


def _named(pods: Sequence[PodName]) -> str:
    names = ", ".join(map(str, pods[:MAX_NAMED]))
    return names if len(pods) <= MAX_NAMED else f"{names} and {len(pods) - MAX_NAMED} more"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
