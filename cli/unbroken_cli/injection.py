"""Pure: the faults that `unbroken inject` can cause, which pod one hits, and how."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken_core.vocabulary.errors import InputError

JsonObject = Mapping[str, Any]
ANNOTATION = "unbroken.dev/allow-faults"
"""On a job, with the value "true": it may be broken without --yes."""
_ROLE_LABEL = "unbroken.dev/role"


@dataclass(frozen=True)
class FaultKind:
    """One way to break a job."""

    name: str
    help: str
    signal: int = 0
    """Sent to one worker; 0 for a fault of a whole pod."""
    grace_s: int | None = None
    """Of a fault of a pod: seconds that it has to end in; None as the pod says."""
    component: str = "trainer"


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "SIGKILL to a worker, as the kernel does when memory runs out", signal.SIGKILL),
        FaultKind("crash", "SIGSEGV to a worker, as a bug in native code", signal.SIGSEGV),
        FaultKind("hang", "SIGSTOP to a worker: it makes no progress and does not answer", signal.SIGSTOP),
        FaultKind("delete-pod", "delete an active pod, as a drain does: it has its grace period"),
        FaultKind("lose-pod", "delete an active pod without a grace period", grace_s=0),
        FaultKind("lose-rendezvous", "delete the rendezvous pod: the training goes on", component="rendezvous"),
    )
}


@dataclass(frozen=True)
class Victim:
    """Whom a fault hits. Also a part of the shape of `-o json`."""

    pod: str
    uid: str
    node: str
    container: str
    python: str
    """Interpreter in that container."""


SCRIPT = """
import os, sys
number, rank = int(sys.argv[1]), sys.argv[2]
own = os.environ.get("UNBROKEN_POD_UID")
found, ranks = {}, set()
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            parts = file.read().decode(errors="replace").split("\\0")
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        continue
    pairs = dict(part.split("=", 1) for part in parts if "=" in part)
    if "UNBROKEN_LOCAL_RANK" in pairs and pairs.get("UNBROKEN_POD_UID") == own and state != "Z":
        ranks.add(pairs["UNBROKEN_LOCAL_RANK"])
        if pairs["UNBROKEN_LOCAL_RANK"] == rank:
            found[pid] = parent, int(pairs.get("UNBROKEN_INCARNATION", 0))
# What a worker has started itself, such as loaders of data, inherits its environment.
workers = sorted((number_of[1], int(pid)) for pid, number_of in found.items() if number_of[0] not in found)
if not workers:
    sys.exit(f"no worker with local rank {rank} runs; those that run have {sorted(ranks) or 'none'}")
os.kill(workers[-1][1], number)
print(workers[-1][1])
"""
"""Run in the trainer's container with a signal and a local rank: sends it to that worker and prints its pid."""


def choose_victim(kind: FaultKind, pods: Sequence[JsonObject], wanted: str | None) -> Victim:
    """Return the pod that was named, or the last one that fits. Raises InputError when there is none."""
    fitting = [pod for pod in pods if _is_running(pod) and (kind.component != "trainer" or _role(pod) == "active")]
    if wanted is not None:
        # A spare may be broken as well, when it is meant.
        fitting = [pod for pod in pods if pod["metadata"]["name"] == wanted and _is_running(pod)]
    if not fitting:
        names = ", ".join(sorted(f"{pod['metadata']['name']} ({_describe(pod)})" for pod in pods)) or "none"
        target = "an active trainer pod" if kind.component == "trainer" else f"a {kind.component} pod"
        what = f"{target} that runs" if wanted is None else f"pod {wanted!r} to run"
        raise InputError(f"--fault {kind.name}: needs {what}; found {names}")
    pod = max(fitting, key=_ordinal)
    container = pod["spec"]["containers"][0]
    return Victim(
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        node=pod["spec"].get("nodeName") or "",
        container=container["name"],
        # The operator puts `<python> -m unbroken.launch` before the user's command.
        python=next(iter(container.get("command") or ()), "python3"),
    )


def exec_arguments(kind: FaultKind, victim: Victim, local_rank: int) -> list[str]:
    """Return what kubectl is asked to do for a fault of a worker, but for which cluster and namespace."""
    script = [victim.python, "-c", SCRIPT, str(int(kind.signal)), str(local_rank)]
    return ["exec", victim.pod, "--container", victim.container, "--", *script]


def check_consent(item: JsonObject, is_meant: bool, would: str) -> None:
    """Raise InputError unless the user means it, or the job's owner lets everybody do it."""
    metadata = item["metadata"]
    if is_meant or (metadata.get("annotations") or {}).get(ANNOTATION) == "true":
        return
    allow = f"kubectl -n {metadata.get('namespace')} annotate rtj {metadata['name']} {ANNOTATION}=true"
    raise InputError(f"it would {would}; nothing was done. Add --yes, or let everybody break this job ({allow})")


def check_state(item: JsonObject) -> None:
    """Raise InputError unless the job trains: a fault on top of another teaches nothing."""
    state = (item.get("status") or {}).get("state") or "none"
    if state != "Running":
        raise InputError(f"job {item['metadata']['name']}: must be Running, is {state}; `unbroken status` says why")


def _is_running(pod: JsonObject) -> bool:
    return _describe(pod).endswith("Running")


def _role(pod: JsonObject) -> str:
    return str((pod["metadata"].get("labels") or {}).get(_ROLE_LABEL, ""))


def _describe(pod: JsonObject) -> str:
    phase = (pod.get("status") or {}).get("phase") or "Pending"
    return f"{_role(pod)} {'ending' if pod['metadata'].get('deletionTimestamp') else phase}".strip()


def _ordinal(pod: JsonObject) -> int:
    tail = str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
