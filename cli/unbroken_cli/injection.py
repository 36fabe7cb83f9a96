"""Pure: the faults that `unbroken inject` can cause, which pods one hits, and how."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken_core.pod.fault_orders import POD, WORKER, FaultOrder, check_order, write_order
from unbroken_core.protocol.messages import PodStatus
from unbroken_core.vocabulary.errors import InputError

JsonObject = Mapping[str, Any]
ANNOTATION = "unbroken.dev/allow-faults"
"""On a job, with the value "true": it may be broken without --yes."""
_ROLE_LABEL = "unbroken.dev/role"
_TOPOLOGY_ANNOTATION = "unbroken.dev/topology"
_USUAL_XID = 79
"""The GPU has fallen off the bus."""
_NEEDED = {"check": ("check",), "disk-full": ("path", "max_bytes")}
"""Fields of an order without a usual value."""
SHARED = ("oom", "partition")
"""Kinds that would hit more than the job where pods share a machine, as those of `unbroken run` do."""


@dataclass(frozen=True)
class FaultKind:
    """One way to break a job."""

    name: str
    help: str
    signal: int = 0
    """Sent to one worker; 0 for others."""
    grace_s: int | None = None
    """Of a fault of a pod: seconds that it has to end in; None as the pod says."""
    component: str = "trainer"

    @property
    def is_order(self) -> bool:
        """Whether the pod makes it itself, if it allows faults (unbroken_core.pod.fault_orders)."""
        return self.name in WORKER or self.name in POD

    @property
    def is_of_worker(self) -> bool:
        """Whether it hits one worker."""
        return bool(self.signal) or self.name in WORKER

    @property
    def takes(self) -> tuple[str, ...]:
        """Fields of an order that it reads."""
        return {**WORKER, **POD}.get(self.name, ())


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "SIGKILL to a worker, as the kernel does when memory runs out", signal.SIGKILL),
        FaultKind("crash", "SIGSEGV to a worker, as a bug in native code", signal.SIGSEGV),
        FaultKind("hang", "SIGSTOP to a worker: it makes no progress and does not answer", signal.SIGSTOP),
        FaultKind("delete-pod", "delete an active pod, as a drain does: it has its grace period"),
        FaultKind("lose-pod", "delete an active pod without a grace period", grace_s=0),
        FaultKind("lose-rendezvous", "delete the rendezvous pod: the training goes on", component="rendezvous"),
        FaultKind("exception", "an exception in the training function of a worker"),
        FaultKind("exit", "a worker ends itself with --code (1)"),
        FaultKind("hang-gil", "a worker keeps the GIL for --seconds: none of its threads runs"),
        FaultKind("slow", "each step of a worker takes --milliseconds, or --factor times as long, for --seconds"),
        FaultKind("mismatch", "a worker calls another collective than the others"),
        FaultKind("oom", "a worker takes memory until the kernel ends it, for --seconds at most"),
        FaultKind("xid", "the pod's watch finds an XID of a GPU, --code (79), for --seconds; nothing is broken"),
        FaultKind("link-down", "the pod's watch finds a network link that is down, for --seconds; nothing is broken"),
        FaultKind("disk-full", "the file system of --path is full for --seconds, if --max-bytes are enough for that"),
        FaultKind("partition", "nothing leaves the pod for --seconds; needs CAP_NET_ADMIN in its container"),
        FaultKind("check", "the pod's watch finds that --check fails with --verdict (suspect), for --seconds"),
    )
}


@dataclass(frozen=True)
class Selection:
    """Whom a user wants to hit; at most one of the first three."""

    pod: str | None = None
    node: str | None = None
    domain: str | None = None
    local_rank: int = 0

    @property
    def words(self) -> str:
        """What was asked for, for people."""
        named = {"pod": self.pod, "node": self.node, "domain": self.domain}
        return ", ".join(f"{name} {value!r}" for name, value in named.items() if value is not None)

    @property
    def is_of_many(self) -> bool:
        """Whether all pods in a place are meant."""
        return self.node is not None or self.domain is not None


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


def choose_victims(kind: FaultKind, pods: Sequence[JsonObject], wanted: Selection) -> list[Victim]:
    """Return the pod that was named, all in the place that was, or the last one that fits.

    Raises InputError when there is none.
    """
    running = [pod for pod in pods if _is_running(pod)]
    active = [pod for pod in running if kind.component != "trainer" or _role(pod) == "active"]
    if wanted.pod is not None:
        # A spare may be broken as well, when it is meant.
        fitting = [pod for pod in running if pod["metadata"]["name"] == wanted.pod]
    elif wanted.is_of_many:
        # What breaks a node or a rack breaks the spares there, too; a spare has no training function.
        fitting = [pod for pod in (active if kind.is_of_worker else running) if _stands(pod, wanted)]
    else:
        fitting = sorted(active, key=_ordinal)[-1:]
    if not fitting:
        names = ", ".join(sorted(f"{pod['metadata']['name']} ({_describe(pod)})" for pod in pods)) or "none"
        target = "an active trainer pod" if kind.component == "trainer" else f"a {kind.component} pod"
        what = f"{target} that runs"
        if wanted.words:
            what = f"{wanted.words} to run" if wanted.pod is not None else f"{what} in {wanted.words}"
        raise InputError(f"--fault {kind.name}: needs {what}; found {names}")
    return [_victim(kind, pod) for pod in sorted(fitting, key=_ordinal)]


def choose_victim(kind: FaultKind, pods: Sequence[JsonObject], wanted: str | None) -> Victim:
    """Return the pod that was named, or the last one that fits. Raises InputError when there is none."""
    return choose_victims(kind, pods, Selection(pod=wanted))[0]


def _stands(pod: JsonObject, wanted: Selection) -> bool:
    if wanted.node is not None:
        return bool((pod["spec"].get("nodeName") or "") == wanted.node)
    try:
        domains = json.loads((pod["metadata"].get("annotations") or {}).get(_TOPOLOGY_ANNOTATION, ""))
    except ValueError:
        return False
    return isinstance(domains, dict) and wanted.domain in domains.values()


def _victim(kind: FaultKind, pod: JsonObject) -> Victim:
    container = pod["spec"]["containers"][0]
    if kind.name == "partition" and pod["spec"].get("hostNetwork"):
        name = pod["metadata"]["name"]
        raise InputError(f"--fault partition: pod {name} has the network of its node; nothing was done")
    return Victim(
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        node=pod["spec"].get("nodeName") or "",
        container=container["name"],
        # The operator puts `<python> -m unbroken.launch` before the user's command.
        python=next(iter(container.get("command") or ()), "python3"),
    )


def choose_running(kind: FaultKind, pods: Sequence[PodStatus], wanted: Selection) -> list[PodStatus]:
    """Return the pods of a run that are to be hit, as `choose_victims`. Raises InputError when there is none."""
    there = [pod for pod in pods if pod.is_connected]
    with_ranks = [pod for pod in there if pod.ranks]
    if wanted.pod is not None:
        fitting = [pod for pod in there if pod.pod == wanted.pod]
    elif wanted.is_of_many:
        fitting = [
            pod
            for pod in (with_ranks if kind.is_of_worker else there)
            if (pod.node == wanted.node if wanted.node is not None else wanted.domain in pod.domains)
        ]
    else:
        fitting = sorted(with_ranks, key=lambda pod: max(pod.ranks))[-1:]
    if not fitting:
        names = ", ".join(sorted(pod.pod for pod in pods)[:20]) or "none"
        what = "a pod with ranks" if not wanted.words else wanted.words
        if wanted.domain is not None:
            found = sorted({domain for pod in pods for domain in pod.domains})
            names += f" in domains {', '.join(found[:20]) or 'that nobody knows'}"
        raise InputError(f"--fault {kind.name}: needs {what} that is connected; the job has {names}")
    return fitting


def find_rank(rank: int, pods: Sequence[PodStatus]) -> Selection:
    """Return the pod and the worker that has an active rank. Raises InputError when nobody has, or nobody knows who."""
    for pod in pods:
        if rank in pod.ranks:
            if len(pod.ranks) != len(pod.workers):
                raise InputError(
                    f"--rank {rank}: pod {pod.pod} has {len(pod.ranks)} ranks on {len(pod.workers)} workers, so that "
                    "nobody knows which; choose one with --pod and --local-rank"
                )
            return Selection(pod=pod.pod, local_rank=pod.ranks.index(rank))
    known = sorted(each for pod in pods for each in pod.ranks)
    raise InputError(f"--rank {rank}: want one of {f'0 to {known[-1]}' if known else 'none: no pod has ranks'}")


def make_order(kind: FaultKind, identity: str, rank: int | None, given: Mapping[str, Any]) -> FaultOrder | None:
    """Return the order for a pod; None for a fault that needs none. Raises InputError for what `kind` does not take."""
    for name, value in given.items():
        if value is not None and name not in kind.takes:
            takes = ", ".join(f"--{each.replace('_', '-')}" for each in kind.takes) or "nothing more"
            raise InputError(f"--{name.replace('_', '-')}: --fault {kind.name} takes {takes}")
    if not kind.is_order:
        return None
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED.get(kind.name, ()) if given.get(name) is None]
    if missing:
        raise InputError(f"--fault {kind.name}: needs {' and '.join(missing)}")
    order = FaultOrder(id=identity, kind=kind.name, rank=rank, code=_USUAL_XID if kind.name == "xid" else 1)
    order = replace(order, **{name: value for name, value in given.items() if value is not None})
    try:
        check_order(order)
    except InputError as error:
        raise InputError(f"--fault {kind.name}: {error}") from error
    return order


def exec_arguments(kind: FaultKind, victim: Victim, local_rank: int, order: FaultOrder | None = None) -> list[str]:
    """Return what kubectl is asked to do for a fault within a pod, but for which cluster and namespace."""
    if order is not None:
        module = [victim.python, "-m", "unbroken.faults", write_order(order), str(local_rank)]
        return ["exec", victim.pod, "--container", victim.container, "--", *module]
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
