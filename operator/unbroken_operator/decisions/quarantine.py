"""Pure: which nodes get no pods for a while, because jobs failed on them again and again.

    jobs' suspectNodes ──score of all jobs──> quarantined (taint and mark, at most so many nodes) ──time──> released
                                                   │                                                          ^
                                                   └──────── taint taken off by hand (the mark stays) ────────┘

The mark is an annotation with the time and the reason: it outlives operators and the jobs that were the evidence.

What jobs say of nodes comes from tenants. So a job counts only for nodes on which the operator saw its pods run, no job
and no namespace decides alone, and what one decision takes out of a cluster or domain is limited.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unbroken_core.vocabulary.plurals import counted
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_SUSPECTS
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.snapshot import NodeView
from unbroken_operator.decisions.suspects import AVOIDED, score_now

EXEMPT = "never"
"""Value of the node's label that keeps it from being quarantined."""
MAX_WITHHELD = 20
_CONTROL_PLANE = frozenset({"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"})
"""Labels, and taints, of nodes on which the cluster itself runs."""
_MAX_SCORE = 1000.0
"""Of one job for one node: more changes nothing, and would be hard to read."""
_MAX_NAMED_JOBS = 5
_SOME_TIME = "1970-01-01T00:00:00Z"
"""No time without a zone compares with it."""


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
    min_namespaces: int = 2
    """So many namespaces must blame a node. 1: an administrator's word that tenants trust each other."""
    max_percent: int = 25
    """Of the cluster's nodes, and of the nodes of a domain, rounded down; the control plane is not counted."""
    domain_label: str = ""
    """Nodes with the same value of this label are a domain; "" for none."""

    def counted(self, score: float) -> float:
        """Return what counts of the score that comes from one job, or one namespace: half of the limit at most."""
        return min(score, self.score / 2)


@dataclass(frozen=True)
class JobsView:
    """What one job says of nodes."""

    namespace: str
    name: str
    suspects: Sequence[Mapping[str, Any]]
    hosts: frozenset[str]
    """Nodes on which the operator saw pods of this job run. What the job says of others counts for nothing."""


class WithheldBecause(str, Enum):
    """Why a node with a high score is not quarantined."""

    CONTROL_PLANE = "control-plane"
    FEW_NAMESPACES = "few-namespaces"
    ONE_SOURCE = "one-source"
    MAX_NODES = "max-nodes"
    NO_DOMAIN = "no-domain"
    SHARE_OF_DOMAIN = "share-of-domain"
    SHARE_OF_CLUSTER = "share-of-cluster"


@dataclass(frozen=True)
class Offender:
    """A node that is to be quarantined."""

    name: str
    reason: str


@dataclass(frozen=True)
class Withheld:
    """A node that is not quarantined although its score is high enough."""

    offender: Offender
    because: WithheldBecause
    details: str


