"""Pods that have just come and whose domains nobody has told yet: for a moment they get no ranks.

The operator tells of a pod soon after its agent has joined. Until then the pod would count as in the unknown domain,
and could be one too many in the one that it is in.
"""

from collections.abc import Set

from unbroken_core.coordination.state import Job


def newcomers(job: Job, now_s: float) -> dict[str, Set[int]]:
    """Return local ranks by uid of those that are ready and get no ranks before timeouts.last_call since they came."""
    census, wait_s = job.census, job.settings.timeouts.last_call_s
    found: dict[str, Set[int]] = {}
    for uid in list(census.homeless):
        member = census.by_uid[uid]
        due_s = member.joined_at_s + wait_s
        if member.ranks or now_s >= due_s:
            member.is_anywhere = True
            del census.homeless[uid]
        else:
            found[uid] = member.places.keys()
            job.wake(due_s)
    return found
