"""A client of one API server, and what each real server lacks."""

import json
import os
import secrets
import ssl
import subprocess
import sysconfig
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3
import yaml

Document = dict[str, Any]
PATIENCE_S = 60.0

# What a real server cannot show, and why. A test names what it needs; the built-in server has all of it.
LACKS: dict[str, dict[str, str]] = {
    "full": {
        "cel": "Kubernetes 1.20 drops x-kubernetes-validations",
        "strict-fields": "Kubernetes 1.20 has no fieldValidation",
        "aggregated-discovery": "Kubernetes 1.20 has no aggregated discovery",
        "openapi-v3": "Kubernetes 1.20 has no OpenAPI v3",
        "initial-events": "Kubernetes 1.20 has no sendInitialEvents",
        "namespace-label": "Kubernetes 1.20 does not label namespaces with their name",
        "loopback-services": "its service network is not on loopback",
        "policy-v1": "Kubernetes 1.20 has policy/v1beta1 only",
        "short-history": "its history is kept for minutes; it cannot be made to forget",
        "service-patching": "Kubernetes 1.20 wants a service's address repeated in each replacement",
        "kubelet": "no kubelet stands behind it",
        "pod-generation": "Kubernetes 1.20 counts no generation of pods",
        "eviction": "Kubernetes 1.20 evicts through policy/v1beta1",
        "scheduler-free": "its scheduler binds pods before a test can",
        "openapi-json": "the profile's OpenAPI differs by version from the field table",
    },
    "modern": {
        "core-validation": "the profile has no validation of core kinds",
        "core-defaults": "the profile has no defaults of core kinds",
        "core-strategies": "the profile stores core kinds as they are, without their own create and update rules",
        "namespace-controller": "the profile runs no namespace controller",
        "events-v1": "the profile does not serve events.k8s.io",
        "namespace-label": "the profile has no defaults of core kinds",
        "loopback-services": "the profile allocates no service addresses",
        "pod-subresources": "the profile serves pods without binding, eviction and log",
        "core-tables": "the profile prints core kinds by name and age only",
        "reviews": "the profile serves no access reviews",
        "scheduler-free": "the profile serves pods without binding",
        "eviction": "the profile serves pods without eviction",
        "short-history": "its history is kept for minutes; it cannot be made to forget",
        "kubelet": "no kubelet stands behind it",
        "service-accounts": "the profile runs no service account controller",
        "namespace-check": "the profile does not ask whether a namespace exists",
        "workload-scale": "the profile serves workloads without scale",
        "authentication": "the profile lets everybody in",
        "pod-generation": "the profile stores core kinds as they are",
    },
}


def needs(*abilities: str) -> pytest.MarkDecorator:
    """Mark a test that asks for what some real server lacks: there it is not collected."""
    for ability in abilities:
        assert any(ability in lacks for lacks in LACKS.values()), f"{ability} is not in the table"
    return pytest.mark.needs(*abilities)


@dataclass(frozen=True)
class Reply:
    """An answer; `body` is its JSON, or None for text."""

    code: int
    body: Any
    headers: dict[str, str]
    text: str

    @property
    def status(self) -> tuple[int, str]:
        """Code and reason of a refusal, as the Status says."""
        assert self.body["kind"] == "Status", self.body
        assert self.body["code"] == self.code
        return self.code, str(self.body.get("reason", ""))

    def ok(self, code: int = 200) -> Document:
        """Return the body of a success."""
        assert self.code == code, self.text
        assert isinstance(self.body, dict)
        return self.body


class Target:
    """One API server."""

    def __init__(self, name: str, kubeconfig: Path) -> None:
        self.name = name
        self.kubeconfig = kubeconfig
        config = yaml.safe_load(kubeconfig.read_text())
        self.cluster = config["clusters"][0]["cluster"]
        self.url: str = self.cluster["server"]
        self.token: str = config["users"][0]["user"]["token"]

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        authority = self.cluster.get("certificate-authority-data")
        context = ssl.create_default_context(cadata=b64decode(authority).decode() if authority else None)
        if self.cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    @cached_property
    def pool(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(
            ssl_context=self.ssl_context, assert_hostname=self.ssl_context.check_hostname and None, retries=False
        )

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        media: str = "application/json",
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> Reply:
        """Send one request."""
        sent = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", **(headers or {})}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", media)
        fields = {name: str(value) for name, value in query.items()}
        url = self.url + path
        if fields:
            url += ("&" if "?" in path else "?") + urlencode(fields)
        reply = self.pool.request(method, url, body=data, headers=sent, timeout=PATIENCE_S)
        text = reply.data.decode()
        parsed = json.loads(text) if text[:1] in ("{", "[") else None
        return Reply(reply.status, parsed, dict(reply.headers), text)

    def get(self, path: str, **query: Any) -> Reply:
        return self.call("GET", path, **query)

    def post(self, path: str, body: Any, **query: Any) -> Reply:
        return self.call("POST", path, body, **query)

    def put(self, path: str, body: Any, **query: Any) -> Reply:
        return self.call("PUT", path, body, **query)

    def delete(self, path: str, body: Any = None, **query: Any) -> Reply:
        return self.call("DELETE", path, body, **query)

    def merge(self, path: str, body: Any, **query: Any) -> Reply:
        return self.call("PATCH", path, body, media="application/merge-patch+json", **query)

    def json_patch(self, path: str, body: Any, **query: Any) -> Reply:
        return self.call("PATCH", path, body, media="application/json-patch+json", **query)

    def strategic(self, path: str, body: Any, **query: Any) -> Reply:
        return self.call("PATCH", path, body, media="application/strategic-merge-patch+json", **query)

    def apply(self, path: str, body: Any, manager: str, **query: Any) -> Reply:
        return self.call("PATCH", path, body, media="application/apply-patch+yaml", fieldManager=manager, **query)

    def watch(self, path: str, **query: Any) -> Iterator[Document]:
        """Yield the events of a watch until the server ends it. Close the iterator to end it earlier."""
        query.setdefault("timeoutSeconds", 50)
        url = f"{self.url}{path}?watch=true&{urlencode(query)}"
        headers = {"Authorization": f"Bearer {self.token}", "Accept": query.pop("accept", "application/json")}
        reply = self.pool.request("GET", url, headers=headers, preload_content=False, timeout=PATIENCE_S)
        try:
            assert reply.status == 200, reply.read()
            rest = b""
            for chunk in reply.stream(65536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines if line)
        finally:
            reply.close()

    def kubectl(self, *arguments: str, stdin: str = "", code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run kubectl; `code` is the exit code that it must have, None for any."""
        binary = Path(sysconfig.get_path("scripts")) / "kubectl"
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.kubeconfig.parent)}
        done = subprocess.run(
            [binary, *arguments], input=stdin, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


def config_map(name: str, **data: str) -> Document:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def pod(name: str, **spec: Any) -> Document:
    """Return a pod. A node that it names should be its test's own: where a node is not there for a while, pods go."""
    container = {"name": "main", "image": "example.test/image:1"}
    # A node selector that no node has: where a scheduler runs, it leaves the pod alone.
    whole = {"containers": [container], "nodeSelector": {"contract": "none"}, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole}


def definition(schema: Document, *, group: str = "", **version: Any) -> Document:
    """Return a CRD of kind Widget in a group of its own."""
    group = group or f"g{secrets.token_hex(4)}.contract.test"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"widgets.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "plural": "widgets",
                "singular": "widget",
                "kind": "Widget",
                "listKind": "WidgetList",
                "shortNames": ["wdg"],
                "categories": ["things"],
            },
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **version}
            ],
        },
    }
