"""What all models of the API are made of: the strict base, CEL rules, and types of fields that several of them have."""

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from unbroken_core.protocol.settings import Rule

LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DAY_S = 86_400
NO_PATTERN: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


def rule(expression: str, message: str, field_path: str = "") -> dict[str, str]:
    """Return one CEL rule of the schema; `field_path` names the field to blame."""
    return {"rule": expression, "message": message} | ({"fieldPath": field_path} if field_path else {})


def cel_rules(found: Iterable[Rule[Any]], field_path: str = "") -> list[dict[str, str]]:
    """Return the rules of a job's settings that the API server is to check, too; the field to blame is each one's."""
    return [rule(item.cel, item.cel_message, field_path or f".{item.field}") for item in found if item.cel]


def rules(*items: dict[str, str]) -> dict[str, Any]:
    """Return the schema extension that holds CEL rules."""
    return {"x-kubernetes-validations": list(items)}


class Model(BaseModel):
    """Strict: no unknown fields, no conversions, camelCase outside."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class TaintEffect(str, Enum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


Image = Annotated[str, Field(min_length=1, max_length=512)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY, min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE, max_length=63)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Quantity = Annotated[
    str | int,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64, "pattern": r"^[0-9.]+[A-Za-z0-9]*$"}),
]
Quantities = Annotated[dict[Annotated[str, Field(max_length=317)], Quantity], Field(max_length=32)]
Seconds = Annotated[int, Field(ge=1, le=30 * DAY_S)]
MAX_INT32 = 2_147_483_647


class Resources(Model):
    """Compute resources of a container, as in a pod."""

    requests: Quantities | None = None
    """Amounts that the container is sure to get, by resource name."""
    limits: Quantities | None = None
    """Most that the container may use, by resource name."""