@dataclass(frozen=True)
class QuarantineDecision:
    """What is to be done now."""

    quarantine: tuple[Offender, ...] = ()
    release: tuple[str, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    """The worst ones, MAX_WITHHELD at most."""


@dataclass
class _Evidence:
    """What jobs say of one node: scores by namespace and job."""

    scores: dict[str, dict[str, float]]

    @property
    def score(self) -> float:
        return sum(sum(jobs.values()) for jobs in self.scores.values())

    def counted(self, limits: QuarantineLimits) -> float:
        """Return the score after the caps of jobs and namespaces."""
        sums = [sum(map(limits.counted, jobs.values())) for jobs in self.scores.values()]
        return sum(sums) if limits.min_namespaces == 1 else sum(map(limits.counted, sums))

    def describe(self, limits: QuarantineLimits) -> str:
        blaming = [f"{namespace}/{name}" for namespace, jobs in self.scores.items() for name in jobs]
        more = f" and {len(blaming) - _MAX_NAMED_JOBS} more" if len(blaming) > _MAX_NAMED_JOBS else ""
        return f"score {self.score:.1f} of {limits.score:g}, from {', '.join(blaming[:_MAX_NAMED_JOBS])}{more}"


def decide_quarantine(
    nodes: Mapping[str, NodeView],
    jobs: Iterable[JobsView],
    now: str,
    limits: QuarantineLimits,
    passed_over: Collection[str] = (),
) -> QuarantineDecision:
    """Return what is to be done; nothing once it is done. Names in `passed_over` leave their places to others."""
    marked = {name: node for name, node in nodes.items() if marked_at(node)}
    # A mark from a clock that was far ahead would hold its node until then: it counts as over.
    over = [name for name, node in marked.items() if abs(seconds_between(marked_at(node), now)) >= limits.duration_s]
    held = {name for name, node in nodes.items() if is_quarantined(node)}
    found = _evidence(jobs, now, limits)
    quarantine: list[Offender] = []
    withheld: list[Withheld] = []
    for name in sorted(found, key=lambda name: (-found[name].counted(limits), -found[name].score, name)):
        evidence, node = found[name], nodes.get(name)
        if node is None or evidence.score < limits.score or not _may_be_quarantined(node):
            continue
        if name in passed_over:
            continue
        offender = Offender(name, evidence.describe(limits))
        objection = _doubt(evidence, limits) or _protection(node, nodes, held, limits)
        if objection is None:
            quarantine.append(offender)
            held.add(name)
        elif len(withheld) < MAX_WITHHELD:
            withheld.append(Withheld(offender, *objection))
    return QuarantineDecision(tuple(quarantine), tuple(sorted(over)), tuple(withheld))


def _doubt(evidence: _Evidence, limits: QuarantineLimits) -> tuple[WithheldBecause, str] | None:
    """Return why jobs are not believed."""
    num_namespaces = len(evidence.scores)
    if num_namespaces < limits.min_namespaces:
        seen = f"{num_namespaces} of {limits.min_namespaces} namespaces blame it"
        return WithheldBecause.FEW_NAMESPACES, seen
    counted = evidence.counted(limits)
    if counted < limits.score:
        source = "job" if limits.min_namespaces == 1 else "job or namespace"
        return WithheldBecause.ONE_SOURCE, f"{counted:.1f} counts: at most {limits.score / 2:g} from one {source}"
    return None


def _protection(
    node: NodeView, nodes: Mapping[str, NodeView], held: set[str], limits: QuarantineLimits
) -> tuple[WithheldBecause, str] | None:
    """Return why the node keeps its place whatever jobs say."""
    if is_control_plane(node):
        return WithheldBecause.CONTROL_PLANE, "it belongs to the control plane"
    if len(held) >= limits.max_nodes:
        text = f"{len(held)} of {counted(limits.max_nodes, 'node is', 'nodes are')} quarantined"
        return WithheldBecause.MAX_NODES, text
    if is_domain_label_unknown(nodes, limits):
        # Misspelt, most likely: the share of a domain could not be kept.
        return WithheldBecause.NO_DOMAIN, f"no node has the label {limits.domain_label} (quarantine.domainLabel)"
    workers = {name: other for name, other in nodes.items() if not is_control_plane(other)}
    domain = node.labels.get(limits.domain_label) if limits.domain_label else None
    if domain is not None:
        members = {name for name, other in workers.items() if other.labels.get(limits.domain_label) == domain}
        if not _has_room(members, held, limits):
            share = f"{len(members & held)} of {len(members)} nodes with {limits.domain_label}={domain} are quarantined"
            return WithheldBecause.SHARE_OF_DOMAIN, f"{share}, {limits.max_percent} % may be"
    if not _has_room(set(workers), held, limits):
        share = f"{len(workers.keys() & held)} of {len(workers)} nodes of the cluster are quarantined"
        return WithheldBecause.SHARE_OF_CLUSTER, f"{share}, {limits.max_percent} % may be"
    return None


def _has_room(members: set[str], held: set[str], limits: QuarantineLimits) -> bool:
    return len(members & held) < len(members) * limits.max_percent // 100


def is_control_plane(node: NodeView) -> bool:
    """Whether the cluster itself runs there."""
    return any(key in _CONTROL_PLANE for key in (*node.labels, *(key for key, _effect in node.taints)))


def is_domain_label_unknown(nodes: Mapping[str, NodeView], limits: QuarantineLimits) -> bool:
    """Whether domains are wanted by a label that no node has, apart from the control plane."""
    workers = [node for node in nodes.values() if not is_control_plane(node)]
    return bool(limits.domain_label and workers) and not any(limits.domain_label in node.labels for node in workers)


def is_quarantined(node: NodeView) -> bool:
    """Whether the node has the taint, whoever has put it there."""
    return any(key == layout.QUARANTINE for key, _effect in node.taints)


def marked_at(node: NodeView) -> str:
    """Return the time of the mark, "" for none. A mark without a valid time, with its zone, is not ours, and stays."""
    words = node.quarantined.split(" ", 1)
    try:
        seconds_between(words[0], _SOME_TIME)
    except (TypeError, ValueError):
        return ""
    return words[0]


def _may_be_quarantined(node: NodeView) -> bool:
    if node.quarantined or is_quarantined(node):
        # A mark without a taint: a person released the node, which counts until the time is over.
        return False
    return node.labels.get(layout.QUARANTINE) != EXEMPT


def _evidence(jobs: Iterable[JobsView], now: str, limits: QuarantineLimits) -> dict[str, _Evidence]:
    found: dict[str, _Evidence] = {}
    for job in jobs:
        scores = {str(item.get("name")): _score(item, now) for item in job.suspects[:MAX_SUSPECTS]}
        blamed = {name: score for name, score in scores.items() if name in job.hosts and score >= AVOIDED}
        if len(blamed) > limits.max_nodes:
            # A job that fails on more nodes than may be quarantined is itself the likelier culprit.
            continue
        for name, score in blamed.items():
            evidence = found.setdefault(name, _Evidence({}))
            evidence.scores.setdefault(job.namespace, {})[job.name] = score
    return found


def _score(item: Mapping[str, Any], now: str) -> float:
    """Return what is left of a score; 0 for one that cannot be read, so that it costs other jobs nothing."""
    try:
        return min(score_now(item, now), _MAX_SCORE)
    except (KeyError, OverflowError, TypeError, ValueError):
        return 0.0
