"""Refusals as Kubernetes `Status` objects: code, reason, message, details."""

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken_local.apiserver.documents import Document


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that is wrong. `reason` is a metav1.CauseType, `kind` the words that open its message."""

    reason: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def shown(value: object) -> str:
    """Return the value as the API quotes it in messages."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return str(value)


def required(field: str, detail: str = "") -> Cause:
    return Cause("FieldValueRequired", field, "Required value" + (f": {detail}" if detail else ""))


def invalid_value(field: str, value: object, detail: str) -> Cause:
    return Cause("FieldValueInvalid", field, f"Invalid value: {shown(value)}: {detail}")


def wrong_type(field: str, value: object, detail: str) -> Cause:
    return Cause("FieldValueTypeInvalid", field, f"Invalid value: {shown(value)}: {detail}")


def forbidden_value(field: str, detail: str) -> Cause:
    return Cause("FieldValueForbidden", field, f"Forbidden: {detail}")


def duplicate(field: str, value: object) -> Cause:
    return Cause("FieldValueDuplicate", field, f"Duplicate value: {shown(value)}")


def unsupported(field: str, value: object, wanted: Sequence[object]) -> Cause:
    return Cause(
        "FieldValueNotSupported",
        field,
        f"Unsupported value: {shown(value)}: supported values: {', '.join(shown(entry) for entry in wanted)}",
    )


def too_long(field: str, limit: int) -> Cause:
    return Cause("FieldValueTooLong", field, f"Too long: may not be more than {limit} bytes")


class ApiProblem(Exception):
    """A request that is refused; becomes the answer's body and HTTP status."""

    def __init__(self, code: int, reason: str, message: str, *, details: Document | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> Document:
        """Return the Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }


def _details(group: str, kind: str, name: str) -> Document:
    return {key: value for key, value in (("name", name), ("group", group), ("kind", kind)) if value}


def _qualified(group: str, plural: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(group: str, plural: str, name: str) -> ApiProblem:
    message = f'{_qualified(group, plural)} "{name}" not found'
    return ApiProblem(404, "NotFound", message, details=_details(group, plural, name))


def no_such_path() -> ApiProblem:
    return ApiProblem(404, "NotFound", "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiProblem:
    message = f'{_qualified(group, plural)} "{name}" already exists'
    return ApiProblem(409, "AlreadyExists", message, details=_details(group, plural, name))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(group: str, plural: str, name: str, detail: str = MODIFIED) -> ApiProblem:
    message = f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {detail}'
    return ApiProblem(409, "Conflict", message, details=_details(group, plural, name))


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiProblem:
    texts = [str(cause) for cause in causes]
    listed = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details = _details(group, kind, name)
    details["causes"] = [{"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes]
    qualified = f"{kind}.{group}" if group else kind
    return ApiProblem(422, "Invalid", f'{qualified} "{name}" is invalid: {listed}', details=details)


def bad_request(message: str) -> ApiProblem:
    return ApiProblem(400, "BadRequest", message)


def forbidden(group: str, plural: str, name: str, detail: str, causes: Sequence[Cause] = ()) -> ApiProblem:
    details = _details(group, plural, name)
    if causes:
        details["causes"] = [
            {"reason": entry.reason, "message": entry.message, "field": entry.field} for entry in causes
        ]
    return ApiProblem(403, "Forbidden", f'{_qualified(group, plural)} "{name}" is forbidden: {detail}', details=details)


def unauthorized() -> ApiProblem:
    return ApiProblem(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> ApiProblem:
    return ApiProblem(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_media_type(wanted: Sequence[str]) -> ApiProblem:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(wanted)}"
    return ApiProblem(415, "UnsupportedMediaType", message)


def too_large(limit_bytes: int) -> ApiProblem:
    return ApiProblem(413, "RequestEntityTooLarge", f"Request entity too large: limit is {limit_bytes}")


def not_acceptable(wanted: Sequence[str]) -> ApiProblem:
    message = f"only the following media types are accepted: {', '.join(wanted)}"
    return ApiProblem(406, "NotAcceptable", message)


def too_old(asked: int, oldest: int) -> ApiProblem:
    return ApiProblem(410, "Expired", f"too old resource version: {asked} ({oldest})")


def too_new(asked: int, current: int) -> ApiProblem:
    return ApiProblem(
        504,
        "Timeout",
        f"Too large resource version: {asked}, current: {current}",
        details={
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1,
        },
    )


def apply_conflict(count: int, causes: Sequence[Cause]) -> ApiProblem:
    plural = "s" if count != 1 else ""
    listed = ", ".join(f"{cause.message}: {cause.field}" for cause in causes)
    listed = listed if count == 1 else "".join(f"\n{cause.message}:\n- {cause.field}" for cause in causes)
    details = {"causes": [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]}
    return ApiProblem(409, "Conflict", f"Apply failed with {count} conflict{plural}: {listed}", details=details)
