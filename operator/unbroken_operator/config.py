"""The operator's own settings, from the command line. Everything is checked before anything starts."""

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from unbroken_core.conventions.images import image_of
from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.lease import LeaseName
from unbroken_operator.adapters.listening import Address
from unbroken_operator.adapters.webhook import Webhook
from unbroken_operator.api.model_base import DAY_S, DNS_LABEL, LABEL_KEY, Resources
from unbroken_operator.decisions.limits.images import MAX_PATTERNS, pattern_fault
from unbroken_operator.decisions.quarantine import QuarantineLimits, QuarantineMode
from unbroken_operator.decisions.snapshot import PolicyOptions

DEFAULT_SIDECAR_IMAGE = image_of("sidecar")
MAX_PEERS = 100
DEFAULT_LIMITS = QuarantineLimits()
MAX_LABEL_KEY = 317


@dataclass(frozen=True)
class Config:
    """Validated settings."""

    namespaces: tuple[str, ...]
    """Empty means all namespaces."""
    kubeconfig: str | None
    """None means the service account of the pod."""
    sidecar_image: str
    metrics_listen: Address | None
    liveness_listen: Address | None
    is_json_log: bool
    log_level: str
    force_delete_after_s: float
    rendezvous_images: tuple[str, ...] = ()
    """Empty: any."""
    encrypts: bool = True
    """Whether the parts of new jobs use TLS among each other."""
    sidecar_resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rendezvous_resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of jobs that name none: `requests` and `limits`."""
    lease: LeaseName | None = None
    """None means that no other operator serves these namespaces."""
    lease_s: int = 8
    webhook: Webhook | None = None
    quarantine: QuarantineMode = QuarantineMode.DRY_RUN
    quarantine_limits: QuarantineLimits = DEFAULT_LIMITS
    has_node_condition: bool = False
    """Whether nodes that are quarantined, or would be, say so in a condition."""
    network_policy: PolicyOptions | None = None
    """None: jobs get no NetworkPolicy."""


def parse(arguments: list[str] | None = None) -> Config:
    """Read the command line. Exits with a usage message; raises InputError for what is well-formed but wrong."""
    options = _parser().parse_args(arguments)
    _check(options)
    return Config(
        namespaces=tuple(dict.fromkeys(options.namespace or ())),
        kubeconfig=kubeconfig_of(options.kubeconfig),
        sidecar_image=options.sidecar_image,
        metrics_listen=_address("--metrics-listen", options.metrics_listen),
        liveness_listen=_address("--liveness", options.liveness),
        is_json_log=options.log_format == "json",
        log_level=options.log_level.upper(),
        force_delete_after_s=options.force_delete_after_seconds,
        rendezvous_images=tuple(options.rendezvous_image or ()),
        encrypts=not options.no_encryption,
        sidecar_resources=_resources("--sidecar-resources", options.sidecar_resources),
        rendezvous_resources=_resources("--rendezvous-resources", options.rendezvous_resources),
        lease=_lease(options.lease),
        lease_s=options.lease_seconds,
        webhook=_webhook(options),
        quarantine=QuarantineMode(options.quarantine),
        quarantine_limits=_limits(options),
        has_node_condition=_has_node_condition(options),
        network_policy=_network_policy(options),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unbroken_operator", description="Runs ResilientTrainingJobs on a Kubernetes cluster."
    )
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--namespace", action="append", metavar="NS", help="work in this namespace; may be repeated")
    scope.add_argument("--all-namespaces", action="store_true", help="work in all namespaces")
    parser.add_argument(
        "--kubeconfig", help="file with the cluster's address (default: $KUBECONFIG, else the pod's service account)"
    )
    parser.add_argument(
        "--sidecar-image", default=DEFAULT_SIDECAR_IMAGE, help="image of agent and rendezvous in jobs that name none"
    )
    for name, what in (("sidecar", "the agent"), ("rendezvous", "the rendezvous")):
        parser.add_argument(
            f"--{name}-resources",
            default="{}",
            metavar="JSON",
            help=f"requests and limits of {what} in jobs that name none, as in a container (default: {{}})",
        )
    parser.add_argument(
        "--rendezvous-image",
        action="append",
        metavar="IMAGE",
        help="jobs may have this image for their rendezvous, or those with this prefix, such as example.com/team/*; "
        "may be repeated (default: any image)",
    )
    parser.add_argument("--metrics-listen", metavar="ADDRESS:PORT", help="serve /metrics and /healthz there")
    parser.add_argument("--liveness", metavar="ADDRESS:PORT", help="serve /healthz and /readyz there")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--force-delete-after-seconds",
        type=float,
        default=30.0,
        help="a pod that is being deleted on a dead node is forced away after this (default: 30)",
    )
    parser.add_argument(
        "--no-encryption",
        action="store_true",
        help="do not encrypt the traffic of new jobs, where something else does, such as a service mesh",
    )
    _add_lease_and_webhook(parser)
    _add_quarantine(parser)
    parser.add_argument(
        "--job-network-policies",
        metavar="NAMESPACE",
        help="make a NetworkPolicy for each job's rendezvous: the job's pods and this operator, in NAMESPACE, reach it",
    )
    parser.add_argument(
        "--job-metrics-from",
        metavar="JSON",
        default="[]",
        help="NetworkPolicy peers that may read the rendezvous' metrics (default: everybody)",
    )
    return parser


def _add_lease_and_webhook(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lease",
        metavar="NAMESPACE/NAME",
        help="act only while holding this Lease, so that several operators may run (default: this one is alone)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=int,
        default=8,
        help="seconds of the holder's silence after which another operator takes over (default: 8)",
    )
    parser.add_argument(
        "--webhook-listen", metavar="ADDRESS:PORT", help="answer the API server's reviews of jobs there, over HTTPS"
    )
    parser.add_argument(
        "--webhook-certificates", metavar="FOLDER", help="tls.crt and tls.key for it; reloaded when they change"
    )
    parser.add_argument(
        "--webhook-client-authority",
        metavar="FILE",
        help="answer only clients with a certificate of this authority (default: all clients)",
    )


def _check(options: argparse.Namespace) -> None:
    for name in options.namespace or ():
        if not re.match(DNS_LABEL, name):
            raise InputError(f"--namespace: not the name of a namespace: {name!r}")
    if not options.sidecar_image:
        raise InputError("--sidecar-image: must not be empty")
    _check_images(options.rendezvous_image or ())
    if not options.force_delete_after_seconds >= 0:
        raise InputError(f"--force-delete-after-seconds: must be at least 0, got {options.force_delete_after_seconds}")
    if not 1 <= options.lease_seconds <= 3600:
        raise InputError(f"--lease-seconds: must be 1 to 3600, got {options.lease_seconds}")


def _check_images(patterns: Sequence[str]) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise InputError(f"--rendezvous-image: must be given at most {MAX_PATTERNS} times, got {len(patterns)}")
    for fault in filter(None, map(pattern_fault, patterns)):
        raise InputError(f"--rendezvous-image: {fault}")


def _add_quarantine(parser: argparse.ArgumentParser) -> None:
    limits = DEFAULT_LIMITS
    parser.add_argument(
        "--quarantine",
        choices=[mode.value for mode in QuarantineMode],
        default=QuarantineMode.DRY_RUN.value,
        help="taint nodes on which jobs failed again and again (default: dry-run, which only says so in the log)",
    )
    parser.add_argument(
        "--quarantine-score",
        type=float,
        default=limits.score,
        help=f"faults of a node, as status.suspectNodes counts them, of all jobs (default: {limits.score:g})",
    )
    parser.add_argument(
        "--quarantine-max-nodes",
        type=int,
        default=limits.max_nodes,
        help=f"most nodes at once (default: {limits.max_nodes})",
    )
    parser.add_argument(
        "--quarantine-seconds",
        type=float,
        default=limits.duration_s,
        help=f"a node is released after this (default: {limits.duration_s:g})",
    )
    parser.add_argument(
        "--quarantine-min-namespaces",
        type=int,
        default=limits.min_namespaces,
        help="namespaces that must blame a node; 1 only where all tenants trust each other"
        f" (default: {limits.min_namespaces})",
    )
    parser.add_argument(
        "--quarantine-max-percent",
        type=int,
        default=limits.max_percent,
        help="most of the cluster's nodes, and of a domain's, rounded down; the control plane is not counted"
        f" (default: {limits.max_percent})",
    )
    parser.add_argument(
        "--quarantine-domain-label",
        metavar="LABEL",
        default=limits.domain_label,
        help="nodes with the same value of this label are a domain (default: no domains)",
    )
    parser.add_argument(
        "--quarantine-condition",
        action="store_true",
        help="nodes that are quarantined, or would be in a dry run, get the condition UnbrokenRepeatOffender meanwhile",
    )


def _has_node_condition(options: argparse.Namespace) -> bool:
    if options.quarantine_condition and options.quarantine == QuarantineMode.OFF.value:
        raise InputError("--quarantine-condition: wants --quarantine on or dry-run, got off, which looks at no node")
    return bool(options.quarantine_condition)


def _limits(options: argparse.Namespace) -> QuarantineLimits:
    # Below, faults that are long forgotten would count; every node would be an offender at 0.
    if not 1 <= options.quarantine_score <= 1000:
        raise InputError(f"--quarantine-score: must be 1 to 1000, got {options.quarantine_score:g}")
    if not 1 <= options.quarantine_max_nodes <= 1000:
        raise InputError(f"--quarantine-max-nodes: must be 1 to 1000, got {options.quarantine_max_nodes}")
    if not 60 <= options.quarantine_seconds <= 30 * DAY_S:
        raise InputError(f"--quarantine-seconds: must be 60 to {30 * DAY_S}, got {options.quarantine_seconds:g}")
    if not 1 <= options.quarantine_min_namespaces <= 100:
        raise InputError(f"--quarantine-min-namespaces: must be 1 to 100, got {options.quarantine_min_namespaces}")
    if not 1 <= options.quarantine_max_percent <= 100:
        raise InputError(f"--quarantine-max-percent: must be 1 to 100, got {options.quarantine_max_percent}")
    label = options.quarantine_domain_label
    if label and (len(label) > MAX_LABEL_KEY or not re.fullmatch(LABEL_KEY, label)):
        raise InputError(f"--quarantine-domain-label: must be the key of a label, got {label[:MAX_LABEL_KEY]!r}")
    return QuarantineLimits(
        options.quarantine_score,
        options.quarantine_max_nodes,
        options.quarantine_seconds,
        options.quarantine_min_namespaces,
        options.quarantine_max_percent,
        options.quarantine_domain_label,
    )


def _network_policy(options: argparse.Namespace) -> PolicyOptions | None:
    namespace, text = options.job_network_policies, options.job_metrics_from
    if namespace is None:
        return None
    if not re.match(DNS_LABEL, namespace):
        raise InputError(f"--job-network-policies: not the name of a namespace: {namespace!r}")
    try:
        peers = json.loads(text)
    except (ValueError, RecursionError):
        peers = None
    if not isinstance(peers, list) or len(peers) > MAX_PEERS or not all(map(_is_peer, peers)):
        raise InputError(
            f"--job-metrics-from: must be a JSON list of at most {MAX_PEERS} NetworkPolicy peers, with podSelector, "
            f"namespaceSelector or ipBlock, got {text[:100]!r}"
        )
    return PolicyOptions(namespace, tuple(peers))


def _is_peer(peer: object) -> bool:
    kinds = {"podSelector", "namespaceSelector", "ipBlock"}
    return isinstance(peer, dict) and bool(peer) and set(peer) <= kinds


def _webhook(options: argparse.Namespace) -> Webhook | None:
    address = _address("--webhook-listen", options.webhook_listen)
    folder, authority = options.webhook_certificates, options.webhook_client_authority
    if address is None and not folder and not authority:
        return None
    if address is None or not folder:
        raise InputError("--webhook-listen, --webhook-certificates: give both or neither")
    images = tuple(options.rendezvous_image or ())
    return Webhook(address, Path(folder), images, Path(authority) if authority else None)


def _resources(flag: str, text: str) -> Mapping[str, Mapping[str, str]]:
    try:
        found = Resources.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise InputError(f"{flag}: {where}: {first['msg']}, got {text[:200]!r}") from error
    resources: dict[str, dict[str, str]] = found.model_dump(by_alias=True, exclude_none=True, mode="json")
    return resources


def _lease(text: str | None) -> LeaseName | None:
    if text is None:
        return None
    namespace, _, name = text.partition("/")
    if not re.match(DNS_LABEL, namespace) or not re.match(DNS_LABEL, name):
        raise InputError(f"--lease: must be NAMESPACE/NAME, such as unbroken-system/unbroken-operator, got {text!r}")
    return LeaseName(namespace, name)


def kubeconfig_of(option: str | None) -> str | None:
    """Return the file of an option, or what holds without it; None for the service account. Raises InputError."""
    path = option or os.environ.get("KUBECONFIG") or None
    if path is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        path = "~/.kube/config"
    if path is None:
        return None
    expanded = Path(path).expanduser()
    if not expanded.is_file():
        raise InputError(f"--kubeconfig: no such file: {path!r}")
    return str(expanded)


def _address(option: str, text: str | None) -> Address | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65_535 or not host:
        raise InputError(f"{option}: must be ADDRESS:PORT, such as 0.0.0.0:9090, got {text!r}")
    return Address(host.strip("[]"), int(port))
