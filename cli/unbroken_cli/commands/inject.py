"""`unbroken inject`: breaks a running job on purpose, to see it recover.

It has no rights but the user's own, and does nothing unless the user, or the owner of the job, has said so.
"""

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unbroken_cli.commands.framework import connect, find_job, make_parser, now, read_job_status, run
from unbroken_cli.errors import CommandError, refusal_hint
from unbroken_cli.injection import KINDS, FaultKind, Victim, check_consent, check_state, choose_victim, exec_arguments
from unbroken_cli.job import FaultSummary, JobRecord
from unbroken_cli.sources.from_cluster import job_from_objects
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.sources.processes import choose_pod, hit
from unbroken_cli.text import why_lines
from unbroken_core.vocabulary.errors import InputError

if TYPE_CHECKING:
    from unbroken_cli.sources.kube import ClusterClient

_EXEC_TIMEOUT_S = 60.0
_WITHOUT_EXEC = ", ".join(kind.name for kind in KINDS.values() if not kind.signal) + " work there"
_LOOK_S = 1.0
"""Between looks at a job that recovers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    kinds = "; ".join(f"{kind.name}: {kind.help}" for kind in KINDS.values())
    made = make_parser("inject", "Break a running job on purpose, to see it recover.")
    made.add_argument("--fault", required=True, choices=tuple(KINDS), metavar="KIND", help=kinds)
    made.add_argument("--pod", help="the pod to hit (the last active pod)")
    made.add_argument("--local-rank", type=int, default=0, metavar="N", help="which of its workers (%(default)s)")
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
    if arguments.url is not None:
        return _break_run(arguments, kind)
    cluster = connect(arguments)
    item = find_job(cluster, arguments)
    check_state(item)
    namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
    victim = choose_victim(kind, cluster.pods(namespace, name, kind.component), arguments.pod)
    target = f"worker {arguments.local_rank} of pod {victim.pod}" if kind.signal else f"pod {victim.pod}"
    check_consent(item, arguments.yes, f"hit {target} on node {victim.node or '?'} with {kind.name} ({kind.help})")
    before = job_from_objects(item)
    pid = _inject(cluster, arguments, namespace, kind, victim)
    value: dict[str, Any] = {"job": name, "namespace": namespace, "fault": kind.name, **_result(victim, arguments, pid)}
    lines = [f"{kind.name}: {target} on node {victim.node or '?'}" + f", process {pid}" * bool(pid)]
    if arguments.wait is None:
        return [*lines, f"  see: unbroken status {name} -n {namespace}"], value

    def look() -> JobRecord:
        return job_from_objects(cluster.job(namespace, name))

    job, fault = _wait_for_recovery(look, before, lines[0], arguments.wait)
    return [*lines, *why_lines(job, fault, now())], value | {"recovery": asdict(fault)}


def _break_run(arguments: argparse.Namespace, kind: FaultKind) -> tuple[list[str], Any]:
    """Break a job of `unbroken run` on this machine."""
    status = read_job_status(arguments)
    before = job_from_status(status)
    if not before.is_training:
        raise InputError(f"job {before.name}: must be Running, is {before.state}; `unbroken status` says why")
    pod = choose_pod(kind, status, arguments.pod)
    part = "the rendezvous" if pod is None else f"pod {pod.pod}"
    target = f"worker {arguments.local_rank} of {part}" if kind.signal else part
    if not arguments.yes:
        raise InputError(f"it would hit {target} with {kind.name} ({kind.help}); nothing was done. Add --yes")
    pid = hit(kind, arguments.url, pod, arguments.local_rank)
    lines = [f"{kind.name}: {target}, process {pid}"]
    value = {"job": before.name, "fault": kind.name, "pod": "" if pod is None else pod.pod, "pid": pid}
    if arguments.wait is None:
        return lines, value

    def look() -> JobRecord:
        return job_from_status(read_job_status(arguments))

    job, fault = _wait_for_recovery(look, before, lines[0], arguments.wait)
    return [*lines, *why_lines(job, fault, now())], value | {"recovery": asdict(fault)}


def _result(victim: Victim, arguments: argparse.Namespace, pid: int | None) -> dict[str, Any]:
    worker = {} if pid is None else {"localRank": arguments.local_rank, "pid": pid}
    return {"pod": victim.pod, "node": victim.node, **worker}


def _inject(
    cluster: "ClusterClient", arguments: argparse.Namespace, namespace: str, kind: FaultKind, victim: Victim
) -> int | None:
    """Return the process that was hit, None for a pod."""
    if not kind.signal:
        cluster.delete_pod(namespace, victim.pod, victim.uid, kind.grace_s)
        return None
    place = [f"--{key}={value}" for key in ("kubeconfig", "context") if (value := getattr(arguments, key)) is not None]
    return _kubectl([*place, "--namespace", namespace, *exec_arguments(kind, victim, arguments.local_rank)])


def _kubectl(arguments: Sequence[str]) -> int:
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
    if done.returncode or not done.stdout.strip().isdecimal():
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        hint = refusal_hint(said, "pods/exec", _WITHOUT_EXEC)
        raise CommandError(f"kubectl exec ended with {done.returncode}: {said}; {hint}")
    return int(done.stdout)


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
