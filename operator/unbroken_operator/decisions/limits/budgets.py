"""Pure: token buckets. A job that uses up a budget waits for it; what others have is not touched.

level:  burst ──spend──> lower, below 0 at most by one purchase ──per_s──> burst again
"""

from dataclasses import dataclass
from enum import Enum

from unbroken_operator.decisions.limits.batches import MAX_NEW_PODS


@dataclass(frozen=True)
class Allowance:
    """How much of something is allowed."""

    burst: float
    """At once, after a long rest."""
    per_s: float
    """For ever."""


@dataclass(frozen=True)
class Bucket:
    """What is left of an allowance; `at_s` is monotonic seconds."""

    level: float
    at_s: float


class Budget(str, Enum):
    """What a job may have so much of, in words for people."""

    EVENTS = "Events"
    STATUS_WRITES = "writes of its status"
    POD_CREATIONS = "pods created"
    POD_DELETIONS = "pods deleted"


ROUNDING = 1e-6
POLLS = Allowance(burst=10, per_s=1.0)
"""Requests for the status of one job's rendezvous: the few changes of a recovery at once, then one a second."""
MAX_POD_BURST, MAX_PODS_PER_S = 16_384, 200.0
"""However large a job says that it is: saying so costs nothing. A job of 4,096 pods has all that its size allows."""
PLANS = Allowance(burst=60, per_s=5.0)
"""Plans for one job. Whoever may change its pods can cause as many changes as the API server takes."""


def full(allowance: Allowance, now_s: float) -> Bucket:
    """Return a bucket of which nothing was spent."""
    return Bucket(allowance.burst, now_s)


def left(bucket: Bucket, allowance: Allowance, now_s: float) -> float:
    """Return how much may be spent now; negative while a purchase is being paid off."""
    return min(allowance.burst, bucket.level + max(0.0, now_s - bucket.at_s) * allowance.per_s)


def spend(bucket: Bucket, allowance: Allowance, amount: float, now_s: float) -> Bucket:
    """Return the bucket after a purchase, whether or not there was enough for it."""
    return Bucket(left(bucket, allowance, now_s) - amount, now_s)


def wait_s(bucket: Bucket, allowance: Allowance, now_s: float, amount: float = 1.0) -> float:
    """Return the seconds until so much may be spent, at most a whole bucket; 0 when it may be now."""
    missing = min(amount, allowance.burst) - left(bucket, allowance, now_s)
    # A wait that no clock can measure would be asked for again and again.
    return missing / allowance.per_s if missing > ROUNDING else 0.0


def allowances(num_pods: int) -> dict[Budget, Allowance]:
    """Return what a job of so many pods may cost.

    All its pods may be made, made anew after a change of the template, and lost, in one go and with room to spare; then
    a twentieth of them each second, as far as one job may use up the API server. No sound job has more news than the
    others allow: each batch of new pods reserves its ordinals in the status.
    """
    pods = Allowance(burst=min(20 + 4 * num_pods, MAX_POD_BURST), per_s=min(max(0.2, num_pods / 20), MAX_PODS_PER_S))
    return {
        Budget.EVENTS: Allowance(burst=50, per_s=0.2),
        Budget.STATUS_WRITES: Allowance(burst=50 + 4 * num_pods // MAX_NEW_PODS, per_s=0.5),
        Budget.POD_CREATIONS: pods,
        Budget.POD_DELETIONS: pods,
    }
