"""Label and field selectors: parsed once, then asked for each object."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from unbroken_local.apiserver.documents import Document, look_up
from unbroken_local.apiserver.problems import bad_request

Operator = Literal["in", "notin", "exists", "!", "gt", "lt"]
_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|>|<|[^\s=!(),<>]+)")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on a label; `values` is empty for exists and !."""

    key: str
    operator: Operator
    values: frozenset[str]

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "in":
                return value in self.values
            case "notin":
                return value not in self.values
            case "exists":
                return value is not None
            case "!":
                return value is None
            case _:
                return self._compares(value)

    def _compares(self, value: str | None) -> bool:
        try:
            seen, bound = int(value or ""), int(next(iter(self.values)))
        except ValueError:
            return False
        return seen > bound if self.operator == "gt" else seen < bound


LabelSelector = tuple[Requirement, ...]


class _Tokens:
    def __init__(self, text: str) -> None:
        self._text = text
        self._left: list[str] = []
        position = 0
        while position < len(text.rstrip()):
            found = _TOKEN.match(text, position)
            if found is None:
                raise self.refusal()
            self._left.append(found.group(1))
            position = found.end()

    def refusal(self) -> Exception:
        return bad_request(f"unable to parse requirement: couldn't parse the selector string {self._text!r}")

    def peek(self) -> str:
        return self._left[0] if self._left else ""

    def take(self) -> str:
        return self._left.pop(0) if self._left else ""

    def word(self) -> str:
        token = self.take()
        if not token or token in "==!=(),<>":
            raise self.refusal()
        return token


@lru_cache(maxsize=1024)
def parse_labels(text: str) -> LabelSelector:
    """Return the requirements of a labelSelector, set-based ones included. Raises ApiProblem (400)."""
    tokens = _Tokens(text)
    requirements: list[Requirement] = []
    while tokens.peek():
        requirements.append(_requirement(tokens))
        if tokens.peek() and tokens.take() != ",":
            raise tokens.refusal()
    return tuple(requirements)


def _requirement(tokens: _Tokens) -> Requirement:
    if tokens.peek() == "!":
        tokens.take()
        return Requirement(tokens.word(), "!", frozenset())
    key = tokens.word()
    operator = tokens.peek()
    if operator in ("", ","):
        return Requirement(key, "exists", frozenset())
    tokens.take()
    if operator in ("=", "==", "!="):
        value = "" if tokens.peek() in ("", ",") else tokens.word()
        return Requirement(key, "notin" if operator == "!=" else "in", frozenset({value}))
    if operator in (">", "<"):
        return Requirement(key, "gt" if operator == ">" else "lt", frozenset({tokens.word()}))
    if operator in ("in", "notin"):
        return Requirement(key, "in" if operator == "in" else "notin", frozenset(_values(tokens)))
    raise tokens.refusal()


def _values(tokens: _Tokens) -> list[str]:
    if tokens.take() != "(":
        raise tokens.refusal()
    values: list[str] = []
    while tokens.peek() != ")":
        values.append("" if tokens.peek() == "," else tokens.word())
        if tokens.peek() == ",":
            tokens.take()
        elif tokens.peek() != ")":
            raise tokens.refusal()
    tokens.take()
    return values


@dataclass(frozen=True, slots=True)
class FieldRequirement:
    """`field` = or != `value`; a field that is missing counts as the empty string."""

    path: tuple[str, ...]
    value: str
    equal: bool

    def matches(self, document: Document) -> bool:
        seen = look_up(document, *self.path)
        text = "" if seen is None else str(seen).lower() if isinstance(seen, bool) else str(seen)
        return (text == self.value) is self.equal


FieldSelector = tuple[FieldRequirement, ...]

_FIELDS: dict[str, frozenset[str]] = {
    "pods": frozenset({"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
                       "spec.hostNetwork", "status.phase", "status.podIP", "status.nominatedNodeName"}),
    "events": frozenset({"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
                         "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
                         "reason", "reportingComponent", "source", "type"}),
    "nodes": frozenset({"spec.unschedulable"}),
    "namespaces": frozenset({"status.phase", "name"}),
    "secrets": frozenset({"type"}),
    "services": frozenset({"spec.clusterIP", "spec.type"}),
    "jobs": frozenset({"status.successful"}),
    "replicasets": frozenset({"status.replicas"}),
}  # fmt: skip


def parse_fields(text: str, plural: str, extra: frozenset[str] = frozenset()) -> FieldSelector:
    """Return the requirements of a fieldSelector. Raises ApiProblem (400) for a field that the kind does not offer.
    `extra`: selectableFields of a custom resource."""
    known = _FIELDS.get(plural, frozenset()) | extra | {"metadata.name", "metadata.namespace"}
    requirements: list[FieldRequirement] = []
    for part in filter(None, text.split(",")):
        field, separator, value = part.partition("!=")
        if not separator:
            field, separator, value = part.partition("==" if "==" in part else "=")
        if not separator:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        if field not in known:
            raise bad_request(f"field label not supported: {field}")
        path = ("source", "component") if field == "source" else tuple(field.split("."))
        requirements.append(FieldRequirement(path, value, "!=" not in part))
    return tuple(requirements)


Predicate = Callable[[Document], bool]


def predicate(labels: LabelSelector, fields: FieldSelector) -> Predicate | None:
    """Return the test that an object must pass, None when all do."""
    if not labels and not fields:
        return None

    def is_selected(document: Document) -> bool:
        own = document["metadata"].get("labels") or {}
        return all(entry.matches(own) for entry in labels) and all(entry.matches(document) for entry in fields)

    return is_selected
