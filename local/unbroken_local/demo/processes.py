"""Worker processes of the job on this machine, found by the environment that the launcher gave them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def find_worker(environments: Mapping[int, Mapping[str, str]], pod: str, local_rank: int) -> int | None:
    """Return the pid of a pod's worker, the newest incarnation when there are several; None when there is none.

    `environments` is by pid. What a worker started itself has its environment too, so the lowest pid counts.
    """
    found = [
        (-int(variables.get("UNBROKEN_INCARNATION", "0")), pid)
        for pid, variables in environments.items()
        if variables.get("UNBROKEN_POD") == pod and variables.get("UNBROKEN_LOCAL_RANK") == str(local_rank)
    ]
    return min(found)[1] if found else None


def read_environments(pids: Iterable[int] | None = None) -> dict[int, dict[str, str]]:
    """Return the environment of each process that this user may look into."""
    if pids is None:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found: dict[int, dict[str, str]] = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # It has ended, or is another user's.
            continue
        pairs = (os.fsdecode(item).partition("=") for item in text.split(b"\0") if item)
        found[pid] = {name: value for name, _, value in pairs}
    return found
