"""One object, several versions: events in both their forms, custom resources by their apiVersion alone."""

from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.kinds import Resource

_NEW_EVENT = "events.k8s.io/v1"
# (events.k8s.io, core)
_RENAMED = (
    ("note", "message"),
    ("regarding", "involvedObject"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
)


def is_new_event(resource: Resource) -> bool:
    return resource.api_version == _NEW_EVENT


def served(resource: Resource, document: Document) -> Document:
    """Return the stored document in the version of the resource; the same object where nothing differs."""
    if document.get("apiVersion") == resource.api_version:
        return document
    result = {**document, "apiVersion": resource.api_version}
    if is_new_event(resource):
        for new, core in _RENAMED:
            if core in result:
                result[new] = result.pop(core)
    return result


def core_event(body: Document) -> Document:
    """Return an events.k8s.io/v1 event as it is stored, a core event."""
    result = {**body, "apiVersion": "v1"}
    for new, core in _RENAMED:
        if new in result:
            result[core] = result.pop(new)
    return result
