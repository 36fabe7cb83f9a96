"""Pure: which nodes get no pods for a while, because jobs failed on them again and again.

    jobs' suspectNodes ──score of all jobs──> quarantined (taint and mark, at most so many nodes) ──time──> released
                                                   │                                                          ^
                                                   └──────── taint taken off by hand (the mark stays) ────────┘

The mark is an annotation with the time and the reason: it outlives operators and the jobs that were the evidence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.snapshot import NodeView
from unbroken_operator.decisions.suspects import AVOIDED, score_now

EXEMPT = "never"
"""Value of the node's label that keeps it from being quarantined."""


class QuarantineMode(str, Enum):
    """What to do with a decision."""

    OFF = "off"
    DRY_RUN = "dry-run"
    ON = "on"


@dataclass(frozen=True)
class QuarantineLimits:
    """When a node is quarantined."""

    score: float = 3.0
    """Of all jobs together; each fault of a node adds 0.5 or 1, and half of it is gone after half an hour."""
    max_nodes: int = 1
    duration_s: float = 3600.0


@dataclass(frozen=True)
class JobsView:
    """What one job says of nodes."""

    job: str
    suspects: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Offender:
    """A node that is to be quarantined."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuarantineDecision:
    """What is to be done now."""

    quarantine: tuple[Offender, ...] = ()
    release: tuple[str, ...] = ()
    over_limit: tuple[Offender, ...] = ()
    """Would be quarantined if there were not as many already."""


def decide_quarantine(
    nodes: Mapping[str, NodeView], jobs: Iterable[JobsView], now: str, limits: QuarantineLimits
) -> QuarantineDecision:
    """Return what is to be done; nothing once it is done."""
    marked = {name: node for name, node in nodes.items() if _marked_at(node)}
    over = [name for name, node in marked.items() if seconds_between(_marked_at(node), now) >= limits.duration_s]
    num_held = sum(is_quarantined(node) for node in nodes.values())
    scores = _scores(jobs, now, limits)
    offenders = [
        Offender(name, f"score {score:.1f} of {limits.score:g}, from {', '.join(blaming)}")
        for name, (score, blaming) in sorted(scores.items(), key=lambda item: (-item[1][0], item[0]))
        if score >= limits.score and _may_be_quarantined(nodes.get(name))
    ]
    room = max(0, limits.max_nodes - num_held)
    return QuarantineDecision(tuple(offenders[:room]), tuple(sorted(over)), tuple(offenders[room:]))


def is_quarantined(node: NodeView) -> bool:
    """Whether the node has the taint, whoever has put it there."""
    return any(key == layout.QUARANTINE for key, _effect in node.taints)


def _marked_at(node: NodeView) -> str:
    """Return the time of the mark, "" for none. A mark without a valid time is not ours, and stays."""
    words = node.quarantined.split(" ", 1)
    try:
        seconds_between(words[0], words[0])
    except ValueError:
        return ""
    return words[0]


def _may_be_quarantined(node: NodeView | None) -> bool:
    if node is None or node.quarantined or is_quarantined(node):
        # A mark without a taint: a person released the node, which counts until the time is over.
        return False
    return node.labels.get(layout.QUARANTINE) != EXEMPT


def _scores(jobs: Iterable[JobsView], now: str, limits: QuarantineLimits) -> dict[str, tuple[float, list[str]]]:
    found: dict[str, tuple[float, list[str]]] = {}
    for job in jobs:
        scores = {item["name"]: score_now(item, now) for item in job.suspects}
        blamed = {name: score for name, score in scores.items() if score >= AVOIDED}
        if len(blamed) > limits.max_nodes:
            # A job that fails on more nodes than may be quarantined is itself the likelier culprit.
            continue
        for name, score in blamed.items():
            before = found.get(name, (0.0, []))
            found[name] = (before[0] + score, [*before[1], job.job])
    return found
