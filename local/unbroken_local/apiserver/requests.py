"""What a request asks for: its target, its query, the form of the answer that it accepts, its body."""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from unbroken_local.apiserver import problems, protobuf
from unbroken_local.apiserver.documents import Document, as_dict, encode
from unbroken_local.apiserver.kinds import Catalogue, Resource
from unbroken_local.apiserver.operations import DeleteOptions, PatchType, WriteOptions
from unbroken_local.apiserver.reading import pairs_to_object
from unbroken_local.apiserver.selectors import FieldSelector, LabelSelector, parse_fields, parse_labels
from unbroken_local.apiserver.store import Key

BODY_LIMIT_BYTES = 3 * 1024 * 1024
_DEEPEST = 100
_PATCHES: dict[str, PatchType] = {
    "application/json-patch+json": "json",
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/apply-patch+yaml": "apply",
}
_MANAGER = re.compile(r"[^/ ]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A path below a group and version; empty strings for what it does not name."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


def target_of(catalogue: Catalogue, path: str) -> Target:
    """Return what the path names. Raises ApiProblem (404)."""
    parts = [part for part in path.split("/") if part]
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = catalogue.find(group, version, rest[0])
    if resource is None or len(rest) > 3 or (namespace and not resource.namespaced):
        raise problems.no_such_path()
    name, subresource = [*rest, "", ""][1:3]
    if name and resource.namespaced and not namespace:
        raise problems.no_such_path()
    return Target(resource, namespace, name, subresource)


# -- query

Query = Mapping[str, str]


def flag(query: Query, name: str) -> bool:
    """Return a boolean parameter; a bare name counts as true."""
    return name in query and query[name].lower() not in ("false", "0")


def _whole(query: Query, name: str) -> int | None:
    text = query.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError as problem:
        raise problems.bad_request(f"invalid query parameter {name}: want a whole number, got {text!r}") from problem
    if value < 0:
        raise problems.bad_request(f"invalid query parameter {name}: must be non-negative, got {value}")
    return value


@dataclass(frozen=True, slots=True)
class ListQuery:
    """A list's or watch's parameters. `timeout_s`: None means the server's own choice."""

    labels: LabelSelector
    fields: FieldSelector
    limit: int
    after: Key | None
    revision: int | None
    exact: bool
    bookmarks: bool
    initial_events: bool
    timeout_s: float | None


def list_query(resource: Resource, name: str, query: Query) -> ListQuery:
    """Return the parsed parameters. Raises ApiProblem (400)."""
    match = query.get("resourceVersionMatch", "")
    revision = _whole(query, "resourceVersion")
    if match not in ("", "Exact", "NotOlderThan"):
        detail = f'resourceVersionMatch: Unsupported value: "{match}": supported values: "Exact", "NotOlderThan"'
        raise problems.bad_request(detail)
    if match == "Exact" and not revision:
        raise problems.bad_request("resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless "
                                   "resourceVersion is provided and is not 0")  # fmt: skip
    after: Key | None = None
    if query.get("continue"):
        revision, after = _read_token(query["continue"])
    fields = query.get("fieldSelector", "")
    if name:
        fields = f"{fields},metadata.name={name}"
    return ListQuery(
        labels=parse_labels(query.get("labelSelector", "")),
        fields=parse_fields(fields, resource.plural, frozenset(resource.selectable)),
        limit=_whole(query, "limit") or 0,
        after=after,
        revision=revision,
        exact=match == "Exact" or after is not None,
        bookmarks=flag(query, "allowWatchBookmarks"),
        initial_events=flag(query, "sendInitialEvents"),
        timeout_s=_whole(query, "timeoutSeconds"),
    )


def continue_token(revision: int, last: Key) -> str:
    """Return the token that continues a list behind `last`, as it was at `revision`."""
    return base64.urlsafe_b64encode(encode({"v": "meta.k8s.io/v1", "rv": revision, "after": list(last)})).decode()


def _read_token(text: str) -> tuple[int, Key]:
    try:
        token = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        namespace, name = token["after"]
        return int(token["rv"]), (str(namespace), str(name))
    except (binascii.Error, ValueError, KeyError, TypeError) as problem:
        raise problems.bad_request("continue key is not valid") from problem


_POLICIES: dict[str, Literal["Strict", "Warn", "Ignore"]] = {
    "": "Warn",
    "Strict": "Strict",
    "Warn": "Warn",
    "Ignore": "Ignore",
}


def write_options(query: Query, agent: str, subresource: str) -> WriteOptions:
    """Return a write's parameters. `agent`: the User-Agent, whose first word names the manager by default."""
    asked = query.get("fieldValidation", "")
    validation = _POLICIES.get(asked)
    if validation is None:
        detail = f'fieldValidation: Unsupported value: "{asked}": supported values: "Ignore", "Strict", "Warn"'
        raise problems.bad_request(detail)
    manager = query.get("fieldManager") or _MANAGER.match(agent or "unknown").group() or "unknown"  # type: ignore[union-attr] # matches any text
    if len(manager) > 128:
        raise problems.bad_request("fieldManager: Invalid value: may not be more than 128 bytes")
    return WriteOptions(
        dry_run=_dry_run(query.get("dryRun", "")),
        manager=manager,
        validation=validation,
        force=flag(query, "force"),
        subresource=subresource,
    )


def _dry_run(value: str) -> bool:
    if value not in ("", "All"):
        raise problems.bad_request(f'dryRun: Unsupported value: "{value}": supported values: "All"')
    return value == "All"


def delete_options(query: Query, body: object) -> DeleteOptions:
    """Return a deletion's options: the body's, else the query's. Raises ApiProblem (400)."""
    if not isinstance(body, dict):
        raise problems.bad_request("DeleteOptions: want a JSON object")
    if body.get("kind") not in (None, "", "DeleteOptions"):
        raise problems.bad_request(f"want DeleteOptions, got {body['kind']}")
    conditions = as_dict(body.get("preconditions"))
    grace = body.get("gracePeriodSeconds")
    if grace is not None and (not isinstance(grace, int) or isinstance(grace, bool)):
        raise problems.bad_request("DeleteOptions.gracePeriodSeconds: json: want a number")
    dry_run = body.get("dryRun")
    policy = body.get("propagationPolicy") or query.get("propagationPolicy")
    if policy is None and body.get("orphanDependents") is not None:
        policy = "Orphan" if body["orphanDependents"] else "Background"
    return DeleteOptions(
        grace_s=grace if grace is not None else _whole(query, "gracePeriodSeconds"),
        propagation=policy,
        uid=conditions.get("uid"),
        resource_version=conditions.get("resourceVersion"),
        dry_run=_dry_run(dry_run[0] if isinstance(dry_run, list) and dry_run else query.get("dryRun", "")),
    )


# -- the answer's form


@dataclass(frozen=True, slots=True)
class Form:
    """`kind`: Table, PartialObjectMetadata, PartialObjectMetadataList, APIGroupDiscoveryList, or empty for as it is."""

    kind: str = ""
    version: str = ""


_KNOWN_FORMS = {"Table", "PartialObjectMetadata", "PartialObjectMetadataList", "APIGroupDiscoveryList"}


def accepted_form(accept: str) -> Form:
    """Return the first form of the Accept header that can be served. Raises ApiProblem (406)."""
    for entry in (accept or "*/*").split(","):
        media, *parameters = (part.strip() for part in entry.split(";"))
        if media not in ("application/json", "*/*", "application/*", "text/*", "text/plain", "application/yaml"):
            continue
        named = dict(part.partition("=")[::2] for part in parameters)
        if not named.get("as"):
            return Form()
        if named["as"] in _KNOWN_FORMS and named.get("v") in ("v1", "v2"):
            return Form(named["as"], named["v"])
    raise problems.not_acceptable(["application/json", "application/yaml"])


# -- the body


def patch_type(content_type: str) -> PatchType:
    """Return the kind of patch. Raises ApiProblem (415)."""
    found = _PATCHES.get(content_type)
    if found is None:
        raise problems.unsupported_media_type(list(_PATCHES))
    return found


def read_body(raw: bytes, content_type: str) -> Any:
    """Return the parsed body. Raises ApiProblem: 400 for malformed text, 415 for a type that is not read."""
    if content_type == protobuf.MEDIA:
        return protobuf.decode(raw)
    if content_type in ("application/yaml", "application/apply-patch+yaml"):
        return _read_yaml(raw)
    if content_type not in ("application/json", "", "application/octet-stream", *_PATCHES):
        raise problems.unsupported_media_type(["application/json", "application/yaml"])
    try:
        value = json.loads(raw, object_pairs_hook=pairs_to_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise problems.bad_request(f"the body is not valid JSON: {problem}") from problem
    _check_depth(value)
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _read_yaml(raw: bytes) -> Any:
    try:
        # JSON first: it is YAML too, and read many times faster.
        value = json.loads(raw, object_pairs_hook=pairs_to_object)
    except (ValueError, RecursionError):
        try:
            value = yaml.load(raw, Loader=_PlainLoader)
        except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as problem:
            raise problems.bad_request(f"error decoding YAML: {problem}") from problem
    _check_depth(value)
    return value


class _PlainLoader(yaml.SafeLoader):
    """Reads times as text: JSON has none. Refuses aliases, which can blow up a short text."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        return super().compose_node(parent, index)


_PlainLoader.yaml_implicit_resolvers = {
    letter: [entry for entry in resolvers if entry[0] != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [entry for outer in level for entry in _inner(outer)]
        if not level:
            return
    raise problems.bad_request(f"the body is nested more than {_DEEPEST} levels deep")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [entry for entry in value.values() if isinstance(entry, (dict, list))]
    return [entry for entry in value if isinstance(entry, (dict, list))] if isinstance(value, list) else []


def as_object(body: Any) -> Document:
    """Return the body if it is an object. Raises ApiProblem (400)."""
    if not isinstance(body, dict):
        raise problems.bad_request(f"the body must be a JSON object, got {type(body).__name__}")
    return body
