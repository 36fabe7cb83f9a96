"""Pure: pods that are made and deleted in circles, and how long to wait before more are made.

    pod seen ──ready, or joined, or failed──> of use: its later end is a fault like any other
        │
        └──gone before that, or deleted by the operator within YOUNG_S──> wasted

A round is a wasted pod that was made after the last round: thousands that go together count once, and so does
whatever is deleted slowly. So what counts is the length of the chain, a replacement of a replacement; a first start, a
fault, a drain or a roll-out is one round, however large. The first NUM_FREE rounds cost nothing. Then creations wait,
ever longer. It is over when pods made after the last round have lasted, or when there was no round for CALM_S.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unbroken_operator.decisions.limits.retry import retry_delay_s
from unbroken_operator.decisions.snapshot import PodView

NUM_FREE = 5
YOUNG_S = 60.0
"""A pod that lives so long was of use, whoever ends it."""
CALM_S = 600.0
NUM_AFTER_NEW_SPEC = NUM_FREE + 2
"""What a new spec leaves of the count: its pods wait 8 seconds at most, and changing it in circles is one, too."""


@dataclass(frozen=True)
class Circles:
    """What is known of a job's pods that came and went; times are monotonic seconds."""

    first_seen: Mapping[str, float] = field(default_factory=dict)
    """By uid, of pods that live."""
    used: frozenset[str] = frozenset()
    """Uids of pods that were ready, joined or failed, or that were there at the operator's start."""
    deletions: Mapping[str, str] = field(default_factory=dict)
    """Why the operator has deleted pods, by uid; only those that still exist."""
    num_rounds: int = 0
    last_at: float = 0.0
    """When the last round was."""
    last: str = ""
    """Its first pod and why it went, for people."""


def next_circles(
    before: Circles, pods: Iterable[PodView], joined: set[str], now_s: float, *, is_first: bool
) -> Circles:
    """Return what is known after this look; `joined` has the uids of pods that were members at some time."""
    pods = list(pods)
    living = {pod.uid for pod in pods if not pod.is_deleting}
    names = {pod.uid: pod.name for pod in pods}
    ready = {pod.uid for pod in pods if is_first or pod.is_ready or pod.is_terminal or pod.uid in joined}
    gone = [uid for uid in before.first_seen if uid not in living]
    wasted = [uid for uid in gone if _is_wasted(uid, before, ready, now_s)]
    fresh = [uid for uid in wasted if not before.num_rounds or before.first_seen[uid] >= before.last_at]
    after = replace(
        before,
        first_seen={uid: before.first_seen.get(uid, now_s) for uid in living},
        used=frozenset((before.used | ready) & living),
        deletions={uid: why for uid, why in before.deletions.items() if uid in living},
    )
    if fresh:
        why = before.deletions.get(fresh[0], "somebody else deleted it")
        last = f"{names.get(fresh[0], 'a pod')} ({why})"
        num = 1 if now_s - before.last_at >= CALM_S else before.num_rounds + 1
        return replace(after, num_rounds=num, last_at=now_s, last=last)
    return replace(after, num_rounds=0) if _is_calm(after, now_s) else after


def with_creation(before: Circles, uid: str, now_s: float) -> Circles:
    """Return what is known once the operator has made a pod: it may be gone before anybody looks."""
    return replace(before, first_seen={uid: now_s, **before.first_seen})


def with_deletion(before: Circles, uid: str, why: str) -> Circles:
    """Return what is known once the operator has deleted a pod."""
    return replace(before, deletions={**before.deletions, uid: why}) if uid in before.first_seen else before


def with_new_spec(before: Circles) -> Circles:
    """Return what is known once the job's spec has changed."""
    return replace(before, num_rounds=min(before.num_rounds, NUM_AFTER_NEW_SPEC))


def pause_s(num_rounds: int) -> float:
    """Return how long to wait after the last of so many rounds."""
    return retry_delay_s(num_rounds - NUM_FREE)


def _is_wasted(uid: str, before: Circles, ready: set[str], now_s: float) -> bool:
    if uid in before.deletions and now_s - before.first_seen[uid] < YOUNG_S:
        return True
    return uid not in before.used and uid not in ready


def _is_calm(seen: Circles, now_s: float) -> bool:
    if now_s - seen.last_at >= CALM_S:
        return True
    lasting = [at for at in seen.first_seen.values() if at > seen.last_at and now_s - at >= YOUNG_S]
    return bool(lasting) and all(uid in seen.used for uid in seen.first_seen)
