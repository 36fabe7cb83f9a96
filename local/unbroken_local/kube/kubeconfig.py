"""Where an API server is and how to prove who we are: the current context of a kubeconfig file."""

import base64
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.kube import Json


@dataclass(frozen=True)
class Access:
    """One API server. `ssl` is None for plain http."""

    server: str
    token: str
    ssl: ssl.SSLContext | None
    cluster: Json = field(default_factory=dict, compare=False)
    """The cluster's entry, with absolute paths."""


def read_kubeconfig(path: Path) -> Access:
    """Read the current context. Raises InputError that says what is wrong with the file."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: want a kubeconfig file, got {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: want a kubeconfig (a mapping), got {type(config).__name__}")
    context = _named(config, "contexts", "context", config.get("current-context"), path)
    cluster = _named(config, "clusters", "cluster", context.get("cluster"), path)
    user = _named(config, "users", "user", context.get("user"), path) if context.get("user") else {}
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise InputError(f"{path}: clusters[].cluster.server: want a http(s) URL, got {server!r}")
    token = user.get("token") or ""
    if user.get("tokenFile"):
        token = (path.parent / user["tokenFile"]).read_text(encoding="utf-8").strip()
    tls = _tls(cluster, user, path) if server.startswith("https://") else None
    if cluster.get("certificate-authority"):
        cluster["certificate-authority"] = str((path.parent / cluster["certificate-authority"]).resolve())
    return Access(server, str(token), tls, cluster)


def account_kubeconfig(access: Access, token_file: str | None, namespace: str) -> Json:
    """Return a kubeconfig of a service account: what a pod uses in place of its cluster's fixed paths and addresses.

    Without a token file it is the cluster's one user.
    """
    user = {"tokenFile": token_file} if token_file is not None else {"token": access.token}
    context = {"cluster": "local", "user": "account", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "local",
        "clusters": [{"name": "local", "cluster": access.cluster}],
        "users": [{"name": "account", "user": user}],
        "contexts": [{"name": "local", "context": context}],
    }


def _named(config: Json, plural: str, singular: str, name: object, path: Path) -> Json:
    for entry in config.get(plural) or []:
        if isinstance(entry, dict) and entry.get("name") == name:
            return dict(entry.get(singular) or {})
    raise InputError(f"{path}: {plural}: want an entry named {name!r}, got none")


def _tls(cluster: Json, user: Json, path: Path) -> ssl.SSLContext:
    authority = cluster.get("certificate-authority-data")
    file = cluster.get("certificate-authority")
    try:
        context = ssl.create_default_context(
            cadata=base64.b64decode(authority).decode() if authority else None,
            cafile=str(path.parent / file) if file else None,
        )
        if user.get("client-certificate") and user.get("client-key"):
            context.load_cert_chain(path.parent / user["client-certificate"], path.parent / user["client-key"])
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: want usable certificates, got {error}") from error
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
