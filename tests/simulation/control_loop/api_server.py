"""An API server in virtual time: objects with versions and uids, conflicts, deletions that wait, and watches.

What is stored changes at one moment; who hears of it when is another matter: a call travels there and back, a watch
tells of a change some time later, each kind at its own pace. Objects are never changed, only replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

JsonObject = dict[str, Any]
HISTORY = 400
"""Changes of one collection that a watch can begin with; older ones are gone (410)."""


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code


@dataclass(frozen=True)
class Change:
    """One entry of the history."""

    version: int
    type: str
    """ADDED, MODIFIED or DELETED."""
    item: JsonObject


@dataclass(frozen=True)
class Address:
    """Where an object is."""

    collection: str
    """Path of its collection within its namespace."""
    name: str = ""
    part: str = ""
    """status, or nothing."""

    @property
    def kind(self) -> str:
        """The resource's plural."""
        return self.collection.rpartition("/")[2]


@lru_cache(4096)
def address_of(path: str) -> Address:
    """Split a path; collections are always given with their namespace, if their objects have one."""
    pieces = path.strip("/").split("/")
    root = 3 if pieces[0] == "apis" else 2
    length = root + (3 if pieces[root] == "namespaces" and len(pieces) > root + 2 else 1)
    name, part = [*pieces[length:], "", ""][:2]
    return Address("/" + "/".join(pieces[:length]), name, part)


def merged(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386) without changing anything."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class ApiServer:
    """What is stored, and its history. All calls take effect at once; the way there and back is in `network`."""

    def __init__(self, now_text: Callable[[], str]) -> None:
        self._now_text = now_text
        self.version = 100
        self.objects: dict[str, dict[str, JsonObject]] = {}
        """By collection and name."""
        self.history: dict[str, list[Change]] = {}
        self.forgotten: dict[str, int] = {}
        """Up to which version the history of a collection is gone."""
        self._num_uids = 0
        self.watchers: list[Callable[[str, Change], None]] = []
        """Told of each change, with its collection."""
        self.on_create: Callable[[Address, JsonObject], None] = lambda _where, _item: None
        """Asked before an object is stored. Raises ApiError."""

    # ---------------------------------------------------------------------------------------------------------- calls

    def get(self, path: str) -> JsonObject:
        """Return an object."""
        where = address_of(path)
        return self._found(where)

    def list_of(self, path: str, label: str = "") -> tuple[list[JsonObject], int]:
        """Return the objects of a collection that have this label, and the version."""
        items = self.objects.get(address_of(path).collection, {}).values()
        chosen = [item for item in items if not label or label in (item["metadata"].get("labels") or {})]
        return chosen, self.version

    def create(self, path: str, item: Mapping[str, Any]) -> JsonObject:
        """Store an object."""
        where = address_of(path)
        metadata = dict(item["metadata"])
        name = str(metadata["name"])
        if name in self.objects.get(where.collection, {}):
            raise ApiError(409, f"{where.kind} {name} already exists")
        self._num_uids += 1
        metadata |= {"uid": metadata.get("uid") or f"uid-{self._num_uids}", "creationTimestamp": self._now_text()}
        stored = {**item, "metadata": metadata}
        if where.kind == "pods":
            stored["status"] = {"phase": "Pending"}
        self.on_create(where, stored)
        return self._store(where.collection, name, stored, "ADDED")

    def merge(self, path: str, patch: Mapping[str, Any]) -> JsonObject:
        """Patch an object. A uid or a version in the patch that is not the object's is a conflict."""
        where = address_of(path)
        found = self._found(where)
        wanted = patch.get("metadata") or {}
        for key in ("uid", "resourceVersion"):
            if key in wanted and wanted[key] != found["metadata"][key]:
                raise ApiError(409, f"{where.kind} {where.name} has {key} {found['metadata'][key]}")
        if where.part == "status":
            changed = {**found, "status": merged(found.get("status") or {}, patch.get("status") or {})}
        else:
            rest = {key: value for key, value in patch.items() if key != "status"}
            changed = merged(found, rest)
            if where.kind == "resilienttrainingjobs" and changed.get("spec") != found.get("spec"):
                generation = found["metadata"].get("generation", 1) + 1
                changed["metadata"] = {**changed["metadata"], "generation": generation}
        if changed == found:
            return found
        return self._store(where.collection, where.name, changed, "MODIFIED")

    def delete(self, path: str, uid: str = "", *, is_forced: bool = False, version: str = "") -> JsonObject:
        """Delete an object. A pod that has a node is only marked: its kubelet ends it, and then removes it."""
        where = address_of(path)
        found = self._found(where)
        for key, wanted in (("uid", uid), ("resourceVersion", version)):
            if wanted and wanted != found["metadata"][key]:
                raise ApiError(409, f"{where.kind} {where.name} has {key} {found['metadata'][key]}")
        waits = where.kind == "pods" and (found.get("spec") or {}).get("nodeName") and not is_forced
        if waits and (found["status"].get("phase") not in ("Failed", "Succeeded")):
            if found["metadata"].get("deletionTimestamp"):
                return found
            metadata = {**found["metadata"], "deletionTimestamp": self._now_text()}
            return self._store(where.collection, where.name, {**found, "metadata": metadata}, "MODIFIED")
        return self._remove(where.collection, where.name, found)

    def put_status(self, path: str, uid: str, status: JsonObject) -> bool:
        """Replace the status of an object, if it is still this one, as kubelets do. Return whether it is."""
        where = address_of(path)
        found = self.objects.get(where.collection, {}).get(where.name)
        if found is None or found["metadata"]["uid"] != uid:
            return False
        if found.get("status") != status:
            self._store(where.collection, where.name, {**found, "status": status}, "MODIFIED")
        return True

    # ------------------------------------------------------------------------------------------------------ internals

    def forget_history(self, version: int | None = None) -> None:
        """Forget all changes: a watch that asks for them is told to list again."""
        for collection in self.history:
            self.history[collection] = []
            self.forgotten[collection] = self.version if version is None else version

    def changes_after(self, collection: str, version: int) -> list[Change]:
        """Return the changes of a collection since a version. Raises ApiError when they are forgotten."""
        if version < self.forgotten.get(collection, 0):
            raise ApiError(410, f"version {version} is too old")
        return [change for change in self.history.get(collection, []) if change.version > version]

    def items(self, collection: str) -> Iterator[JsonObject]:
        """Yield what is stored in a collection."""
        yield from list(self.objects.get(collection, {}).values())

    def _found(self, where: Address) -> JsonObject:
        found = self.objects.get(where.collection, {}).get(where.name)
        if found is None:
            raise ApiError(404, f"{where.kind} {where.name!r} not found")
        return found

    def _store(self, collection: str, name: str, item: JsonObject, kind: str) -> JsonObject:
        self.version += 1
        stored = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self.objects.setdefault(collection, {})[name] = stored
        self._note(collection, Change(self.version, kind, stored))
        return stored

    def _remove(self, collection: str, name: str, item: JsonObject) -> JsonObject:
        self.version += 1
        del self.objects[collection][name]
        last = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._note(collection, Change(self.version, "DELETED", last))
        return {"kind": "Status", "status": "Success"}

    def _note(self, collection: str, change: Change) -> None:
        history = self.history.setdefault(collection, [])
        history.append(change)
        if len(history) > HISTORY:
            self.forgotten[collection] = history[-HISTORY // 2].version - 1
            del history[: -HISTORY // 2]
        for tell in self.watchers:
            tell(collection, change)
