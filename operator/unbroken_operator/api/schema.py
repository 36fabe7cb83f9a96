"""Turns the pydantic models into the CustomResourceDefinition, as the API server wants it (a structural schema)."""

import inspect
from typing import Any

from pydantic import BaseModel

from unbroken_operator.api import layout
from unbroken_operator.api.model_base import rule, rules
from unbroken_operator.api.models import Spec
from unbroken_operator.api.status_models import Status

_KEPT = (
    "type",
    "format",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "default",
)


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a model without references, as CRDs want it."""
    source = model.model_json_schema(by_alias=True)
    return _convert(source, source.get("$defs", {}))


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as an object."""
    columns = [
        _column("State", "string", ".status.state", "The job in one word"),
        _column("Active", "integer", ".status.ranks.active", "Active ranks"),
        _column("Spare", "integer", ".status.ranks.spare", "Spare ranks"),
        # Only with -o wide: beside ranks and restarts it reads like training steps.
        _column("Iteration", "integer", ".status.iteration", "Current run of the training function", priority=1),
        _column("Restarts", "integer", ".status.restarts.total", "Recoveries so far"),
        _column("Last Cause", "string", ".status.lastInterruption.cause", "Why the job was last interrupted"),
        _column("ETTR", "number", ".status.ettr", "Share of the time that made progress"),
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    version = {
        "name": layout.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": _root_schema()},
    }
    names = {
        "kind": layout.KIND,
        "listKind": f"{layout.KIND}List",
        "plural": layout.PLURAL,
        "singular": layout.SINGULAR,
        "shortNames": [layout.SHORT_NAME],
        "categories": ["all", "unbroken"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": layout.CRD_NAME},
        "spec": {"group": layout.GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def without_cel(schema: Any) -> Any:
    """Return a copy without CEL rules, for API servers that do not know them (before Kubernetes 1.25)."""
    if isinstance(schema, dict):
        return {key: without_cel(value) for key, value in schema.items() if key != "x-kubernetes-validations"}
    if isinstance(schema, list):
        return [without_cel(item) for item in schema]
    return schema


def _root_schema() -> dict[str, Any]:
    name_rule = rule(
        f"self.metadata.name.size() <= {layout.MAX_JOB_NAME} && "
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        f"metadata.name: must be at most {layout.MAX_JOB_NAME} lowercase letters, digits and '-', beginning with a "
        "letter, since pods and a Service are named after it",
    )
    # A job that was accepted before there was this rule goes on; a new one has no status.
    suffix_rule = rule(
        f"!self.metadata.name.endsWith('{layout.SECRET_SUFFIX}') || (has(self.status) && has(self.status.accepted))",
        f"metadata.name: must not end with {layout.SECRET_SUFFIX}, since rendezvous pods of other jobs have such names",
    )
    return {
        "type": "object",
        "description": "A training job that survives faults of ranks, processes, pods and nodes.",
        "required": ["spec"],
        **rules(name_rule, suffix_rule),
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the API: unbroken.dev/v1alpha1."},
            "kind": {"type": "string", "description": "ResilientTrainingJob."},
            "metadata": {"type": "object"},
            "spec": structural_schema(Spec),
            "status": _without_defaults(structural_schema(Status)),
        },
    }


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without defaults: in a status, what nobody wrote is unknown."""
    result = {key: value for key, value in schema.items() if key != "default"}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = _without_defaults(result[key])
    if "properties" in result:
        result["properties"] = {name: _without_defaults(child) for name, child in result["properties"].items()}
    return result


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


def _convert(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = _resolve(node, definitions)
    if node.get("x-kubernetes-int-or-string"):
        node = {key: value for key, value in node.items() if key not in ("anyOf", "type")}
    result = {key: node[key] for key in _KEPT if key in node}
    result.update({key: value for key, value in node.items() if key.startswith("x-kubernetes-")})
    if "default" in result:
        result["default"] = _without_null(result["default"])
        if result["default"] is None:
            del result["default"]
    if node.get("description"):
        result["description"] = " ".join(inspect.cleandoc(node["description"]).split())
    if "properties" in node:
        result["properties"] = {name: _convert(child, definitions) for name, child in node["properties"].items()}
    if "items" in node:
        result["items"] = _convert(node["items"], definitions) | node.get("items_rules", {})
    values = _values_of_map(node)
    if values is not None:
        result["additionalProperties"] = _convert(values, definitions)
    return result


def _values_of_map(node: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a map's values: without it an API server drops every key.

    What keys look like cannot be said in a CRD; the operator checks it again, and so does whoever gets them.
    """
    if isinstance(node.get("additionalProperties"), dict):
        return dict(node["additionalProperties"])
    if "patternProperties" in node:
        (values,) = node["patternProperties"].values()
        return dict(values)
    return None


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow references and drop the null of optional fields; what stands beside a reference wins over it."""
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        (inner,) = (member for member in node["anyOf"] if member.get("type") != "null")
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return _merge(_resolve(inner, definitions), rest)
    if "$ref" in node:
        inner = _resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return _merge(inner, {key: value for key, value in node.items() if key != "$ref"})
    return node


def _merge(inner: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    return {**inner, **outer}
