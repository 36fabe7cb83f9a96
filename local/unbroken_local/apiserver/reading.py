"""From a request's body to a document of the kind: type and identity checked, unknown fields found and dropped."""

from typing import Protocol

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.schema import Findings, apply_defaults, object_schema, prune, read_core


class FieldPolicy(Protocol):
    """How unknown fields are treated; warnings are added to the list."""

    @property
    def validation(self) -> str: ...
    @property
    def warnings(self) -> list[str]: ...


class DuplicateKeys(dict[str, object]):
    """An object whose text named a field twice."""

    duplicates: tuple[str, ...] = ()


def pairs_to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object for json.loads that remembers fields given twice."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    marked = DuplicateKeys(found)
    names = [name for name, _ in pairs]
    marked.duplicates = tuple(sorted({name for name in names if names.count(name) > 1}))
    return marked


def read_document(resource: Resource, body: object, policy: FieldPolicy) -> Document:
    """Return a fresh document of the resource's kind. Raises ApiProblem (400) as the policy and the types ask for."""
    if not isinstance(body, dict):
        raise problems.bad_request(f"{_cannot(resource)}: json: want an object")
    _check_type(resource, body)
    schema = object_schema(resource.schema)
    findings = Findings()
    if resource.custom:
        document: Document = prune(body, schema, "", findings)
    else:
        document = read_core(body, schema, "", findings)
    if findings.wrong:
        path, seen, wanted = findings.wrong[0]
        detail = f"json: cannot unmarshal {seen} into Go struct field {resource.kind}.{path} of type {wanted}"
        raise problems.bad_request(f"{_cannot(resource)}: {detail}")
    _report(resource, body, findings.unknown, policy)
    document["apiVersion"], document["kind"] = resource.api_version, resource.kind
    if not isinstance(document.setdefault("metadata", {}), dict):
        raise problems.bad_request(f"{_cannot(resource)}: json: metadata: want an object")
    if resource.custom:
        apply_defaults(document, schema)
    return document


def _cannot(resource: Resource) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'


def _check_type(resource: Resource, body: Document) -> None:
    version, kind = body.get("apiVersion"), body.get("kind")
    if resource.custom and not kind:
        raise problems.bad_request("Object 'Kind' is missing in the request's body")
    if resource.custom and not version:
        raise problems.bad_request("Object 'apiVersion' is missing in the request's body")
    if version and version != resource.api_version:
        raise problems.bad_request(
            f"the API version in the data ({version}) does not match the expected API version ({resource.api_version})"
        )
    if kind and kind != resource.kind:
        raise problems.bad_request(f"the kind in the data ({kind}) does not match the expected kind ({resource.kind})")


def _report(resource: Resource, body: object, unknown: list[str], policy: FieldPolicy) -> None:
    if policy.validation == "Ignore":
        return
    texts = [f'duplicate field "{path}"' for path in _duplicates(body, "")]
    texts += [f'unknown field "{path}"' for path in sorted(unknown)]
    if texts and policy.validation == "Strict":
        raise problems.bad_request(f"{_cannot(resource)}: strict decoding error: {', '.join(texts)}")
    policy.warnings.extend(texts)


def _duplicates(value: object, path: str) -> list[str]:
    found: list[str] = []
    if isinstance(value, DuplicateKeys):
        found += [f"{path}{name}" for name in value.duplicates]
    if isinstance(value, dict):
        for name, entry in value.items():
            found += _duplicates(entry, f"{path}{name}.")
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            found += _duplicates(entry, f"{path.removesuffix('.')}[{number}].")
    return found
