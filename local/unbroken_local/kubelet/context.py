"""What the pods of a node share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient, retry
from unbroken_local.kube.events import EventRecorder
from unbroken_local.kubelet.folders import Folders
from unbroken_local.kubelet.images import ImageRule
from unbroken_local.kubelet.restart import BackOff
from unbroken_local.processes.host import ProcessHost


class ServiceNames(Protocol):
    """Where Services are reached on this machine."""

    def address_of(self, namespace: str, name: str) -> str:
        """Return the address that stands for a Service, known or not yet."""
        ...

    def address_by_cluster_ip(self) -> Mapping[str, str]:
        """Return the local address of each cluster IP."""
        ...

    def of_namespace(self, namespace: str) -> tuple[tuple[Json, str], ...]:
        """Return the Services of a namespace that have a selector or cluster IP, each with its address."""
        ...


@dataclass(frozen=True)
class NodeContext:
    """One node's surroundings."""

    name: str
    address: str
    client: KubeClient
    host: ProcessHost
    folders: Folders
    images: tuple[ImageRule, ...]
    back_off: BackOff
    services: ServiceNames
    events: EventRecorder
    session: aiohttp.ClientSession
    """For probes: no connection is kept."""
    take_pod_ip: Callable[[], str]

    async def fetch(self, namespace: str, plural: str, name: str) -> Json | None:
        """Read a Secret or ConfigMap; None when there is none. Raises ApiError."""
        path = f"/api/v1/namespaces/{namespace}/{plural}/{name}"
        try:
            found = await retry(f"read {plural}/{name}", lambda: self.client.get(path), tries=4)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return {"kind": {"secrets": "Secret", "configmaps": "ConfigMap"}[plural], **found}

    async def fetch_token(self, namespace: str, account: str, source: Json) -> str:
        """Ask for a service account's token. Raises ApiError."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        spec: Json = {"expirationSeconds": source.get("expirationSeconds") or 3600}
        if source.get("audience"):
            spec["audiences"] = [source["audience"]]
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await retry(f"token of {account}", lambda: self.client.create(path, request), tries=4)
        return str(answer["status"]["token"])
