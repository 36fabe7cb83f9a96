"""CEL rules of a CRD (`x-kubernetes-validations`), evaluated with cel-python.

Not there: type checks and cost estimates when a CRD is created, `optionalOldSelf`, and the IP, CIDR, URL, quantity,
format and semver libraries. A rule that uses them is refused when its CRD is created, or fails when it is evaluated.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError

from unbroken_local.apiserver.documents import Document, as_dict, as_list
from unbroken_local.apiserver.problems import Cause
from unbroken_local.apiserver.schema import list_type, map_keys

KEYWORD = "x-kubernetes-validations"
_RESERVED = frozenset(
    {"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if", "import",
     "let", "loop", "package", "namespace", "return", "var", "void", "while"}
)  # fmt: skip
_REASONS = frozenset({"FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"})
_WORDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class BadRule(Exception):
    """A rule that cannot be compiled."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One compiled rule. `message_program` makes the message from self, where one is given."""

    text: str
    program: Any
    message: str
    message_program: Any
    reason: str
    field_path: str
    is_transition: bool


@dataclass(slots=True)
class Ruled:
    """The rules of one schema and of all below it that have any."""

    schema: Document
    rules: tuple[Rule, ...] = ()
    properties: dict[str, "Ruled"] = field(default_factory=dict)
    additional: "Ruled | None" = None
    items: "Ruled | None" = None


# -- functions that Kubernetes adds to CEL


def _find(text: Any, pattern: Any) -> Any:
    found = re.search(str(pattern), str(text))
    return celtypes.StringType(found.group() if found else "")


def _find_all(text: Any, pattern: Any, limit: Any = -1) -> Any:
    found = [celtypes.StringType(entry.group()) for entry in re.finditer(str(pattern), str(text))]
    return celtypes.ListType(found if int(limit) < 0 else found[: int(limit)])


def _split(text: Any, separator: Any, limit: Any = -1) -> Any:
    parts = list(text) if not separator else str(text).split(str(separator), int(limit) - 1 if int(limit) > 0 else -1)
    return celtypes.ListType([celtypes.StringType(part) for part in parts])


def _index_of(value: Any, wanted: Any) -> Any:
    if isinstance(value, str):
        return celtypes.IntType(value.find(str(wanted)))
    return celtypes.IntType(next((place for place, entry in enumerate(value) if entry == wanted), -1))


def _last_index_of(value: Any, wanted: Any) -> Any:
    if isinstance(value, str):
        return celtypes.IntType(value.rfind(str(wanted)))
    return celtypes.IntType(max((place for place, entry in enumerate(value) if entry == wanted), default=-1))


def _is_sorted(values: Any) -> Any:
    return celtypes.BoolType(all(one <= two for one, two in pairwise(values)))


def _sum(values: Any) -> Any:
    total = celtypes.IntType(0)
    for value in values:
        total = value + total
    return total


def _substring(text: Any, start: Any, end: Any = None) -> Any:
    return celtypes.StringType(str(text)[int(start) : None if end is None else int(end)])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "find": _find,
    "findAll": _find_all,
    "split": _split,
    "indexOf": _index_of,
    "lastIndexOf": _last_index_of,
    "isSorted": _is_sorted,
    "sum": _sum,
    "min": min,
    "max": max,
    "substring": _substring,
    "join": lambda values, separator="": celtypes.StringType(str(separator).join(str(entry) for entry in values)),
    "lowerAscii": lambda text: celtypes.StringType(str(text).lower()),
    "upperAscii": lambda text: celtypes.StringType(str(text).upper()),
    "trim": lambda text: celtypes.StringType(str(text).strip()),
    "replace": lambda text, old, new: celtypes.StringType(str(text).replace(str(old), str(new))),
    "charAt": lambda text, place: celtypes.StringType(str(text)[int(place) : int(place) + 1]),
}


@lru_cache(maxsize=1024)
def _program(text: str) -> Any:
    environment = celpy.Environment()
    try:
        return environment.program(environment.compile(text), functions=_FUNCTIONS)
    except CELParseError as problem:
        raise BadRule(f"compilation failed: {problem}") from problem


def _rule(entry: Document) -> Rule:
    text = str(entry.get("rule") or "")
    expression = entry.get("messageExpression")
    reason = entry.get("reason")
    return Rule(
        text=text,
        program=_program(text),
        message=str(entry.get("message") or ""),
        message_program=_program(str(expression)) if expression else None,
        reason=str(reason) if reason in _REASONS else "FieldValueInvalid",
        field_path=str(entry.get("fieldPath") or ""),
        is_transition=re.search(r"\boldSelf\b", text) is not None,
    )


