"""A job's rendezvous in the cluster, reached with the user's own rights: its Secret, and kubectl's port-forward."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy.upstream import API_PORT, ClusterRendezvous, PortForward
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.errors import WireError

if TYPE_CHECKING:
    from unbroken_cli.sources.kube import ClusterClient


def kubectl_place(arguments: argparse.Namespace) -> list[str]:
    """Return the options that tell kubectl the cluster."""
    return [f"--{key}={value}" for key in ("kubeconfig", "context") if (value := getattr(arguments, key)) is not None]


@contextmanager
def reach_rendezvous(
    cluster: "ClusterClient", arguments: argparse.Namespace, namespace: str, job: str
) -> Iterator[ClusterRendezvous]:
    """Yield the rendezvous of a job. Raises InputError without kubectl, CommandError where it does not answer."""
    name = f"{job}-rendezvous"
    place = [*kubectl_place(arguments), "--namespace", namespace]
    forward = [*place, "port-forward", "--address", "127.0.0.1", f"service/{name}", f":{API_PORT}"]
    inside = ClusterRendezvous(lambda: cluster.secret(namespace, name), PortForward(forward))
    try:
        yield inside
    finally:
        inside.close()


def read_cluster_status(cluster: "ClusterClient", arguments: argparse.Namespace, namespace: str, job: str) -> JobStatus:
    """Ask the rendezvous of a job. Raises InputError and CommandError."""
    with reach_rendezvous(cluster, arguments, namespace, job) as rendezvous:
        answer = rendezvous.ask("/v1/status")
    if answer.status != 200:
        raise CommandError(f"the rendezvous answers {answer.status}")
    try:
        status: JobStatus = wire.decode(answer.body, JobStatus)
    except WireError as error:
        raise CommandError(f"the rendezvous gives an unreadable answer: {error}; is it of another release?") from error
    return status
