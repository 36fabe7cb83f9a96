"""Pure: which nodes bear the condition that jobs fail on them again and again, for those who look after nodes.

    quarantined, or would be ──nobody else has the node in hand──> True ──its time is over, or released──> removed

It follows what quarantine decides, with the same limits: what a few tenants say of a node is not told as a fact.
Nothing of Unbroken acts on the condition. See docs/design/0032.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unbroken_core.conventions.printable import printable
from unbroken_operator.api import layout
from unbroken_operator.api.recovery_models import PRESET_CONDITIONS
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.quarantine import (
    EXEMPT,
    QuarantineDecision,
    QuarantineLimits,
    QuarantineMode,
    is_quarantined,
    marked_at,
)
from unbroken_operator.decisions.snapshot import NodeView

MAX_MESSAGE = 512
_OTHERS = frozenset(kind for kinds in PRESET_CONDITIONS.values() for kind in kinds)
"""Conditions with which others say that they have found the node broken."""


@dataclass(frozen=True)
class OffenderChange:
    """What is to be written to one node's status."""

    node: str
    since: str
    """When it was found; "" to remove the condition."""
    why: str = ""

    def to_patch(self) -> dict[str, Any]:
        """Return the strategic merge patch, which touches no other condition."""
        if not self.since:
            return {"status": {"conditions": [{"$patch": "delete", "type": layout.OFFENDER_CONDITION}]}}
        condition = {
            "type": layout.OFFENDER_CONDITION,
            "status": "True",
            "reason": "JobsFailThere",
            "message": f"training jobs failed here again and again: {self.why}"[:MAX_MESSAGE],
            "lastHeartbeatTime": self.since,
            "lastTransitionTime": self.since,
        }
        return {"status": {"conditions": [condition]}}


def as_if_quarantined(
    nodes: Mapping[str, NodeView], mode: QuarantineMode, now: str, limits: QuarantineLimits
) -> Mapping[str, NodeView]:
    """Return the nodes as if a dry run had tainted those that it told of: they take the places that there are."""
    if mode is not QuarantineMode.DRY_RUN:
        return nodes
    taint = (layout.QUARANTINE, "NoSchedule")
    return {
        name: replace(node, taints=(*node.taints, taint), quarantined=f"{node.offends_since} told")
        if _is_current(node, now, limits) and not node.quarantined
        else node
        for name, node in nodes.items()
    }


def decide_offenders(
    nodes: Mapping[str, NodeView],
    decision: QuarantineDecision,
    mode: QuarantineMode,
    now: str,
    limits: QuarantineLimits,
) -> tuple[OffenderChange, ...]:
    """Return what is to be written; nothing once it is. `nodes` are those that there are, `decision` is about them."""
    told = {name for name, node in nodes.items() if node.offends_since}
    wanted = _quarantined(nodes, decision) if mode is QuarantineMode.ON else _would_be(nodes, decision, now, limits)
    changes = [OffenderChange(name, "") for name in sorted(told - wanted.keys())]
    for name in sorted(wanted.keys() - told):
        if not is_in_hand(nodes[name]):
            changes.append(OffenderChange(name, now, wanted[name]))
    return tuple(changes)


def _quarantined(nodes: Mapping[str, NodeView], decision: QuarantineDecision) -> dict[str, str]:
    """Return those that we have tainted, and why. A taint without our mark is a person's, who knows of it."""
    marked = {name: node for name, node in nodes.items() if marked_at(node) and is_quarantined(node)}
    return {name: _reason(node) for name, node in marked.items() if name not in decision.release}


def _reason(node: NodeView) -> str:
    """Return what the mark says, as one bounded line: whoever may annotate nodes writes it."""
    return printable(node.quarantined.partition(" ")[2][:MAX_MESSAGE])[:MAX_MESSAGE]


def _would_be(
    nodes: Mapping[str, NodeView], decision: QuarantineDecision, now: str, limits: QuarantineLimits
) -> dict[str, str]:
    kept = {
        name: ""
        for name, node in nodes.items()
        if _is_current(node, now, limits) and node.labels.get(layout.QUARANTINE) != EXEMPT
    }
    return kept | {offender.name: offender.reason for offender in decision.quarantine}


def _is_current(node: NodeView, now: str, limits: QuarantineLimits) -> bool:
    """Whether the node bears the condition, and its time is not over. A time far ahead is nobody's."""
    try:
        return bool(node.offends_since) and abs(seconds_between(node.offends_since, now)) < limits.duration_s
    except (TypeError, ValueError):
        return False


def is_in_hand(node: NodeView) -> bool:
    """Whether somebody has the node in hand already, as NVSentinel does, which cordons it first and drains it then."""
    return node.is_cordoned or any(node.conditions.get(kind) == "True" for kind in _OTHERS)
