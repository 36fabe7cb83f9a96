"""What a plan may ask for. Every action is safe to repeat: a second time it finds its work done."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

from unbroken_core.protocol.messages import Earlier, Observation
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.decisions.limits.budgets import Budget
from unbroken_operator.decisions.limits.refusals import OperatorRefusal


@dataclass(frozen=True)
class PushObservation:
    """Tell the rendezvous in this pod what the API server shows."""

    pod_uid: str
    term: int
    observation: Observation


@dataclass(frozen=True)
class PostEvent:
    """Create a Kubernetes Event; its name is that of the fact, so that each fact is posted once."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class WriteStatus:
    """Merge this into the job's status."""

    patch: Mapping[str, Any]


@dataclass(frozen=True)
class CreateSecret:
    """Create the Secret, with a new random key or the one that the pods' tokens follow from already."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class CreateTokens:
    """Create a Secret with the tokens of a block of pods."""

    block: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class RepairTokens:
    """Write the present tokens into one of the job's Secrets, if it still has this uid."""

    block: int | None
    """None: the token of readers, in the job's own Secret."""
    name: str
    uid: str

    @property
    def key(self) -> str:
        """Which Secret is repaired."""
        return f"{self.uid}/tokens"


@dataclass(frozen=True)
class CreateService:
    """Create the Service."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class CreateNetworkPolicy:
    """Create the NetworkPolicy of the rendezvous, unless there is one of that name."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class CreatePod:
    """Create a pod."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod if it still has this uid; forced means without waiting for its kubelet."""

    name: str
    uid: str
    why: str
    is_forced: bool = False


@dataclass(frozen=True)
class LetLead:
    """Let a rendezvous lead that stands by: into the Service, then tell it, then note that it was told."""

    name: str
    uid: str
    address: str
    earlier: Earlier


@dataclass(frozen=True)
class PatchPod:
    """Merge labels and annotations into a pod's metadata, if it still has this uid."""

    name: str
    uid: str
    labels: Mapping[str, str | None]
    """None removes one."""
    annotations: Mapping[str, str | None]
    """None removes one."""

    @property
    def key(self) -> str:
        """Which field gets which value. If the same is asked for again and again, another writer undoes it."""
        return f"{self.uid}/{sorted(self.labels.items())}/{sorted(self.annotations.items())}"


@dataclass(frozen=True)
class Revert:
    """Revert what another writer changed in one of the job's objects, if it still has this uid."""

    resource: str
    """services or pods."""
    name: str
    uid: str
    fields: tuple[str, ...]
    """What is not as it was made, in words of the API."""
    patch: Mapping[str, Any]
    """Merge patch."""
    owner: Mapping[str, Any] | None = None
    """Owner reference that is missing."""

    @property
    def key(self) -> str:
        """Which fields are reverted."""
        return f"{self.uid}/{','.join(self.fields)}"


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job, unless it changed since this resource version; its objects go with it."""

    uid: str
    resource_version: str
    why: str


Action = Union[
    PushObservation,
    PostEvent,
    WriteStatus,
    CreateSecret,
    CreateTokens,
    CreateService,
    CreateNetworkPolicy,
    CreatePod,
    RepairTokens,
    DeletePod,
    LetLead,
    PatchPod,
    Revert,
    DeleteJob,
]


@dataclass(frozen=True)
class Decision:
    """Actions in the order in which they are to be done."""

    actions: tuple[Action, ...]
    check_after_s: float | None = None
    """Plan again after this time even when nothing happens; None means there is nothing to wait for."""
    counted: frozenset[OperatorRefusal] = frozenset()
    """What the spec asks for and does not get, in words of the metric."""
    num_pods_held: int = 0
    """Pods that are missing, and wait for the job's budget."""
    sound_spec: Mapping[str, Any] | None = None
    """The job's spec, if it is sound: it stays in force should the next one not be."""
    wants_new_rendezvous: bool = False
    """Whether another rendezvous is to take over from one that works, and waits until it may."""


def lost_fields(patch: Mapping[str, Any], status: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields that were written and are not in the answer: the CRD is older than the operator."""
    return frozenset(key for key, value in patch.items() if value is not None and key not in status)


def without_lost_fields(decision: Decision, fields: frozenset[str]) -> Decision:
    """Return the decision without writes that the API server would drop: they would be planned again forever."""
    actions = tuple(
        action for action in decision.actions if not (isinstance(action, WriteStatus) and set(action.patch) <= fields)
    )
    return replace(decision, actions=actions)


COSTS: dict[type, Budget] = {
    PostEvent: Budget.EVENTS,
    WriteStatus: Budget.STATUS_WRITES,
    CreatePod: Budget.POD_CREATIONS,
    DeletePod: Budget.POD_DELETIONS,
}
"""Actions that a job's budgets are for."""


@dataclass(frozen=True)
class Affordable:
    """The part of a decision that the job's budgets allow."""

    decision: Decision
    held: Mapping[Budget, int] = field(default_factory=dict)
    """How much of what was held back."""
    dropped: tuple[str, ...] = ()
    """Names of Events that are never to be posted."""


def within_budgets(decision: Decision, left: Mapping[Budget, float]) -> Affordable:
    """Return what the budgets allow. `left`: how much may be spent.

    The plan itself makes no more pods than it may, since their ordinals are reserved with them.
    """
    makes_pods = any(isinstance(action, CreatePod) for action in decision.actions)
    spent: Counter[Budget] = Counter()
    held: Counter[Budget] = Counter()
    kept: list[Action] = []
    dropped: list[str] = []
    for action in decision.actions:
        budget = COSTS.get(type(action))
        if budget is None or isinstance(action, CreatePod) or spent[budget] + 1 <= left[budget]:
            is_kept = True
        elif isinstance(action, WriteStatus):
            # It reserves the ordinals of new pods, and these have a budget of their own.
            is_kept = makes_pods
        else:
            # What says that something is held back is not.
            is_kept = isinstance(action, PostEvent) and action.manifest["reason"] == Reason.THROTTLED.value
        if budget is not None:
            (spent if is_kept else held)[budget] += 1
        if is_kept:
            kept.append(action)
        elif isinstance(action, PostEvent):
            dropped.append(str(action.manifest["metadata"]["name"]))
    if decision.num_pods_held:
        held[Budget.POD_CREATIONS] += decision.num_pods_held
    return Affordable(replace(decision, actions=tuple(kept)), dict(held), tuple(dropped))


@dataclass(frozen=True)
class Ordinals:
    """Numbers of the next pods."""

    pod: int
    rendezvous: int
