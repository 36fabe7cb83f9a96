"""Pure: the answer to an AdmissionReview of a ResilientTrainingJob, by the checks that the operator makes itself.

It refuses what a request changes, never what was there before: a job admitted by an earlier release can be labelled,
suspended and deleted; a warning says what is wrong with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import MAX_SHOWN, InvalidSpec, admit, admit_images
from unbroken_operator.decisions.limits.stored_status import believed

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
MAX_NAME = 253
"""Of what is put into the log."""


@dataclass(frozen=True)
class ReviewAnswer:
    """What is answered to the API server."""

    uid: str
    """That of the request."""
    job: str
    """Namespace and name, for the log."""
    refused: InvalidSpec | None = None
    """None lets the request pass."""
    warnings: tuple[str, ...] = ()
    """Shown to the user of a request that passes."""

    def to_json(self) -> dict[str, Any]:
        """Return the AdmissionReview."""
        response: dict[str, Any] = {"uid": self.uid, "allowed": self.refused is None}
        if self.refused is not None:
            response["status"] = {"code": 422, "reason": "Invalid", "message": self.refused.message}
        if self.warnings:
            response["warnings"] = list(self.warnings)
        return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def answer(review: Any, namespaces: tuple[str, ...], images: tuple[str, ...] = ()) -> ReviewAnswer:
    """Answer a review. `namespaces` are those of the operator, empty for all; jobs elsewhere are another operator's.

    `images` are those that a rendezvous may have, empty for any.

    Raises InputError for anything but a review of a ResilientTrainingJob.
    """
    request = _request(review)
    item = request.get("object")
    before = request.get("oldObject") or None
    if request.get("operation") not in ("CREATE", "UPDATE"):
        return ReviewAnswer(request["uid"], "")
    if not isinstance(item, dict) or not isinstance(before, dict | None):
        raise InputError(f"AdmissionReview.request.object: expected a {layout.KIND}, got {type(item).__name__}")
    job = _as_stored(item, before, request)
    words = f"{job['metadata']['namespace'][:MAX_NAME]}/{job['metadata']['name'][:MAX_NAME]}"
    is_ours = not namespaces or job["metadata"]["namespace"] in namespaces
    if not is_ours or job["metadata"].get("deletionTimestamp"):
        return ReviewAnswer(request["uid"], words)
    found, warned = _judged(job, images)
    known = frozenset(() if before is None else _judged(_as_stored(before, before, request), images)[0])
    new = tuple(violation for violation in found if violation not in known)
    if new:
        return ReviewAnswer(request["uid"], words, InvalidSpec(new))
    return ReviewAnswer(request["uid"], words, warnings=(*_warnings(found), *warned))


def _request(review: Any) -> dict[str, Any]:
    found = review if isinstance(review, dict) else {}
    if (found.get("apiVersion"), found.get("kind")) != (API_VERSION, KIND):
        seen = f"{found.get('kind')} of {found.get('apiVersion')}"
        raise InputError(f"body: expected an {KIND} of {API_VERSION}, got {seen[:200]}")
    request = found.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str) or len(request["uid"]) > MAX_NAME:
        raise InputError(f"AdmissionReview.request.uid: must be a string of at most {MAX_NAME} characters")
    resource = request.get("resource")
    name = resource.get("resource") if isinstance(resource, dict) else None
    if name != layout.PLURAL:
        raise InputError(f"AdmissionReview.request.resource: expected {layout.PLURAL}, got {str(name)[:200]}")
    return request


def _as_stored(
    item: Mapping[str, Any], before: Mapping[str, Any] | None, request: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the object as the operator will see it: a user cannot write its status, and it has a name."""
    metadata = item.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    filled = {
        "name": str(metadata.get("name") or request.get("name") or f"{metadata.get('generateName', '')}xxxxx"),
        "namespace": str(metadata.get("namespace") or request.get("namespace") or "default"),
        "uid": str(metadata.get("uid") or request["uid"]),
    }
    status = (before or {}).get("status")
    accepted = status.get("accepted") if isinstance(status, dict) else None
    known, _ = believed({"accepted": accepted} if isinstance(accepted, dict) else {})
    return {**item, "metadata": {**metadata, **filled}, "status": known}


def _warnings(found: tuple[str, ...]) -> tuple[str, ...]:
    num_more = len(found) - MAX_SHOWN
    return (*found[:MAX_SHOWN], f"and {num_more} more") if num_more > 0 else found


def _judged(job: Mapping[str, Any], images: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is wrong with a job, and what its user is warned of."""
    verdict = admit_images(admit(job), images)
    return (verdict.violations, ()) if isinstance(verdict, InvalidSpec) else ((), verdict.warnings)
