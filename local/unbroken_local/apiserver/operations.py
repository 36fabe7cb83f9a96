"""Create, replace, patch and delete: from a request's document to the next version in the store. No I/O, no waiting."""

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.checks import check_document, check_finalizers, check_metadata
from unbroken_local.apiserver.defaults import complete_create, complete_update, fill_defaults
from unbroken_local.apiserver.definitions import check_custom
from unbroken_local.apiserver.documents import Document, as_dict, as_list, copy_of, look_up, time_text
from unbroken_local.apiserver.kinds import Catalogue, Resource
from unbroken_local.apiserver.ownership import (
    ApplyConflict,
    Manager,
    apply_configuration,
    record_update,
)
from unbroken_local.apiserver.patches import json_patch, merge_patch, strategic_merge
from unbroken_local.apiserver.reading import read_document
from unbroken_local.apiserver.schema import object_schema
from unbroken_local.apiserver.store import Key, Store, Stored

PatchType = Literal["json", "merge", "strategic", "apply"]
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_LONGEST_BASE = 58
_ATTEMPTS = 5


@dataclass(slots=True)
class WriteOptions:
    """What a write's query says. `warnings` is filled for the answer's headers."""

    dry_run: bool = False
    manager: str = "unknown"
    validation: Literal["Strict", "Warn", "Ignore"] = "Warn"
    force: bool = False
    subresource: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """None means that the kind's own default holds. `grace_s`: seconds that a running pod has to end."""

    grace_s: int | None = None
    propagation: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False


