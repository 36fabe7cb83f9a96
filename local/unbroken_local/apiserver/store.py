"""Objects in memory, one rising revision, and for each resource a bounded history that lists and watches read.

A stored document is never changed in place: a write puts a new one. Everything here runs in one thread and never waits.

A watch owns no queue. It keeps the revision that it has reached and asks for what came after, so a slow client costs
nothing; who falls behind the history gets 410 Gone.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from unbroken_local.apiserver.documents import Document, encode

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
Place = tuple[str, str]
"""(group, plural): a kind's storage, whatever version it is served in."""
Key = tuple[str, str]
"""(namespace, name); namespace is empty for cluster-scoped kinds."""


class Stored:
    """One version of one object, with its JSON text made at most once."""

    __slots__ = ("_encoded", "document", "revision")

    def __init__(self, document: Document, revision: int) -> None:
        self.document = document
        self.revision = revision
        self._encoded: bytes | None = None

    def encoded(self) -> bytes:
        if self._encoded is None:
            self._encoded = encode(self.document)
        return self._encoded

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])


class Change(NamedTuple):
    """One write. `current` of DELETED is the last version, stamped with the revision of the deletion."""

    revision: int
    type: ChangeType
    key: Key
    current: Stored
    previous: Stored | None


class Expired(Exception):
    """The history no longer reaches back to the revision that was asked for. `oldest`: the first that it can serve."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest


@dataclass(slots=True)
class Collection:
    """All objects of one place. `floor`: the last revision that the history can no longer replay from before."""

    objects: dict[Key, Stored] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    floor: int = 0
    wakers: set[Callable[[], None]] = field(default_factory=set)


class Store:
    """Every object of the cluster. `history_limit`: changes kept for each resource."""

    def __init__(self, history_limit: int = 4096) -> None:
        self._history_limit = history_limit
        self._collections: dict[Place, Collection] = {}
        self._dependents: dict[str, set[tuple[Place, Key]]] = {}
        self.revision = 1
        self.on_change: list[Callable[[Place, Change], None]] = []

    def collection(self, place: Place) -> Collection:
        """Return the collection, made on first use. Its history starts now."""
        found = self._collections.get(place)
        if found is None:
            found = self._collections[place] = Collection(floor=self.revision)
        return found

    def places(self) -> list[Place]:
        return list(self._collections)

    def get(self, place: Place, key: Key) -> Stored | None:
        return self.collection(place).objects.get(key)

    def put(self, place: Place, key: Key, document: Document) -> Stored:
        """Store the document as the newest version and stamp its resourceVersion (in place: hand over a fresh one)."""
        self.revision += 1
        document["metadata"]["resourceVersion"] = str(self.revision)
        collection = self.collection(place)
        previous = collection.objects.get(key)
        stored = Stored(document, self.revision)
        collection.objects[key] = stored
        self._index(place, key, previous, stored)
        self._record(place, Change(self.revision, "MODIFIED" if previous else "ADDED", key, stored, previous))
        return stored

    def restore(self, place: Place, key: Key, document: Document, revision: int) -> None:
        """Restore an object of a snapshot; watchers are not notified, and history starts after it."""
        self.revision = max(self.revision, revision)
        collection = self.collection(place)
        stored = Stored(document, revision)
        collection.objects[key] = stored
        collection.floor = self.revision
        self._index(place, key, None, stored)

    def remove(self, place: Place, key: Key) -> Stored:
        """Delete the object. Raises KeyError if it is not there."""
        self.revision += 1
        previous = self.collection(place).objects.pop(key)
        last = {**previous.document, "metadata": {**previous.document["metadata"]}}
        last["metadata"]["resourceVersion"] = str(self.revision)
        self._index(place, key, previous, None)
        stored = Stored(last, self.revision)
        self._record(place, Change(self.revision, "DELETED", key, stored, previous))
        return stored

    def dependents(self, uid: str) -> list[tuple[Place, Key]]:
        """Return the places of all objects that name this uid as an owner."""
        return sorted(self._dependents.get(uid, ()))

    def current(self, place: Place, namespace: str = "") -> Iterator[tuple[Key, Stored]]:
        """Yield the newest versions in order of their keys; all namespaces when `namespace` is empty."""
        objects = self.collection(place).objects
        for key in sorted(objects):
            if not namespace or key[0] == namespace:
                yield key, objects[key]

    def at(self, place: Place, revision: int) -> dict[Key, Stored]:
        """Return the objects as they were at `revision`. Raises Expired."""
        collection = self.collection(place)
        if revision < collection.floor:
            raise Expired(collection.floor)
        objects = dict(collection.objects)
        for change in reversed(collection.history):
            if change.revision <= revision:
                break
            if change.previous is None:
                objects.pop(change.key, None)
            else:
                objects[change.key] = change.previous
        return objects

    def since(self, place: Place, revision: int, limit: int = 256) -> list[Change]:
        """Return up to `limit` changes after `revision`, oldest first. Raises Expired."""
        collection = self.collection(place)
        if revision < collection.floor:
            raise Expired(collection.floor + 1)
        history = collection.history
        if not history or history[-1].revision <= revision:
            return []
        start = bisect_right(history, revision, key=lambda change: change.revision)
        return [history[index] for index in range(start, min(start + limit, len(history)))]

    def compact(self, place: Place) -> None:
        """Forget the history of one resource: watches of older revisions get 410."""
        collection = self.collection(place)
        collection.history.clear()
        collection.floor = self.revision
        for wake in list(collection.wakers):
            wake()

    def _record(self, place: Place, change: Change) -> None:
        collection = self._collections[place]
        collection.history.append(change)
        if len(collection.history) > self._history_limit:
            collection.floor = collection.history.popleft().revision
        for listener in self.on_change:
            listener(place, change)
        for wake in list(collection.wakers):
            wake()

    def _index(self, place: Place, key: Key, before: Stored | None, after: Stored | None) -> None:
        owners_before = owner_uids(before.document) if before else frozenset()
        owners_after = owner_uids(after.document) if after else frozenset()
        for uid in owners_before - owners_after:
            dependents = self._dependents[uid]
            dependents.discard((place, key))
            if not dependents:
                del self._dependents[uid]
        for uid in owners_after - owners_before:
            self._dependents.setdefault(uid, set()).add((place, key))


def owner_uids(document: Document) -> frozenset[str]:
    """Return the uids of the object's owners."""
    return frozenset(entry["uid"] for entry in document["metadata"].get("ownerReferences") or ())


def page_start(keys: list[Key], after: Key) -> int:
    """Return the index of the first key behind `after` in a sorted list."""
    position = bisect_left(keys, after)
    return position + 1 if position < len(keys) and keys[position] == after else position
