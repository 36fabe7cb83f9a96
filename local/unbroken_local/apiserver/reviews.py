"""Access reviews: the one user of this cluster may do everything."""

from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.kinds import Resource

_EVERYTHING = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}


def answer(resource: Resource, body: Document) -> Document:
    """Return the review with its status filled in."""
    status: Document = {"allowed": True, "reason": "the local cluster's only user may do everything"}
    if resource.kind == "SelfSubjectRulesReview":
        status = {"resourceRules": [_EVERYTHING], "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                  "incomplete": False}  # fmt: skip
    return {**body, "apiVersion": resource.api_version, "kind": resource.kind, "status": status}
