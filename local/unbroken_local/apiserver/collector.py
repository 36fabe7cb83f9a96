"""What follows from a deletion: dependents of owners, contents of namespaces, instances of custom kinds.

A queue of places to look at again. Each step looks at the present state alone, so a step may be repeated or lost and
found again by looking once more.
"""

from collections import deque
from collections.abc import Callable

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.definitions import CLEANUP
from unbroken_local.apiserver.documents import Document, as_list, copy_of, look_up
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.operations import DeleteOptions, Operations, WriteOptions
from unbroken_local.apiserver.store import Change, Key, Place, Stored

_NAMESPACES: Place = ("", "namespaces")
_DEFINITIONS: Place = ("apiextensions.k8s.io", "customresourcedefinitions")
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"


class Collector:
    """Looks after deletions. `wake` is called when there is something to do; `step` does it."""

    def __init__(self, operations: Operations, wake: Callable[[], None]) -> None:
        self._operations = operations
        self._store = operations.store
        self._wake = wake
        self._queue: deque[tuple[Place, Key]] = deque()
        self._queued: set[tuple[Place, Key]] = set()
        self._store.on_change.append(self._changed)

    def look_at_everything(self) -> None:
        """Queue all objects: after a snapshot was loaded."""
        for place in self._store.places():
            for key, _ in self._store.current(place):
                self._add(place, key)

    def step(self) -> bool:
        """Look at one object; return whether more is queued."""
        if self._queue:
            entry = self._queue.popleft()
            self._queued.discard(entry)
            self._look_at(*entry)
        return bool(self._queue)

    def _add(self, place: Place, key: Key) -> None:
        if (place, key) not in self._queued:
            self._queued.add((place, key))
            self._queue.append((place, key))
            self._wake()

    def _changed(self, place: Place, change: Change) -> None:
        document = change.current.document
        metadata = document["metadata"]
        if change.type == "DELETED":
            for dependent in self._store.dependents(str(metadata["uid"])):
                self._add(*dependent)
            for owner in as_list(metadata.get("ownerReferences")):
                self._add_owner(owner, change.key[0])
            self._add_container(place, change.key)
        elif metadata.get("ownerReferences") or "deletionTimestamp" in metadata:
            self._add(place, change.key)
            if change.previous is not None:
                for owner in as_list(change.previous.document["metadata"].get("ownerReferences")):
                    self._add_owner(owner, change.key[0])
        elif change.previous is not None and change.previous.document["metadata"].get("ownerReferences"):
            for owner in change.previous.document["metadata"]["ownerReferences"]:
                self._add_owner(owner, change.key[0])

    def _add_owner(self, reference: Document, namespace: str) -> None:
        resource = self._operations.catalogue.of_kind(reference["apiVersion"], reference["kind"])
        if resource is not None:
            key = (namespace if resource.namespaced else "", reference["name"])
            owner = self._store.get(resource.place, key)
            if owner is not None and "deletionTimestamp" in owner.document["metadata"]:
                self._add(resource.place, key)

    def _add_container(self, place: Place, key: Key) -> None:
        """Queue the namespace and the definition that may be waiting for this object to go."""
        namespace = self._store.get(_NAMESPACES, ("", key[0])) if key[0] else None
        if namespace is not None and "deletionTimestamp" in namespace.document["metadata"]:
            self._add(_NAMESPACES, ("", key[0]))
        name = f"{place[1]}.{place[0]}"
        definition = self._store.get(_DEFINITIONS, ("", name))
        if definition is not None and "deletionTimestamp" in definition.document["metadata"]:
            self._add(_DEFINITIONS, ("", name))

    def _look_at(self, place: Place, key: Key) -> None:
        stored = self._store.get(place, key)
        resource = self._operations.catalogue.of_place(place)
        if stored is None or resource is None:
            return
        metadata = stored.document["metadata"]
        if "deletionTimestamp" in metadata:
            finalizers = as_list(metadata.get("finalizers"))
            if _ORPHAN in finalizers:
                self._orphan(resource, key, stored)
            elif _FOREGROUND in finalizers:
                self._foreground(resource, key, stored)
            elif place == _NAMESPACES:
                self._empty_namespace(key[1])
            elif place == _DEFINITIONS and CLEANUP in finalizers:
                self._empty_definition(resource, key, stored)
            if "deletionTimestamp" in metadata and not metadata.get("ownerReferences"):
                return
        self._check_owners(resource, key, stored)

    # -- owners

    def _check_owners(self, resource: Resource, key: Key, stored: Stored) -> None:
        references = as_list(stored.document["metadata"].get("ownerReferences"))
        if not references:
            return
        states = [(entry, self._owner(entry, key[0])) for entry in references]
        solid = [entry for entry, owner in states if owner is _UNKNOWN or not _is_going(owner)]
        waiting = [entry for entry, owner in states if owner is not None and owner is not _UNKNOWN and _is_going(owner)]
        absent = [entry for entry, owner in states if owner is None]
        if solid and (absent or waiting):
            self._edit(resource, key, stored, {"ownerReferences": solid})
        elif not solid and waiting and "deletionTimestamp" not in stored.document["metadata"]:
            has_dependents = bool(self._store.dependents(stored.uid))
            self._delete(resource, key, stored, "Foreground" if has_dependents else "Background")
        elif not solid and not waiting and "deletionTimestamp" not in stored.document["metadata"]:
            kept = as_list(stored.document["metadata"].get("finalizers"))
            policy = "Orphan" if _ORPHAN in kept else "Foreground" if _FOREGROUND in kept else "Background"
            self._delete(resource, key, stored, policy)

    def _owner(self, reference: Document, namespace: str) -> "Stored | None":
        """Return the owner if its uid is the one meant, None if it is absent, _UNKNOWN if its kind is not served."""
        resource = self._operations.catalogue.of_kind(reference["apiVersion"], reference["kind"])
        if resource is None:
            return _UNKNOWN
        if resource.namespaced and not namespace:
            return None
        found = self._store.get(resource.place, (namespace if resource.namespaced else "", reference["name"]))
        return found if found is not None and found.uid == reference["uid"] else None

    def _orphan(self, resource: Resource, key: Key, owner: Stored) -> None:
        for place, dependent_key in self._store.dependents(owner.uid):
            dependent = self._store.get(place, dependent_key)
            kind = self._operations.catalogue.of_place(place)
            if dependent is not None and kind is not None:
                references = dependent.document["metadata"]["ownerReferences"]
                kept = [entry for entry in references if entry["uid"] != owner.uid]
                self._edit(kind, dependent_key, dependent, {"ownerReferences": kept})
        self._drop_finalizer(resource, key, owner, _ORPHAN)

    def _foreground(self, resource: Resource, key: Key, owner: Stored) -> None:
        blocking = False
        for place, dependent_key in self._store.dependents(owner.uid):
            dependent = self._store.get(place, dependent_key)
            if dependent is None:
                continue
            for reference in dependent.document["metadata"]["ownerReferences"]:
                blocking = blocking or (reference["uid"] == owner.uid and bool(reference.get("blockOwnerDeletion")))
            if "deletionTimestamp" not in dependent.document["metadata"]:
                self._add(place, dependent_key)
        if not blocking:
            self._drop_finalizer(resource, key, owner, _FOREGROUND)

    # -- containers

    def _empty_namespace(self, name: str) -> None:
        remaining = False
        for place in self._store.places():
            resource = self._operations.catalogue.of_place(place)
            if resource is None or not resource.namespaced:
                continue
            for key, stored in list(self._store.current(place, name)):
                if "deletionTimestamp" not in stored.document["metadata"]:
                    self._delete(resource, key, stored, "Background")
                remaining = remaining or self._store.get(place, key) is not None
        namespace = self._store.get(_NAMESPACES, ("", name))
        if not remaining and namespace is not None:
            self._finish_namespace(name, namespace)

    def _finish_namespace(self, name: str, namespace: Stored) -> None:
        document = copy_of(namespace.document)
        document["spec"] = {
            "finalizers": [entry for entry in document["spec"].get("finalizers", ()) if entry != "kubernetes"]
        }
        if document["spec"]["finalizers"] or document["metadata"].get("finalizers"):
            if document != namespace.document:
                self._store.put(_NAMESPACES, ("", name), document)
        else:
            self._store.remove(_NAMESPACES, ("", name))

    def _empty_definition(self, resource: Resource, key: Key, definition: Stored) -> None:
        spec = definition.document["spec"]
        place = (spec["group"], spec["names"]["plural"])
        instances = self._operations.catalogue.of_place(place)
        for instance_key, stored in list(self._store.current(place)):
            if instances is None:
                self._store.remove(place, instance_key)
            elif "deletionTimestamp" not in stored.document["metadata"]:
                self._delete(instances, instance_key, stored, "Background")
        if not self._store.collection(place).objects:
            self._drop_finalizer(resource, key, definition, CLEANUP)

    # -- writes

    def _delete(self, resource: Resource, key: Key, stored: Stored, propagation: str) -> None:
        options = DeleteOptions(propagation=propagation, uid=stored.uid)
        try:
            self._operations.delete(resource, key[0], key[1], options)
        except problems.ApiProblem:
            # Somebody was faster; whatever is there now will be looked at when it changes.
            return

    def _edit(self, resource: Resource, key: Key, stored: Stored, metadata: Document) -> None:
        patch = {"metadata": {**metadata, "uid": stored.uid}}
        patch["metadata"] = {name: entry or None for name, entry in patch["metadata"].items()}
        options = WriteOptions(manager="unbroken-local-collector", validation="Ignore")
        try:
            self._operations.patch(resource, key[0], key[1], "merge", patch, options=options)
        except problems.ApiProblem:
            return

    def _drop_finalizer(self, resource: Resource, key: Key, stored: Stored, finalizer: str) -> None:
        current = self._store.get(resource.place, key)
        if current is not None and current.uid == stored.uid:
            left = [entry for entry in as_list(current.document["metadata"].get("finalizers")) if entry != finalizer]
            self._edit(resource, key, current, {"finalizers": left})


_UNKNOWN = Stored({"metadata": {"uid": ""}}, 0)


def _is_going(owner: Stored | None) -> bool:
    """True for an owner that is absent, or is waiting for its dependents to go."""
    if owner is None:
        return True
    finalizers = as_list(look_up(owner.document, "metadata", "finalizers"))
    return "deletionTimestamp" in owner.document["metadata"] and _FOREGROUND in finalizers
