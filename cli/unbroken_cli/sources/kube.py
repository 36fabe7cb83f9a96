"""Jobs, pods and Events from the API server, with the user's own kubeconfig and rights.

The only module that imports the `kubernetes` package. It is not the operator's client: a command makes a few calls and
ends, so it needs no asyncio. Every call is bounded in time, and every failure is one sentence: a CommandError.
"""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3.exceptions
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

from unbroken_cli.errors import CommandError, NotThere
from unbroken_core.vocabulary.errors import InputError

_GROUP = "unbroken.dev/v1alpha1"
_TIMEOUT_S = (5.0, 20.0)
"""To connect, and to read."""
_PAGE_SIZE = 500
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class ClusterClient:
    """One API server as one user sees it. Make it with `connect`."""

    api: ApiClient
    namespace: str
    """That of the kubeconfig's context."""

    @classmethod
    def connect(cls, kubeconfig: str | None, context: str | None) -> "ClusterClient":
        """Read the kubeconfig ($KUBECONFIG or ~/.kube/config when None). Raises InputError that says what is wrong."""
        where = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
        if not any(Path(part).expanduser().is_file() for part in where.split(os.pathsep) if part):
            raise InputError(f"kubeconfig: {where} does not exist; see --kubeconfig and $KUBECONFIG")
        configuration = Configuration()
        try:
            contexts, active = list_kube_config_contexts(kubeconfig)
            load_kube_config(kubeconfig, context, client_configuration=configuration, persist_config=False)
        except (ConfigException, OSError, ValueError) as error:
            raise InputError(f"kubeconfig {where}: {' '.join(str(error).split())}; see --context") from error
        configuration.retries = False
        # The kubeconfig says so: a warning at each call would bury the answer.
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        chosen = active if context is None else next(item for item in contexts if item["name"] == context)
        return cls(ApiClient(configuration), chosen["context"].get("namespace") or "default")

    def job(self, namespace: str, name: str) -> JsonObject:
        """Return a job. Raises NotThere."""
        return self._get(f"{_jobs_path(namespace)}/{quote(name, safe='')}", f"job {name!r} in namespace {namespace!r}")

    def jobs(self, namespace: str | None) -> list[JsonObject]:
        """Return the jobs of a namespace, or of all when it is None."""
        where = "all namespaces" if namespace is None else f"namespace {namespace!r}"
        return self._list(_jobs_path(namespace), f"jobs in {where}", {})

    def check_namespace(self, name: str) -> None:
        """Raise NotThere when there is no such namespace, and CommandError when nobody says."""
        self._get(f"/api/v1/namespaces/{quote(name, safe='')}", f"namespace {name!r}")

    def events(self, namespace: str, name: str, uid: str) -> list[JsonObject]:
        """Return the Events of a job."""
        selector = f"involvedObject.kind=ResilientTrainingJob,involvedObject.name={name},involvedObject.uid={uid}"
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        return self._list(path, f"events in namespace {namespace!r}", {"fieldSelector": selector})

    def secret(self, namespace: str, name: str) -> JsonObject:
        """Return a Secret. Raises NotThere."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets/{quote(name, safe='')}"
        return self._get(path, f"Secret {name!r} in namespace {namespace!r}")

    def pods(self, namespace: str, job: str, component: str = "trainer") -> list[JsonObject]:
        """Return the pods of a job, those that have ended included."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        selector = f"unbroken.dev/job={job},unbroken.dev/component={component}"
        return self._list(path, f"pods in namespace {namespace!r}", {"labelSelector": selector})

    def lease(self, namespace: str, name: str) -> tuple[JsonObject, str]:
        """Return a Lease, and the API server's time as its answer's Date header has it. Raises NotThere."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases/{quote(name, safe='')}"
        return self._exchange("GET", path, f"Lease {name!r} in namespace {namespace!r}")

    def service_text(self, namespace: str, service: str, port: str, path: str) -> str:
        """Return what a Service answers to a GET through the API server, as text. Raises NotThere."""
        place = f"{quote(service, safe='')}:{quote(port, safe='')}/proxy/{path}"
        what = f"Service {service!r} in namespace {namespace!r}"
        data, _date = self._bytes("GET", f"/api/v1/namespaces/{quote(namespace, safe='')}/services/{place}", what)
        return data.decode(errors="replace")

    def delete_pod(self, namespace: str, name: str, uid: str, grace_s: int | None) -> None:
        """Delete a pod if it is still this one. `grace_s`: seconds to end in, None as the pod says, 0 at once."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        options: JsonObject = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self._call("DELETE", path, f"pod {name!r} in namespace {namespace!r}", body=options)

    def _list(self, path: str, what: str, query: dict[str, str]) -> list[JsonObject]:
        items: list[JsonObject] = []
        query = {**query, "limit": str(_PAGE_SIZE)}
        while True:
            page = self._get(path, what, query)
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return items
            query["continue"] = token

    def _get(self, path: str, what: str, query: dict[str, str] | None = None) -> JsonObject:
        return self._call("GET", path, what, query)

    def _call(
        self, method: str, path: str, what: str, query: dict[str, str] | None = None, body: JsonObject | None = None
    ) -> JsonObject:
        return self._exchange(method, path, what, query, body)[0]

    def _exchange(
        self, method: str, path: str, what: str, query: dict[str, str] | None = None, body: JsonObject | None = None
    ) -> tuple[JsonObject, str]:
        data, date = self._bytes(method, path, what, query, body)
        try:
            answer: JsonObject = json.loads(data)
        except ValueError as error:
            server = self.api.configuration.host
            raise CommandError(f"{what}: {server} answers no JSON; is it an API server?") from error
        return answer, date

    def _bytes(
        self, method: str, path: str, what: str, query: dict[str, str] | None = None, body: JsonObject | None = None
    ) -> tuple[bytes, str]:
        server = self.api.configuration.host
        try:
            arguments = self.api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = self.api.call_api(*arguments, _request_timeout=_TIMEOUT_S)
            data = response.read()
            if response.status >= 400:
                raise _refusal(response.status, data, what, server, method)
        except ApiException as error:
            raise _refusal(error.status, error.body, what, server, method) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = " ".join(str(getattr(error, "reason", None) or error).split())
            raise CommandError(f"{what}: the API server {server} does not answer: {cause}") from error
        return data, str(response.getheader("Date") or "")


def _jobs_path(namespace: str | None) -> str:
    place = "" if namespace is None else f"namespaces/{quote(namespace, safe='')}/"
    return f"/apis/{_GROUP}/{place}resilienttrainingjobs"


def _refusal(status: int | None, body: Any, what: str, server: str, method: str) -> CommandError:
    try:
        message = json.loads(body).get("message", "")
    except (ValueError, TypeError, AttributeError):
        message = ""
    if status == 404 and "could not find the requested resource" not in message and "page not found" not in str(body):
        return NotThere(f"{what}: there is none on {server}")
    if status == 404:
        return CommandError(f"{what}: {server} does not know ResilientTrainingJob; install Unbroken's CRD there")
    if status == 403:
        lacks = "read them" if method == "GET" else "delete it"
        role = "get and list on them" if method == "GET" else "delete on pods"
        return CommandError(f"{what}: you may not {lacks} on {server}: {message}; you need a role with {role}")
    if status == 409:
        return CommandError(f"{what}: it is another one by now; nothing was done: {message}")
    if status == 401:
        return CommandError(f"{what}: {server} does not accept your credentials (401); is your kubeconfig expired?")
    return CommandError(f"{what}: {server} answers {status}: {message}")