def compile_rules(schema: Document) -> Ruled | None:
    """Return the compiled rules of a schema, None if it has none. Raises BadRule."""
    node = Ruled(schema, tuple(_rule(entry) for entry in as_list(schema.get(KEYWORD))))
    for name, below in as_dict(schema.get("properties")).items():
        found = compile_rules(below)
        if found is not None:
            node.properties[name] = found
    if isinstance(schema.get("additionalProperties"), dict):
        node.additional = compile_rules(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        node.items = compile_rules(schema["items"])
    return node if node.rules or node.properties or node.additional or node.items else None


def _escaped(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    for sign, word in (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")):
        name = name.replace(sign, word)
    return name


def _to_cel(value: Any, schema: Document) -> Any:
    """Return the value as CEL sees it: numbers by the schema's type, property names escaped."""
    if isinstance(value, dict):
        named, additional = as_dict(schema.get("properties")), as_dict(schema.get("additionalProperties"))
        return celtypes.MapType(
            {
                celtypes.StringType(_escaped(name) if name in named else name): _to_cel(
                    entry, as_dict(named.get(name, additional))
                )
                for name, entry in value.items()
            }
        )
    if isinstance(value, list):
        items = as_dict(schema.get("items"))
        return celtypes.ListType([_to_cel(entry, items) for entry in value])
    if isinstance(value, (int, float)) and not isinstance(value, bool) and schema.get("type") == "number":
        return celtypes.DoubleType(value)
    if isinstance(value, str) and schema.get("format") == "date-time":
        return celtypes.TimestampType(value)
    return json_to_cel(value)


_ABSENT = object()


def rule_violations(node: Ruled, value: Any, old: Any, path: str) -> Iterator[Cause]:
    """Yield a cause for each rule that does not hold. `old`: the value that this one replaces, None at creation."""
    yield from _violations(node, value, _ABSENT if old is None else old, path)


def _violations(node: Ruled, value: Any, old: Any, path: str) -> Iterator[Cause]:
    if value is None:
        return
    for rule in node.rules:
        if not rule.is_transition or old is not _ABSENT:
            yield from _check(rule, node.schema, value, old, path)
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, entry in value.items():
            below = node.properties.get(name)
            if below is None and name not in as_dict(node.schema.get("properties")):
                below = node.additional
            if below is not None:
                yield from _violations(below, entry, before.get(name, _ABSENT), f"{path}.{name}" if path else name)
    elif isinstance(value, list) and node.items is not None:
        for number, entry in enumerate(value):
            yield from _violations(node.items, entry, _same_entry(node.schema, entry, old), f"{path}[{number}]")


def _same_entry(schema: Document, entry: Any, old: Any) -> Any:
    """Return the entry of the old list with the same keys: only lists of type map let entries be compared."""
    if not isinstance(old, list) or list_type(schema) != "map" or not isinstance(entry, dict):
        return _ABSENT
    keys = map_keys(schema)
    return next((other for other in old if all(as_dict(other).get(key) == entry.get(key) for key in keys)), _ABSENT)


def _check(rule: Rule, schema: Document, value: Any, old: Any, path: str) -> Iterator[Cause]:
    names = {"self": _to_cel(value, schema)}
    if old is not _ABSENT:
        names["oldSelf"] = _to_cel(old, schema)
    where = path + rule.field_path if path else rule.field_path.lstrip(".")
    shown = f'"{_WORDS[type(value)]}"' if isinstance(value, (dict, list)) else _shown(value)
    try:
        if rule.program.evaluate(names):
            return
        detail = _message(rule, names)
    except (CELEvalError, ValueError, TypeError) as problem:
        detail = f"rule evaluation error: {problem}"
    yield Cause(rule.reason, where, _opening(rule.reason, shown) + detail)


def _opening(reason: str, shown: str) -> str:
    words = {"FieldValueForbidden": "Forbidden: ", "FieldValueRequired": "Required value: ",
             "FieldValueDuplicate": f"Duplicate value: {shown}: "}  # fmt: skip
    return words.get(reason, f"Invalid value: {shown}: ")


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _message(rule: Rule, names: dict[str, Any]) -> str:
    if rule.message_program is not None:
        try:
            text = str(rule.message_program.evaluate(names))
        except (CELEvalError, ValueError, TypeError):
            text = ""
        if text.strip() and "\n" not in text:
            return text
    return rule.message or f"failed rule: {rule.text}"
