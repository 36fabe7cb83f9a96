"""Pure: which jobs may replace a rendezvous that works, because its settings are others. The time is an argument.

A release that turns specs into other settings changes those of many jobs at once. Their pods would all be pulled,
scheduled and started in the same seconds, and while a job has no rendezvous a fault waits.
"""

MAX_AT_ONCE = 8
MAX_S = 60.0
"""A place is free again after this, should a new rendezvous not come up: it must not hold up all others."""
RETRY_S = 2.0
"""A job without a place asks again after this."""


class Rollouts:
    """Places of all jobs; monotonic seconds of this process."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        """When a job got its place, by its uid."""

    def take(self, uid: str, now_s: float) -> bool:
        """Take a place, or keep the one that the job has; return whether it has one."""
        self._since_s = {other: since_s for other, since_s in self._since_s.items() if now_s - since_s < MAX_S}
        if uid not in self._since_s and len(self._since_s) >= MAX_AT_ONCE:
            return False
        self._since_s.setdefault(uid, now_s)
        return True

    def give_back(self, uid: str) -> None:
        """Free the place of a job whose rendezvous is as it should be, or that is gone."""
        self._since_s.pop(uid, None)
