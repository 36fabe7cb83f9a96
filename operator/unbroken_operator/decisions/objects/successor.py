"""Pure: which rendezvous pod leads, which one stands by to take over, and which are to go.

    serves, outdated ──standby made beside it──> serves ──standby Ready──> deleted ──gone──> the standby is told to lead
                                                   └──standby Pending: nothing changes

At no time do two lead: the next one is told when the one before has gone. It has no coordinator until then, so that
nothing runs out while it stands by, however long the operator is away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.snapshot import OperatorOptions, PodView, Snapshot

END_S = 10.0
"""A rendezvous that is being deleted has so long to end: its kubelet gives it 5."""


@dataclass(frozen=True)
class Succession:
    """The rendezvous pods of a job, and what they are to it."""

    leader: PodView | None
    """The one to keep, and to ask."""
    is_outdated: bool
    """Whether another one is to take over from it."""
    successor: PodView | None
    """The one that stands by."""
    stale: tuple[PodView, ...]
    """To be deleted."""
    wants_successor: bool
    """Whether one is to be made."""
    may_lead: bool
    """Whether the successor is to be told to lead now."""
    wait_s: float = 0.0
    """Until the one before counts as ended, if it does not go."""


def succession(
    snapshot: Snapshot, lost: frozenset[str], digest: str, made_from: str, *, can_stand_by: bool
) -> Succession:
    """Return what to do with the rendezvous pods; `digest` and `made_from` say what a present one is made from."""
    pods = sorted(snapshot.rendezvous_pods(), key=lambda pod: pod.ordinal)
    working = [pod for pod in pods if not pod.is_deleting and not pod.is_terminal and pod.uid not in lost]
    # One that has not started waits, perhaps for what the new spec corrects. One that works is left where it is.
    hopeful = [pod for pod in working if pod.phase != "Pending" or pod.made_from in ("", made_from)]
    leaders = [pod for pod in hopeful if not pod.is_standby]
    standbys = [pod for pod in hopeful if pod.is_standby and pod.settings == digest and not _is_leaving(pod, snapshot)]
    successor = standbys[-1] if standbys else None
    good = [pod for pod in leaders if pod.settings == digest]
    staying = [pod for pod in good if not (can_stand_by and pod.phase != "Pending" and _is_leaving(pod, snapshot))]
    if staying:
        return _kept(staying[-1], pods, is_outdated=False)
    serving = [pod for pod in leaders if pod.phase != "Pending"]
    if not snapshot.may_replace_rendezvous and leaders:
        return _kept(leaders[-1], pods, is_outdated=True, successor=successor)
    if serving and can_stand_by:
        leader = serving[-1]
        if successor is None or not successor.is_ready:
            return _kept(leader, pods, is_outdated=True, successor=successor, wants_successor=successor is None)
        # It goes first: two that lead would each take the other's pods for lost.
        return _without_leader(pods, successor)
    if good:
        return _kept(good[-1], pods, is_outdated=False)
    return _without_leader(pods, successor, _end_wait_s(snapshot, pods, lost))


def can_stand_by(spec: Spec, options: OperatorOptions) -> bool:
    """Return whether the image is known to: an earlier release has no standby."""
    return (spec.rendezvous.image or spec.sidecar.image or options.sidecar_image) == options.sidecar_image


def _kept(
    leader: PodView,
    pods: Sequence[PodView],
    *,
    is_outdated: bool,
    successor: PodView | None = None,
    wants_successor: bool = False,
) -> Succession:
    stale = tuple(pod for pod in pods if pod is not leader and pod is not successor)
    return Succession(leader, is_outdated, successor, stale, wants_successor, may_lead=False)


def _without_leader(pods: Sequence[PodView], successor: PodView | None, wait_s: float | None = None) -> Succession:
    stale = tuple(pod for pod in pods if pod is not successor)
    is_free = wait_s is not None and wait_s <= 0
    may_lead = is_free and successor is not None and successor.is_ready and bool(successor.ip)
    return Succession(None, False, successor, stale, False, may_lead, max(wait_s or 0.0, 0.0))


def _end_wait_s(snapshot: Snapshot, pods: Sequence[PodView], lost: frozenset[str]) -> float:
    """Return the seconds until every rendezvous that led counts as ended."""
    ending = [
        pod for pod in pods if not pod.is_standby and not pod.is_terminal and not pod.has_ended and pod.uid not in lost
    ]
    return max((END_S - snapshot.memory.deleting_for_s.get(pod.uid, 0.0) for pod in ending), default=0.0)


def _is_leaving(pod: PodView, snapshot: Snapshot) -> bool:
    node = snapshot.nodes.get(pod.node) if pod.node else None
    return node is not None and node.is_cordoned
