"""Pure: which jobs may replace a rendezvous that works, because its settings are others. The time is an argument.

A release that turns specs into other settings changes those of many jobs at once. Their pods would all be pulled,
scheduled and started in the same seconds, and while a job has no rendezvous a fault waits.

A place that gets free goes to the namespace that has the fewest, and there to who has waited longest. The first place
of a namespace comes from a reserve, so that nobody waits for the jobs of one tenant, who can edit all of his for ever.
"""

from collections import Counter
from dataclasses import dataclass

MAX_AT_ONCE = 8
NUM_RESERVED = 8
"""Places beside these, for namespaces that have none."""
MAX_S = 60.0
"""A place is free again after this, should a new rendezvous not come up: it must not hold up all others."""
RETRY_S = 2.0
"""A job without a place asks again after this."""
FORGOTTEN_S = 3 * RETRY_S
"""A job that has not asked for so long waits no more."""


@dataclass(frozen=True)
class _Waiting:
    namespace: str
    since_s: float
    asked_s: float


class Rollouts:
    """Places of all jobs; monotonic seconds of this process."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, float]] = {}
        """Namespace of a job, and when it got its place, by its uid."""
        self._waiting: dict[str, _Waiting] = {}
        """By uid."""

    def take(self, namespace: str, uid: str, now_s: float) -> bool:
        """Take a place, or keep the one that the job has; return whether it has one."""
        self._places = {other: place for other, place in self._places.items() if now_s - place[1] < MAX_S}
        if uid in self._places:
            return True
        since_s = self._waiting[uid].since_s if uid in self._waiting else now_s
        self._waiting[uid] = _Waiting(namespace, since_s, now_s)
        if not self._may_take(uid, now_s):
            return False
        del self._waiting[uid]
        self._places[uid] = (namespace, now_s)
        return True

    def give_back(self, uid: str) -> None:
        """Free the place of a job whose rendezvous is as it should be, or that is gone."""
        self._places.pop(uid, None)
        self._waiting.pop(uid, None)

    def _may_take(self, uid: str, now_s: float) -> bool:
        held = Counter(namespace for namespace, _ in self._places.values())
        num_free = MAX_AT_ONCE - len(self._places)
        if num_free <= 0 and not held[self._waiting[uid].namespace]:
            return num_free + NUM_RESERVED > 0
        if num_free <= 0:
            return False
        self._waiting = {other: item for other, item in self._waiting.items() if now_s - item.asked_s < FORGOTTEN_S}
        # Whoever comes first of those that wait; the places that they would get count as theirs.
        queue = sorted(self._waiting, key=lambda one: self._waiting[one].since_s)
        for _ in range(min(num_free, len(queue))):
            turn = min(queue, key=lambda one: held[self._waiting[one].namespace])
            if turn == uid:
                return True
            held[self._waiting[turn].namespace] += 1
            queue.remove(turn)
        return False
