"""Label and node selectors: pure predicates on labels."""

from collections.abc import Mapping

from unbroken_local.kube import Json

Labels = Mapping[str, str]


def matches_labels(selector: Json | None, labels: Labels) -> bool:
    """Return whether a LabelSelector selects these labels; None selects nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _matches(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def matches_node_term(term: Json, labels: Labels, name: str) -> bool:
    """Return whether a NodeSelectorTerm selects a node; an empty term selects none."""
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return False
    return all(_matches(e, labels) for e in expressions) and all(_matches(f, {"metadata.name": name}) for f in fields)


def _matches(expression: Json, labels: Labels) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            return _compares(operator, value, values)


def _compares(operator: str, value: str | None, values: list[str]) -> bool:
    """Return whether Gt or Lt holds; an unknown operator and what is no number never do."""
    try:
        left, right = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return left > right if operator == "Gt" else operator == "Lt" and left < right
