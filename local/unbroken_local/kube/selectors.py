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
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or []
    value = labels.get(key)
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    if operator in {"Gt", "Lt"} and value is not None and len(values) == 1:
        try:
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        except ValueError:
            return False
    return False
