"""Pure: two operators that lead the same job: one of them leaves it alone.

Each has a Lease of its own, so neither knows of the other: a release for one namespace beside one for all. Each writes
its Lease into the job's status, and sees the other's there afterwards. Of both the one goes on whose Lease comes first
in the alphabet; the other does nothing for STAND_BACK_S, then looks again.
"""

from typing import Any

from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.decisions.reporting.events import event
from unbroken_operator.decisions.snapshot import Snapshot


def stands_back(snapshot: Snapshot) -> bool:
    """Return whether this operator leaves the job to the other one."""
    rival = snapshot.memory.rival
    return bool(rival) and rival < snapshot.options.lease


def rival_event(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the Event that says so, whichever of both this one is; None without another one."""
    rival, own = snapshot.memory.rival, snapshot.options.lease
    if not rival:
        return None
    first, second = sorted((rival, own))
    message = (
        f"two operators lead this job: that of Lease {first} goes on, that of Lease {second} leaves it alone. Let only "
        "one release serve this namespace (values scope and namespaces)"
    )
    return event(snapshot, ("rival", first, second), Reason.LED_BY_ANOTHER.value, "Warning", message)
