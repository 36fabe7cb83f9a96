"""Worker processes of the job on this machine, found by the environment that the launcher gave them."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process of this machine."""

    parent: int
    environment: Mapping[str, str]


def find_worker(processes: Mapping[int, Process], pod_uid: str, local_rank: int) -> int | None:
    """Return the pid of a pod's worker, the newest incarnation when there are several; None when there is none.

    By uid: pods of one name run on one machine whenever two clusters do. What a worker started itself has its
    environment, too, and is passed over.
    """
    found = {
        pid: int(process.environment.get("UNBROKEN_INCARNATION", "0"))
        for pid, process in processes.items()
        if process.environment.get("UNBROKEN_POD_UID") == pod_uid
        and process.environment.get("UNBROKEN_LOCAL_RANK") == str(local_rank)
    }
    workers = [pid for pid in found if processes[pid].parent not in found]
    return max(workers, key=found.__getitem__, default=None)


def read_processes(pids: Iterable[int] | None = None) -> dict[int, Process]:
    """Return the processes that this user may look into, all of the machine or those in `pids`."""
    if pids is None:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found: dict[int, Process] = {}
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:  # It has ended, or is another user's.
            continue
        pairs = (os.fsdecode(item).partition("=") for item in environment.split(b"\0") if item)
        # The name in parentheses may hold anything; state and parent follow it.
        parent = int(stat.rpartition(")")[2].split()[1])
        found[pid] = Process(parent, {name: value for name, _, value in pairs})
    return found
