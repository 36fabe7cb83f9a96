"""Reports missing RBAC rights at start-up, in one line that says what to do.

Else a missing right shows as a watch that fails again and again, or much later, when a first pod is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from unbroken_operator.adapters.errors import KubeError
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.lease import LeaseName
from unbroken_operator.adapters.tasks.supervision import keep_running
from unbroken_operator.api import layout
from unbroken_operator.decisions.objects.network_policy import API_GROUP

logger = logging.getLogger(__name__)

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
"""Every authenticated user may ask there for its own rights."""
LOOK_S = 60.0
"""Between looks while something is missing."""
RETRY_S = 5.0

_IN_JOBS_NAMESPACES = (
    (layout.GROUP, layout.PLURAL, ("get", "list", "watch", "delete")),
    (layout.GROUP, f"{layout.PLURAL}/status", ("patch",)),
    ("", "pods", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch")),
    ("", "secrets", ("get", "create", "patch")),
    ("", "events", ("create",)),
)
_IN_THE_CLUSTER = (("", "nodes", ("list", "watch")),)
_FOR_POLICIES = (API_GROUP, "networkpolicies", ("create",))
_FOR_CLAIMS = (("resource.k8s.io", "resourceclaims", ("get",)),)
_FOR_SLICES = (("resource.k8s.io", "resourceslices", ("list",)),)
_FOR_TAINTS = (("", "nodes", ("get", "patch")),)
_FOR_CONDITIONS = (("", "nodes/status", ("patch",)),)
_OF_THE_LEASE = (("get", True), ("patch", True), ("create", False))
"""Verb, and whether it is limited to this Lease: to the API server, a new object has no name yet."""


@dataclass(frozen=True)
class Right:
    """One thing that the operator does."""

    group: str
    resource: str
    """With its subresource: pods/status."""
    verb: str
    namespace: str | None = None
    """None: in all of them, or of the cluster."""
    name: str = ""
    """Empty: all objects."""

    def to_review(self) -> dict[str, object]:
        """Return the question to the API server."""
        resource, _, subresource = self.resource.partition("/")
        attributes = {
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
            "verb": self.verb,
            "namespace": self.namespace or "",
            "name": self.name,
        }
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }


def rights(
    namespaces: tuple[str, ...],
    lease: LeaseName | None,
    *,
    has_taints: bool = False,
    has_node_condition: bool = False,
    has_policies: bool = False,
    has_claims: bool = False,
) -> Iterator[Right]:
    """Yield all that the operator needs: what the chart's roles grant.

    `has_taints`: it quarantines nodes for real; `has_node_condition`: it says of which nodes in a condition of theirs;
    `has_policies`: jobs get a NetworkPolicy; `has_claims`: pods have ResourceClaims, which is not known at the start.
    """
    of_nodes = (*(_FOR_TAINTS if has_taints else ()), *(_FOR_CONDITIONS if has_node_condition else ()))
    of_slices, of_claims = (_FOR_SLICES, _FOR_CLAIMS) if has_claims else ((), ())
    of_policies = (_FOR_POLICIES,) if has_policies else ()
    for namespace in namespaces or (None,):
        for group, resource, verbs in (*_IN_JOBS_NAMESPACES, *of_policies, *of_claims):
            yield from (Right(group, resource, verb, namespace) for verb in verbs)
    for group, resource, verbs in (*_IN_THE_CLUSTER, *of_nodes, *of_slices):
        yield from (Right(group, resource, verb) for verb in verbs)
    if lease is not None:
        for verb, is_named in _OF_THE_LEASE:
            name = lease.name if is_named else ""
            yield Right("coordination.k8s.io", "leases", verb, lease.namespace, name)


def describe(missing: Iterable[Right]) -> str:
    """Return the rights as text: `list, watch pods in namespace ml`."""
    verbs: dict[tuple[str, str, str | None, str], list[str]] = {}
    for right in missing:
        verbs.setdefault((right.group, right.resource, right.namespace, right.name), []).append(right.verb)
    return "; ".join(
        f"{', '.join(found)} {resource}{f'.{group}' if group else ''}{f' {name}' if name else ''}"
        f"{' in all namespaces' if namespace is None and resource.partition('/')[0] != 'nodes' else ''}"
        f"{f' in namespace {namespace}' if namespace else ''}"
        for (group, resource, namespace, name), found in verbs.items()
    )


async def missing_rights(kube: Kube, wanted: Iterable[Right]) -> tuple[Right, ...]:
    """Return those that this user does not have. Raises KubeError."""
    found = []
    for right in wanted:
        answer = await kube.create(REVIEWS, right.to_review())
        if not (answer.get("status") or {}).get("allowed"):
            found.append(right)
    return tuple(found)


async def report_missing_rights(kube: Kube, wanted: tuple[Right, ...]) -> None:
    """Log what is missing, once for each change, until nothing is. Others log an API server that is away."""
    known: tuple[Right, ...] = ()
    while True:
        try:
            missing = await missing_rights(kube, wanted)
        except KubeError:
            await asyncio.sleep(RETRY_S)
            continue
        if missing and missing != known:
            logger.error(
                "permissions are missing: set rbac.create in the chart, or grant these rights=%s", describe(missing)
            )
        if not missing:
            if known:
                logger.info("permissions are complete")
            return
        known = missing
        await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def reporting_missing_rights(kube: Kube, wanted: Iterable[Right]) -> AsyncIterator[None]:
    """Do so in the background while the context lasts."""
    all_wanted = tuple(wanted)
    telling = asyncio.create_task(
        keep_running("permissions", lambda: report_missing_rights(kube, all_wanted)), name="permissions"
    )
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
