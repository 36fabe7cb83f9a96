"""Maps of the API keep what users write into them."""

from collections.abc import Iterator
from typing import Any

from unbroken_operator.api.models import Spec
from unbroken_operator.api.schema import structural_schema
from unbroken_operator.api.status_models import Status


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a schema and all below it, by path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def test_no_object_of_the_api_loses_its_keys_to_an_api_server() -> None:
    """One without properties, without values and without leave to keep them is stored empty, whatever was sent."""
    found = [*nodes(structural_schema(Spec), "spec"), *nodes(structural_schema(Status), "status")]
    objects = {path: schema for path, schema in found if schema.get("type") == "object"}
    keepers = ("properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields")
    assert "spec.template.metadata.labels" in objects
    assert [path for path, schema in objects.items() if not any(key in schema for key in keepers)] == []
