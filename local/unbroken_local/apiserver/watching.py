"""Lists and watches: what of the history a client has yet to see, as lines of JSON."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.documents import Document, encode
from unbroken_local.apiserver.selectors import Predicate
from unbroken_local.apiserver.store import Change, Expired, Place, Store, Stored

_BOOKMARK_EVERY_S = 5.0
# What one slow client can hold in memory beside the history: about this much.
_CHUNK_BYTES = 256 * 1024
Encoder = Callable[[Stored], bytes]
"""Turns a version into the JSON that the client asked for: as is, in another version, or as a table."""


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """What a client watches. `revision`: it has seen all up to here; None: start with what is there now."""

    place: Place
    namespace: str
    selected: Predicate | None
    revision: int | None
    bookmarks: bool
    initial_events: bool
    timeout_s: float


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


def error_line(problem: problems.ApiProblem) -> bytes:
    """Return the ERROR event that ends a watch."""
    return _line("ERROR", encode(problem.status()))


def change_line(request: WatchRequest, change: Change, encoder: Encoder) -> bytes | None:
    """Return the event that this client sees of a change; an object that leaves its selection looks deleted."""
    if request.namespace and change.key[0] != request.namespace:
        return None
    if request.selected is None:
        return _line(change.type, encoder(change.current))
    was = change.previous is not None and request.selected(change.previous.document)
    now = change.type != "DELETED" and request.selected(change.current.document)
    if now:
        return _line("MODIFIED" if was else "ADDED", encoder(change.current))
    if not was:
        return None
    if change.type == "DELETED":
        return _line("DELETED", encoder(change.current))
    assert change.previous is not None
    last = dict(change.previous.document)
    last["metadata"] = {**last["metadata"], "resourceVersion": str(change.revision)}
    return _line("DELETED", encoder(Stored(last, change.revision)))


async def events(
    store: Store,
    request: WatchRequest,
    encoder: Encoder,
    bookmark: Callable[[int, bool], Document],
    stopping: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield events until the request's time is over, the server stops, or the history is lost (an ERROR event)."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + request.timeout_s
    awake = asyncio.Event()
    wakers = store.collection(request.place).wakers
    wakers.add(awake.set)
    try:
        reached = store.revision if request.revision is None else request.revision
        if request.revision is None or request.initial_events:
            for line in _initial(store, request, encoder):
                yield line
        if request.initial_events and request.bookmarks:
            reached = max(reached, store.revision)
            yield _line("BOOKMARK", encode(bookmark(reached, True)))
        told = loop.time()
        while not stopping.is_set():
            awake.clear()
            chunk, reached = _news(store, request, encoder, reached)
            if chunk:
                yield chunk
                continue
            now = loop.time()
            if now >= deadline_s:
                return
            if request.bookmarks and now - told >= _BOOKMARK_EVERY_S:
                told = now
                yield _line("BOOKMARK", encode(bookmark(reached, False)))
            limit_s = min(deadline_s - now, _BOOKMARK_EVERY_S if request.bookmarks else deadline_s - now)
            await _wait(awake, limit_s)
    except Expired as expired:
        yield error_line(problems.too_old(reached, expired.oldest))
    finally:
        wakers.discard(awake.set)


def _initial(store: Store, request: WatchRequest, encoder: Encoder) -> list[bytes]:
    return [
        _line("ADDED", encoder(stored))
        for _, stored in store.current(request.place, request.namespace)
        if request.selected is None or request.selected(stored.document)
    ]


def _news(store: Store, request: WatchRequest, encoder: Encoder, reached: int) -> tuple[bytes, int]:
    """Return the lines of the next changes and the revision that they lead to."""
    while True:
        now = store.revision
        changes = store.since(request.place, reached)
        if not changes:
            return b"", max(now, reached)
        lines: list[bytes] = []
        size = 0
        for change in changes:
            reached = change.revision
            line = change_line(request, change, encoder)
            if line is not None:
                lines.append(line)
                size += len(line)
            if size >= _CHUNK_BYTES:
                break
        if lines:
            return b"".join(lines), reached


async def _wait(awake: asyncio.Event, limit_s: float) -> None:
    try:
        await asyncio.wait_for(awake.wait(), limit_s)
    except asyncio.TimeoutError:
        return
