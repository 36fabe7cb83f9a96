"""`unbroken inject`: breaks a running job on purpose, to see it recover.

It has no rights but the user's own, and does nothing unless the user, or the owner of the job, has said so.
"""

import argparse
import contextlib
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unbroken_cli.commands.framework import connect, find_job, make_parser, now, read_job_status, run
from unbroken_cli.commands.reaching import kubectl_place, read_cluster_status
from unbroken_cli.errors import CommandError, refusal_hint
from unbroken_cli.injection import (
    KINDS,
    SHARED,
    FaultKind,
    Selection,
    Victim,
    check_consent,
    check_state,
    choose_running,
    choose_victims,
    exec_arguments,
    find_rank,
    make_order,
)
from unbroken_cli.job import FaultSummary, JobRecord
from unbroken_cli.sources.from_cluster import job_from_objects
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.sources.processes import hit, order_in
from unbroken_cli.text import why_lines
from unbroken_core.pod.fault_orders import MAX_SECONDS, USUAL_SECONDS, VERDICTS, FaultOrder
from unbroken_core.protocol.messages import PodStatus
from unbroken_core.vocabulary.errors import InputError

if TYPE_CHECKING:
    from unbroken_cli.sources.kube import ClusterClient

_EXEC_TIMEOUT_S = 60.0
_WITHOUT_EXEC = "delete-pod, lose-pod and lose-rendezvous work there"
_LOOK_S = 1.0
"""Between looks at a job that recovers."""
_NUMBERS = ("code", "seconds", "milliseconds", "factor", "check", "verdict", "path", "max_bytes")
"""Options that are fields of an order."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    kinds = "; ".join(f"{kind.name}: {kind.help}" for kind in KINDS.values())
    made = make_parser("inject", "Break a running job on purpose, to see it recover.")
    made.add_argument("--fault", required=True, choices=tuple(KINDS), metavar="KIND", help=kinds)
    whom = made.add_mutually_exclusive_group()
    whom.add_argument("--rank", type=int, metavar="N", help="the worker with this active rank, or its pod")
    whom.add_argument("--pod", help="the pod to hit (the last active pod)")
    whom.add_argument("--node", help="all pods of the job on this node")
    whom.add_argument("--domain", help="all pods of the job in this domain of any layer, such as a rack")
    made.add_argument("--local-rank", type=int, metavar="N", help="which of a pod's workers (0)")
    made.add_argument("--code", type=int, metavar="N", help="exit code (1), or number of an XID (79)")
    made.add_argument(
        "--seconds", type=float, metavar="S", help=f"how long it lasts, at most {MAX_SECONDS:g} ({USUAL_SECONDS:g})"
    )
    made.add_argument("--milliseconds", type=float, metavar="MS", help="of slow: longer for each step, at most 60000")
    made.add_argument("--factor", type=float, metavar="X", help="of slow: times the step, 1.01 to 100")
    made.add_argument("--check", metavar="NAME", help="of check: whose finding it is")
    made.add_argument("--verdict", choices=VERDICTS, help="of check: what it says (suspect)")
    made.add_argument("--path", metavar="DIR", help="of disk-full: a folder of a volume, as the container has it")
    made.add_argument("--max-bytes", type=int, metavar="N", help="of disk-full: the most that may be written")
    made.add_argument("--yes", action="store_true", help="do it, also to a job that is not annotated for it")
    made.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="wait this long for the recovery, and show it; exit code 1 if there is none",
    )
    return made


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    kind = KINDS[arguments.fault]
    if arguments.wait is not None and kind.component != "trainer":
        raise InputError(f"--wait: {kind.name} interrupts nothing that would recover")
    if arguments.local_rank is not None and not kind.is_of_worker:
        raise InputError(f"--local-rank: {kind.name} hits no single worker")
    order = _order(kind, arguments)
    if arguments.url is not None:
        return _break_run(arguments, kind, order)
    cluster = connect(arguments)
    item = find_job(cluster, arguments)
    check_state(item)
    namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
    wanted = _selection(arguments, lambda: read_cluster_status(cluster, arguments, namespace, name).pods)
    victims = choose_victims(kind, cluster.pods(namespace, name, kind.component), wanted)
    targets = [f"{_part(kind, wanted, victim.pod)} on node {victim.node or '?'}" for victim in victims]
    check_consent(item, arguments.yes, f"hit {', '.join(targets)} with {kind.name} ({kind.help})")
    before = job_from_objects(item)
    lines: list[str] = []
    hits: list[dict[str, Any]] = []
    for victim, target in zip(victims, targets, strict=True):
        with _after(lines):
            found = _inject(
                cluster, arguments, namespace, kind=kind, victim=victim, local_rank=wanted.local_rank, order=order
            )
        lines.append(_line(kind, target, found))
        hits.append({"pod": victim.pod, "node": victim.node, **_details(kind, wanted, found)})
    value: dict[str, Any] = {"job": name, "namespace": namespace, "fault": kind.name, **hits[0], "hits": hits}
    if arguments.wait is None:
        return [*lines, f"  see: unbroken status {name} -n {namespace}"], value

    def look() -> JobRecord:
        return job_from_objects(cluster.job(namespace, name))

    job, fault = _wait_for_recovery(look, before, "; ".join(lines), arguments.wait)
    return [*lines, *why_lines(job, fault, now())], value | {"recovery": asdict(fault)}


def _break_run(arguments: argparse.Namespace, kind: FaultKind, order: FaultOrder | None) -> tuple[list[str], Any]:
    """Break a job of `unbroken run` on this machine."""
    status = read_job_status(arguments)
    before = job_from_status(status)
    if not before.is_training:
        raise InputError(f"job {before.name}: must be Running, is {before.state}; `unbroken status` says why")
    if kind.name in SHARED:
        raise InputError(f"--fault {kind.name}: pods of `unbroken run` share this machine, which it would hit as well")
    wanted = _selection(arguments, lambda: status.pods)
    pods: Sequence[PodStatus | None] = [None]
    if kind.component == "trainer":
        pods = choose_running(kind, status.pods, wanted)
    targets = ["the rendezvous" if pod is None else _part(kind, wanted, pod.pod) for pod in pods]
    if not arguments.yes:
        raise InputError(
            f"it would hit {', '.join(targets)} with {kind.name} ({kind.help}); nothing was done. Add --yes"
        )
    lines: list[str] = []
    hits: list[dict[str, Any]] = []
    for pod, target in zip(pods, targets, strict=True):
        with _after(lines):
            found: int | str
            if order is not None and pod is not None:
                found = order_in(arguments.url, pod, wanted.local_rank, order)
            else:
                found = hit(kind, arguments.url, pod, wanted.local_rank)
        lines.append(_line(kind, target, found))
        hits.append({"pod": "" if pod is None else pod.pod, **_details(kind, wanted, found)})
    value: dict[str, Any] = {"job": before.name, "fault": kind.name, **hits[0], "hits": hits}
    if arguments.wait is None:
        return lines, value

    def look() -> JobRecord:
        return job_from_status(read_job_status(arguments))

    job, fault = _wait_for_recovery(look, before, "; ".join(lines), arguments.wait)
    return [*lines, *why_lines(job, fault, now())], value | {"recovery": asdict(fault)}


def _order(kind: FaultKind, arguments: argparse.Namespace) -> FaultOrder | None:
    given = {name: getattr(arguments, name, None) for name in _NUMBERS}
    return make_order(kind, secrets.token_hex(8), arguments.rank if kind.is_of_worker else None, given)


def _selection(arguments: argparse.Namespace, read_pods: Callable[[], Sequence[PodStatus]]) -> Selection:
    if arguments.rank is None:
        return Selection(arguments.pod, arguments.node, arguments.domain, arguments.local_rank or 0)
    if arguments.local_rank is not None:
        raise InputError("--local-rank: --rank names the worker already")
    return find_rank(arguments.rank, read_pods())


def _part(kind: FaultKind, wanted: Selection, pod: str) -> str:
    return f"worker {wanted.local_rank} of pod {pod}" if kind.is_of_worker else f"pod {pod}"


def _line(kind: FaultKind, target: str, found: int | str | None) -> str:
    said = f", process {found}" if isinstance(found, int) else f": {found}" if found else ""
    return f"{kind.name}: {target}{said}"


def _details(kind: FaultKind, wanted: Selection, found: int | str | None) -> dict[str, Any]:
    worker = {"localRank": wanted.local_rank} if kind.is_of_worker else {}
    return worker | ({"pid": found} if isinstance(found, int) else {"said": found} if found else {})


@contextlib.contextmanager
def _after(lines: Sequence[str]) -> Iterator[None]:
    """Let an error say whom it came after: the fault of those has happened."""
    try:
        yield
    except (InputError, CommandError) as error:
        if not lines:
            raise
        raise CommandError(f"{'; '.join(lines)}; then {error}") from error


def _inject(
    cluster: "ClusterClient",
    arguments: argparse.Namespace,
    namespace: str,
    *,
    kind: FaultKind,
    victim: Victim,
    local_rank: int,
    order: FaultOrder | None,
) -> int | str | None:
    """Return the process that was hit, or what the pod says; None for a pod that was deleted."""
    if not kind.signal and order is None:
        cluster.delete_pod(namespace, victim.pod, victim.uid, kind.grace_s)
        return None
    place = [*kubectl_place(arguments), "--namespace", namespace]
    said = _kubectl([*place, *exec_arguments(kind, victim, local_rank, order)])
    if order is not None:
        return said
    if not said.isdecimal():
        raise CommandError(f"kubectl exec: want the process that was hit, got {said[:200]!r}")
    return int(said)


def _kubectl(arguments: Sequence[str]) -> str:
    program = shutil.which("kubectl")
    if program is None:
        raise InputError(
            "kubectl: not found in PATH, and needed to reach into a pod; faults of whole pods do not need it"
        )
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_EXEC_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"kubectl exec did not end in {_EXEC_TIMEOUT_S:.0f} s; the fault may have happened"
        ) from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        refused = said.partition("unbroken.faults: ")[2]
        if refused:
            raise CommandError(refused)
        if "No module named unbroken" in said:
            raise CommandError("this pod's release of Unbroken knows no such fault; nothing was done")
        hint = refusal_hint(said, "pods/exec", _WITHOUT_EXEC)
        raise CommandError(f"kubectl exec ended with {done.returncode}: {said}; {hint}")
    return done.stdout.strip()


def _wait_for_recovery(
    look: Callable[[], JobRecord], before: JobRecord, hit: str, limit_s: float
) -> tuple[JobRecord, FaultSummary]:
    """Return the first recovery that was not there before, as soon as it is over. Raises CommandError, with `hit`."""
    known = {fault.started_at for fault in before.faults}
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            job = look()
        except InputError as error:
            # What was there a moment ago: a run removes its token when it ends.
            raise CommandError(f"{hit}; then the job ended, or is another one by now: {error}") from error
        except CommandError as error:
            # It may be away for a moment, as all that the fault has hit.
            if time.monotonic() >= deadline_s:
                raise CommandError(f"{hit}; whether the job recovered is not known: {error}") from error
        else:
            for fault in job.faults:
                if fault.started_at not in known and fault.is_recovered:
                    return job, fault
            if job.state in ("Failed", "Complete") or time.monotonic() >= deadline_s:
                why = f"no recovery{'' if job.state in ('Failed', 'Complete') else f' within {limit_s:g} s'}"
                raise CommandError(f"{hit}; {job.title}: {why}, state {job.state}: {job.message}")
        time.sleep(_LOOK_S)