class Operations:
    """All writes of the cluster. `now` gives seconds since the epoch."""

    def __init__(self, store: Store, catalogue: Catalogue, now: Callable[[], float]) -> None:
        self.store = store
        self.catalogue = catalogue
        self.now = now

    def get(self, resource: Resource, namespace: str, name: str) -> Stored:
        """Return the newest version. Raises ApiProblem (404)."""
        stored = self.store.get(resource.place, (namespace, name))
        if stored is None:
            raise problems.not_found(resource.group, resource.plural, name)
        return stored

    # -- create

    def create(self, resource: Resource, namespace: str, body: Document, options: WriteOptions) -> Stored:
        """Store a new object. Raises ApiProblem: 400, 403, 404 (namespace), 409, 422."""
        document = read_document(resource, body, options)
        metadata = document["metadata"]
        if metadata.get("resourceVersion"):
            raise problems.bad_request("resourceVersion should not be set on objects to be created")
        self._check_namespace(resource, namespace, metadata)
        self._set_identity(resource, namespace, metadata)
        record_update(resource, None, document, self._manager(resource, options, "Update"))
        return self._insert(resource, namespace, document, options)

    def _insert(self, resource: Resource, namespace: str, document: Document, options: WriteOptions) -> Stored:
        metadata = document["metadata"]
        if resource.custom and resource.has_status:
            document.pop("status", None)
        if resource.custom or resource.subresources:
            metadata["generation"] = 1
        fill_defaults(resource, document)
        key = (namespace, metadata["name"])
        causes = check_metadata(resource, document)
        if not causes:
            complete_create(resource, document, self.store)
        causes += self._check(resource, document, None)
        if causes:
            raise problems.invalid(resource.group, resource.kind, metadata["name"], causes)
        if self.store.get(resource.place, key) is not None:
            raise problems.already_exists(resource.group, resource.plural, metadata["name"])
        if options.dry_run:
            return Stored(document, self.store.revision)
        return self.store.put(resource.place, key, document)

    def _check_namespace(self, resource: Resource, namespace: str, metadata: Document) -> None:
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.setdefault("namespace", namespace) != namespace:
            detail = "the namespace of the provided object does not match the namespace sent on the request"
            raise problems.bad_request(detail)
        found = self.store.get(("", "namespaces"), ("", namespace))
        if found is None:
            raise problems.not_found("", "namespaces", namespace)
        if look_up(found.document, "metadata", "deletionTimestamp"):
            name = metadata.get("name") or metadata.get("generateName", "")
            detail = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = problems.Cause(
                "NamespaceTerminating", "metadata.namespace", f"namespace {namespace} is being terminated"
            )
            raise problems.forbidden(resource.group, resource.plural, name, detail, [cause])

    def _set_identity(self, resource: Resource, namespace: str, metadata: Document) -> None:
        base = metadata.get("generateName")
        if not metadata.get("name") and isinstance(base, str) and base:
            for _ in range(_ATTEMPTS):
                suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(5))
                metadata["name"] = base[:_LONGEST_BASE] + suffix
                if self.store.get(resource.place, (namespace, metadata["name"])) is None:
                    break
        for name in ("resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"):
            metadata.pop(name, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = time_text(self.now())
        if not metadata.get("name"):
            cause = problems.required("metadata.name", "name or generateName is required")
            raise problems.invalid(resource.group, resource.kind, "", [cause])

    # -- update

    def update(self, resource: Resource, namespace: str, name: str, body: Document, options: WriteOptions) -> Stored:
        """Replace the object, or its status. Raises ApiProblem: 400, 404, 409 (stale), 422."""
        document = read_document(resource, body, options)
        if document["metadata"].setdefault("name", name) != name:
            seen = document["metadata"]["name"]
            raise problems.bad_request(f"the name of the object ({seen}) does not match the name on the URL ({name})")
        stored = self.get(resource, namespace, name)
        if resource.custom and not document["metadata"].get("resourceVersion"):
            cause = problems.Cause("FieldValueInvalid", "metadata.resourceVersion",
                                   "Invalid value: 0: must be specified for an update")  # fmt: skip
            raise problems.invalid(resource.group, resource.kind, name, [cause])
        return self._replace(resource, stored, document, options, "Update")

    def _replace(
        self, resource: Resource, stored: Stored, document: Document, options: WriteOptions, operation: str
    ) -> Stored:
        old = stored.document
        self._check_unchanged(resource, stored, document["metadata"])
        self._carry_over(resource, old, document, options.subresource)
        # An object stays in the version that it was made in; all others are made when it is read.
        document["apiVersion"] = old["apiVersion"]
        fill_defaults(resource, document)
        complete_update(resource, old, document)
        self._check_namespace_kept(resource, old, document)
        if operation == "Update":
            manager = self._manager(resource, options, "Update")
            record_update(resource, old, document, manager)
        if document == old:
            return stored
        if self._is_new_generation(resource, old, document):
            document["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        causes = check_metadata(resource, document) + check_finalizers(old, document)
        causes += self._check(resource, document, old)
        if causes:
            raise problems.invalid(resource.group, resource.kind, old["metadata"]["name"], causes)
        if options.dry_run:
            return Stored(document, stored.revision)
        key = (old["metadata"].get("namespace", ""), old["metadata"]["name"])
        written = self.store.put(resource.place, key, document)
        return self._finish_deletion(resource, key, written)

    def _check_unchanged(self, resource: Resource, stored: Stored, metadata: Document) -> None:
        name = stored.document["metadata"]["name"]
        version, uid = metadata.get("resourceVersion"), metadata.get("uid")
        if uid and uid != stored.uid:
            detail = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {stored.uid}"
            raise problems.conflict(resource.group, resource.plural, name, detail)
        if version and version != str(stored.revision):
            raise problems.conflict(resource.group, resource.plural, name)

    def _carry_over(self, resource: Resource, old: Document, document: Document, subresource: str) -> None:
        """Keep what this request may not change: identity, deletion, and status or all but status."""
        before, after = old["metadata"], document["metadata"]
        if subresource == "status":
            status = document.get("status")
            kept = as_list(after.get("managedFields"))
            for name in list(document):
                if name not in ("metadata", "status"):
                    del document[name]
            document.update({name: entry for name, entry in old.items() if name not in ("metadata", "status")})
            if status is None:
                document.pop("status", None)
            if resource.custom:
                document["metadata"] = after = {**before, "managedFields": kept or before.get("managedFields", [])}
        elif resource.has_status:
            document.pop("status", None)
            if "status" in old:
                document["status"] = old["status"]
        for name in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation",
                     "resourceVersion", "namespace", "generateName"):  # fmt: skip
            after.pop(name, None)
            if name in before:
                after[name] = before[name]
        after["name"] = before["name"]

    def _check_namespace_kept(self, resource: Resource, old: Document, document: Document) -> None:
        if resource.place == ("", "namespaces") and old.get("spec") and not as_dict(document.get("spec")):
            document["spec"] = old["spec"]

    @staticmethod
    def _is_new_generation(resource: Resource, old: Document, document: Document) -> bool:
        if "generation" not in old["metadata"]:
            return False
        ignored = {"metadata", "status"} if resource.has_status else {"metadata"}
        return {k: v for k, v in old.items() if k not in ignored} != {
            k: v for k, v in document.items() if k not in ignored
        }

    def _check(self, resource: Resource, document: Document, old: Document | None) -> list[problems.Cause]:
        if resource.custom:
            return check_custom(resource, document, old)
        return check_document(resource, document, old)

    def _manager(self, resource: Resource, options: WriteOptions, operation: Literal["Apply", "Update"]) -> Manager:
        return Manager(options.manager, operation, resource.api_version, options.subresource, time_text(self.now()))

    # -- patch

    def patch(
        self, resource: Resource, namespace: str, name: str, kind: PatchType, patch: object, *, options: WriteOptions
    ) -> tuple[Stored, bool]:
        """Return the patched object and whether it was made by this (apply only). Raises ApiProblem as update does."""
        if kind == "apply":
            return self._apply(resource, namespace, name, patch, options)
        stored = self.get(resource, namespace, name)
        document = self._patched(resource, {**stored.document, "apiVersion": resource.api_version}, kind, patch)
        if as_dict(document.get("metadata")).get("name") != name:
            raise problems.bad_request("metadata.name: the name of an object cannot be changed")
        document = read_document(resource, document, options)
        return self._replace(resource, stored, document, options, "Update"), False

    @staticmethod
    def _patched(resource: Resource, document: Document, kind: PatchType, patch: object) -> Document:
        if kind == "json":
            return json_patch(document, patch)
        if not isinstance(patch, dict):
            raise problems.bad_request("error decoding patch: want a JSON object")
        if kind == "merge":
            merged: Document = merge_patch(document, patch)
            return copy_of(merged) if merged is document else merged
        if resource.custom:
            raise problems.unsupported_media_type(
                ["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"]
            )
        return strategic_merge(document, patch, object_schema(resource.schema))

    def _apply(
        self, resource: Resource, namespace: str, name: str, patch: object, options: WriteOptions
    ) -> tuple[Stored, bool]:
        if not isinstance(patch, dict):
            raise problems.bad_request("error decoding YAML: want an object")
        applied = read_document(resource, patch, options)
        self._check_applied(resource, name, namespace, applied["metadata"])
        manager = self._manager(resource, options, "Apply")
        stored = self.store.get(resource.place, (namespace, name))
        if stored is None and options.subresource:
            raise problems.not_found(resource.group, resource.plural, name)
        if stored is None:
            self._check_namespace(resource, namespace, applied["metadata"])
        try:
            merged = apply_configuration(resource, stored.document if stored else None, applied, manager, options.force)
        except ApplyConflict as conflict:
            raise problems.apply_conflict(len(conflict.causes), conflict.causes) from conflict
        if stored is None:
            self._set_identity(resource, namespace, merged["metadata"])
            return self._insert(resource, namespace, merged, options), True
        version = applied["metadata"].get("resourceVersion")
        merged["metadata"]["resourceVersion"] = version or str(stored.revision)
        return self._replace(resource, stored, merged, options, "Apply"), False

    def _check_applied(self, resource: Resource, name: str, namespace: str, metadata: Document) -> None:
        if metadata.get("managedFields"):
            raise problems.bad_request("metadata.managedFields must be nil")
        if metadata.setdefault("name", name) != name:
            seen = metadata["name"]
            raise problems.bad_request(f"the name of the object ({seen}) does not match the name on the URL ({name})")
        if resource.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            detail = "the namespace of the provided object does not match the namespace sent on the request"
            raise problems.bad_request(detail)

    # -- delete

    def delete(self, resource: Resource, namespace: str, name: str, options: DeleteOptions) -> tuple[Stored, bool]:
        """Delete, or begin to. Return the last version and whether it is gone. Raises ApiProblem: 404, 409, 422."""
        stored = self.get(resource, namespace, name)
        self._check_preconditions(resource, stored, options)
        if options.propagation not in (None, "Background", "Foreground", "Orphan"):
            cause = problems.unsupported(
                "propagationPolicy", options.propagation, ["Background", "Foreground", "Orphan"]
            )
            raise problems.invalid("", "DeleteOptions", "", [cause])
        document = copy_of(stored.document)
        metadata = document["metadata"]
        _set_finalizers(metadata, options.propagation)
        grace_s = _grace_s(resource, document, options.grace_s)
        pending = bool(metadata.get("finalizers")) or _has_content(resource, document)
        if options.dry_run:
            return stored, not grace_s and not pending
        if not grace_s and not pending:
            return self.store.remove(resource.place, (namespace, name)), True
        self._stamp_deletion(resource, document, grace_s)
        if document != stored.document:
            stored = self.store.put(resource.place, (namespace, name), document)
        return stored, False

    def _check_preconditions(self, resource: Resource, stored: Stored, options: DeleteOptions) -> None:
        name = stored.document["metadata"]["name"]
        if options.uid and options.uid != stored.uid:
            detail = f"Precondition failed: UID in precondition: {options.uid}, UID in object meta: {stored.uid}"
            raise problems.conflict(resource.group, resource.plural, name, detail)
        if options.resource_version and options.resource_version != str(stored.revision):
            detail = (f"Precondition failed: ResourceVersion in precondition: {options.resource_version}, "
                      f"ResourceVersion in object meta: {stored.revision}")  # fmt: skip
            raise problems.conflict(resource.group, resource.plural, name, detail)

    def _stamp_deletion(self, resource: Resource, document: Document, grace_s: int) -> None:
        metadata = document["metadata"]
        earlier = metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" not in metadata or (earlier is not None and grace_s < earlier):
            metadata["deletionTimestamp"] = time_text(self.now() + grace_s)
            metadata["deletionGracePeriodSeconds"] = grace_s
            if "generation" in metadata:
                metadata["generation"] += 1
        if resource.place == ("", "namespaces"):
            document["status"] = {**as_dict(document.get("status")), "phase": "Terminating"}

    def _finish_deletion(self, resource: Resource, key: Key, written: Stored) -> Stored:
        """Remove an object whose last finalizer just went."""
        metadata = written.document["metadata"]
        waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" not in metadata or waits or _has_content(resource, written.document):
            return written
        return self.store.remove(resource.place, key)


def _set_finalizers(metadata: Document, propagation: str | None) -> None:
    """Turn the propagation policy into the garbage collector's finalizers."""
    wanted = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(propagation or "")
    others = [entry for entry in metadata.get("finalizers") or () if entry not in ("foregroundDeletion", "orphan")]
    if propagation is None:
        return
    finalizers = [*others, wanted] if wanted else others
    if finalizers:
        metadata["finalizers"] = finalizers
    else:
        metadata.pop("finalizers", None)


def _grace_s(resource: Resource, document: Document, asked: int | None) -> int:
    """Return the seconds that the object has to end: only pods that may run somewhere have any."""
    if resource.place != ("", "pods"):
        return 0
    finished = look_up(document, "status", "phase") in ("Succeeded", "Failed")
    if finished or not look_up(document, "spec", "nodeName"):
        return 0
    own = look_up(document, "spec", "terminationGracePeriodSeconds")
    grace_s: int = asked if asked is not None else own if own is not None else 30
    earlier = document["metadata"].get("deletionGracePeriodSeconds")
    return max(0, grace_s) if earlier is None else max(0, min(grace_s, earlier))


def _has_content(resource: Resource, document: Document) -> bool:
    """True for a namespace whose finalizer (spec.finalizers) has not been taken off by the collector."""
    return resource.place == ("", "namespaces") and bool(as_list(look_up(document, "spec", "finalizers")))
