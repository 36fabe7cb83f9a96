"""What the commands share: options, where the job is read, how it is printed, and exit codes."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken_cli.errors import CommandError, NotThere
from unbroken_cli.freshness import why_stale
from unbroken_cli.job import JobRecord
from unbroken_cli.sources.from_cluster import job_from_objects
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.sources.rendezvous import read_status
from unbroken_cli.text import paint
from unbroken_core.conventions.printable import printable
from unbroken_core.conventions.tls import server_name
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.errors import InputError

if TYPE_CHECKING:
    from unbroken_cli.sources.kube import ClusterClient

Show = Callable[[argparse.Namespace], tuple[list[str], Any]]
"""Returns the lines for people, and the value for programs."""


def run(parser: argparse.ArgumentParser, show: Show, argv: Sequence[str] | None) -> int:
    """Return the exit code: 0 shown, 1 not readable, 2 bad input."""
    arguments = parser.parse_args(argv)
    try:
        lines, value = show(arguments)
    except (InputError, CommandError) as error:
        complain(parser.prog, error)
        return 2 if isinstance(error, InputError) else 1
    lines = [printable(line) for line in lines]
    try:
        if arguments.output == "json":
            print(json.dumps(value, indent=2), flush=True)
        else:
            print("\n".join(paint(lines) if sys.stdout.isatty() and len(lines) > 1 else lines), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(parser.prog, f"cannot write what was found: {error.strerror}")
        return 1
    return 0


def complain(prog: str, error: object) -> None:
    """Print an error. It may say what a server, kubectl or a job has said."""
    print(printable(f"{prog}: {error}"), file=sys.stderr)


def make_parser(name: str, text: str, is_job_optional: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that all commands take."""
    parser = argparse.ArgumentParser(prog=f"unbroken {name}", description=text)
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="name of the job" + (" (all, if left out)" * is_job_optional)
    )
    places = parser.add_mutually_exclusive_group()
    places.add_argument("-n", "--namespace", help="namespace of the job (that of the kubeconfig's context)")
    places.add_argument("-A", "--all-namespaces", action="store_true", help="look in all namespaces")
    parser.add_argument("--kubeconfig", metavar="FILE", help="($KUBECONFIG, else ~/.kube/config)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    parser.add_argument("--url", help="ask the job's rendezvous here instead of the API server")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the job's token, for --url")
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="the job's authority (ca.crt of its Secret), for a --url of https",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    return parser


def now() -> datetime:
    """Return the wall clock, for people."""
    return datetime.now(timezone.utc)


def as_json(job: JobRecord) -> dict[str, Any]:
    """Return a job for programs."""
    return asdict(job)


def read_job(arguments: argparse.Namespace) -> JobRecord:
    """Read the job that the options name. Raises InputError and CommandError."""
    if arguments.url is not None:
        return job_from_status(read_job_status(arguments))
    cluster = connect(arguments)
    item = find_job(cluster, arguments)
    metadata = item["metadata"]
    try:
        events = cluster.events(metadata["namespace"], metadata["name"], metadata.get("uid", ""))
    except CommandError as error:
        # Without them only old details are missing.
        complain("unbroken", f"going on without Events: {error}")
        events = []
    return job_from_cluster(cluster, item, events)


def job_from_cluster(
    cluster: "ClusterClient", item: dict[str, Any], events: Sequence[dict[str, Any]] = ()
) -> JobRecord:
    """Return what an object says, and whether an operator still keeps it up to date."""
    return job_from_objects(item, events, _staleness(cluster, [item])[_lease_of(item)])


def _staleness(cluster: "ClusterClient", items: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return, by Lease, why nobody keeps the status of its jobs up to date; one call for each operator."""
    return {lease: _one_staleness(cluster, lease) for lease in {_lease_of(item) for item in items}}


def _one_staleness(cluster: "ClusterClient", lease: str) -> str:
    namespace, _, name = lease.partition("/")
    if not name:
        return ""
    try:
        return why_stale(lease, *cluster.lease(namespace, name))
    except NotThere:
        return why_stale(lease, None, "")
    except CommandError as error:
        complain("unbroken", f"cannot tell whether an operator is there, going on: {error}")
        return ""


def _lease_of(item: dict[str, Any]) -> str:
    return str((item.get("status") or {}).get("lease") or "")


def read_jobs(arguments: argparse.Namespace) -> list[JobRecord]:
    """Read all jobs of the namespace that the options name, or of all. Raises InputError and CommandError."""
    cluster = connect(arguments)
    namespace = None if arguments.all_namespaces else arguments.namespace or cluster.namespace
    items = cluster.jobs(namespace)
    if namespace is not None and not items:
        _check_namespace(cluster, namespace)
    stale = _staleness(cluster, items)
    return [job_from_objects(item, stale=stale[_lease_of(item)]) for item in items]


def _check_namespace(cluster: "ClusterClient", name: str) -> None:
    """Raise NotThere for a namespace that does not exist: a list of it is as empty as that of an idle one."""
    try:
        cluster.check_namespace(name)
    except NotThere as error:
        raise NotThere(f"{error}; see -n and -A") from error
    except CommandError:
        return  # Not everybody may ask.


def read_job_status(arguments: argparse.Namespace) -> JobStatus:
    """Ask the rendezvous that the options name. Raises InputError and CommandError."""
    if arguments.token_file is None:
        raise InputError("--url: needs --token-file, the file with the job's token")
    is_named = arguments.job is not None and arguments.namespace is not None
    # Who says both may use any address: that of the pod or the Service, or one that is forwarded.
    name = server_name(arguments.job, arguments.namespace) if is_named else ""
    status = read_status(arguments.url, arguments.token_file, arguments.ca_file, name)
    if arguments.job not in (None, status.job):
        raise InputError(f"JOB: the rendezvous {arguments.url} serves {status.job!r}, got {arguments.job!r}")
    return status


def connect(arguments: argparse.Namespace) -> "ClusterClient":
    """Return the API server that the options name. Raises InputError."""
    try:
        from unbroken_cli.sources.kube import ClusterClient  # noqa: PLC0415 - a job of `unbroken run` is shown without the package
    except ImportError as error:
        raise InputError(f"the package {error.name} is missing: pip install 'unbroken[cli]'") from error
    return ClusterClient.connect(arguments.kubeconfig, arguments.context)


def find_job(cluster: "ClusterClient", arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the object of the job that the options name. Raises InputError and CommandError."""
    name = arguments.job
    if name is None:
        raise InputError("JOB: is required; `unbroken status -A` lists them")
    if arguments.all_namespaces:
        return _only([item for item in cluster.jobs(None) if item["metadata"]["name"] == name], name)
    namespace = arguments.namespace or cluster.namespace
    try:
        return cluster.job(namespace, name)
    except NotThere as error:
        raise CommandError(f"{error}{_elsewhere(cluster, name, namespace)}") from error


def _only(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    if not found:
        raise CommandError(f"job {name!r}: no namespace has one; `unbroken status -A` lists all jobs")
    if len(found) > 1:
        names = ", ".join(sorted(item["metadata"]["namespace"] for item in found))
        raise InputError(f"job {name!r}: it is in several namespaces ({names}); choose one with -n")
    return found[0]


def _elsewhere(cluster: "ClusterClient", name: str, namespace: str) -> str:
    """Return a hint: the namespaces with such a job, or the jobs of this one, as far as the user may list them."""
    try:
        others = [item["metadata"]["namespace"] for item in cluster.jobs(None) if item["metadata"]["name"] == name]
        if others:
            return f"; namespace {', '.join(sorted(others))} has one, see -n"
    except CommandError:
        pass
    try:
        here = sorted(item["metadata"]["name"] for item in cluster.jobs(namespace))
        if not here:
            cluster.check_namespace(namespace)
    except NotThere:
        return "; there is no such namespace; see -n and -A"
    except CommandError:
        return ""
    return f"; jobs there: {', '.join(here[:10])}" if here else "; there are no jobs; see -n and -A"
