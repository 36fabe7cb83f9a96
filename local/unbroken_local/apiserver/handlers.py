"""The verbs on resources: from a request to an answer. Everything that must wait is in here or in `server`."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from unbroken_local.apiserver import problems, reviews
from unbroken_local.apiserver.conversion import core_event, is_new_event, served
from unbroken_local.apiserver.documents import Document, encode
from unbroken_local.apiserver.kinds import Catalogue, Resource
from unbroken_local.apiserver.operations import Operations, WriteOptions
from unbroken_local.apiserver.pods import PodActions
from unbroken_local.apiserver.requests import (
    BODY_LIMIT_BYTES,
    Form,
    ListQuery,
    Target,
    accepted_form,
    as_object,
    continue_token,
    delete_options,
    flag,
    list_query,
    patch_type,
    read_body,
    target_of,
    write_options,
)
from unbroken_local.apiserver.scaling import read_scale, scaled_document
from unbroken_local.apiserver.selectors import predicate
from unbroken_local.apiserver.store import Expired, Key, Store, Stored, page_start
from unbroken_local.apiserver.tables import table, table_rows
from unbroken_local.apiserver.watching import Encoder, WatchRequest, error_line, events

_LONGEST_WATCH_S = 3600.0


def json_response(body: bytes, code: int = 200, media: str = "application/json", **headers: str) -> web.Response:
    """Return an answer with a JSON body."""
    return web.Response(
        body=body, status=code, headers={"Content-Type": media, "Cache-Control": "no-cache, private", **headers}
    )


def problem_response(problem: problems.ApiProblem) -> web.Response:
    """Return the answer that carries a refusal."""
    headers = {"Retry-After": "1"} if problem.code in (429, 504) else {}
    if problem.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(encode(problem.status()), problem.code, **headers)


class Handlers:
    """Answers requests on resources. `stopping` is set when all watches must end."""

    def __init__(self, operations: Operations, pods: PodActions, stopping: asyncio.Event) -> None:
        self._operations = operations
        self._store: Store = operations.store
        self._catalogue: Catalogue = operations.catalogue
        self._pods = pods
        self._stopping = stopping

    async def handle(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one for each verb
        """Answer one request. Raises ApiProblem."""
        target = target_of(self._catalogue, request.path)
        if target.subresource:
            return await self._subresource(request, target)
        match request.method:
            case "GET" | "HEAD" if target.name and not flag(request.query, "watch"):
                return self._get(request, target)
            case "GET" | "HEAD":
                return await self._list_or_watch(request, target)
            case "POST" if not target.name:
                return await self._create(request, target)
            case "PUT" if target.name:
                return await self._update(request, target)
            case "PATCH" if target.name:
                return await self._patch(request, target)
            case "DELETE" if target.name:
                return await self._delete(request, target)
            case "DELETE":
                return await self._delete_collection(request, target)
        raise problems.method_not_allowed()

    # -- forms of the answer

    def _answer(
        self,
        request: web.Request,
        resource: Resource,
        stored: Stored,
        code: int = 200,
        options: WriteOptions | None = None,
    ) -> web.Response:
        form = accepted_form(request.headers.get("Accept", ""))
        response = json_response(self._encoder(request, resource, form)(stored), code, _media(form))
        for text in options.warnings if options else ():
            escaped = text.replace("\\", "\\\\").replace('"', '\\"')
            response.headers.add("Warning", f'299 - "{escaped}"')
        return response

    def _encoder(self, request: web.Request, resource: Resource, form: Form) -> Encoder:
        if form.kind == "Table":
            include = request.query.get("includeObject", "Metadata")
            return partial(_as_table, resource, include, self._operations.now)
        if form.kind in ("PartialObjectMetadata", "PartialObjectMetadataList"):
            return _as_metadata
        return partial(_as_served, resource)

    # -- reading

    def _get(self, request: web.Request, target: Target) -> web.Response:
        self._allow(target.resource, "get")
        stored = self._operations.get(target.resource, target.namespace, target.name)
        return self._answer(request, target.resource, stored)

    async def _list_or_watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        watching = flag(request.query, "watch")
        self._allow(target.resource, "watch" if watching else "list")
        query = list_query(target.resource, target.name, request.query)
        form = accepted_form(request.headers.get("Accept", ""))
        if watching:
            return await self._watch(request, target, query, form)
        return self._list(request, target, query, form)

    def _list(self, request: web.Request, target: Target, query: ListQuery, form: Form) -> web.Response:
        resource = target.resource
        revision = self._store.revision
        if query.revision is not None and query.revision > revision:
            raise problems.too_new(query.revision, revision)
        if query.exact and query.revision is not None:
            revision = query.revision
            objects = self._objects_at(target, query)
        else:
            objects = dict(self._store.current(resource.place, target.namespace))
        test = predicate(query.labels, query.fields)
        keys = sorted(objects)
        keys = keys[page_start(keys, query.after) :] if query.after else keys
        chosen, left = _page(keys, objects, test, query.limit)
        metadata: Document = {"resourceVersion": str(revision)}
        if left:
            metadata["continue"] = continue_token(revision, chosen[-1])
            if test is None:
                metadata["remainingItemCount"] = left
        return self._list_response(request, resource, form, [objects[key] for key in chosen], metadata)

    def _objects_at(self, target: Target, query: ListQuery) -> dict[Key, Stored]:
        try:
            found = self._store.at(target.resource.place, query.revision or 0)
        except Expired as problem:
            if query.after is None:
                raise problems.too_old(query.revision or 0, problem.oldest) from problem
            message = (
                "The provided continue parameter is too old to display a consistent list result. You can start a "
                "new list without the continue parameter."
            )
            raise problems.ApiProblem(410, "Expired", message) from problem
        return {key: stored for key, stored in found.items() if target.namespace in ("", key[0])}

    def _list_response(
        self, request: web.Request, resource: Resource, form: Form, items: list[Stored], metadata: Document
    ) -> web.Response:
        if form.kind == "Table":
            include = request.query.get("includeObject", "Metadata")
            documents = [served(resource, stored.document) for stored in items]
            shown = table(resource, documents, include, self._operations.now(), metadata)
            return json_response(encode(shown), media=_media(form))
        kind, version = resource.list_kind_name, resource.api_version
        if form.kind:
            kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
        head = encode({"kind": kind, "apiVersion": version, "metadata": metadata})[:-1]
        encoder = self._encoder(request, resource, form)
        body = head + b',"items":[' + b",".join(encoder(stored) for stored in items) + b"]}"
        return json_response(body, media=_media(form))

    async def _watch(self, request: web.Request, target: Target, query: ListQuery, form: Form) -> web.StreamResponse:
        resource = target.resource
        if query.revision is not None and query.revision > self._store.revision:
            raise problems.too_new(query.revision, self._store.revision)
        watch = WatchRequest(
            place=resource.place,
            namespace=target.namespace,
            selected=predicate(query.labels, query.fields),
            revision=query.revision or None,
            bookmarks=query.bookmarks,
            initial_events=query.initial_events,
            timeout_s=min(query.timeout_s or _LONGEST_WATCH_S, _LONGEST_WATCH_S),
        )
        response = web.StreamResponse(headers={"Content-Type": _media(form), "Cache-Control": "no-cache, private"})
        response.enable_chunked_encoding()
        encoder = self._encoder(request, resource, form)
        try:
            await response.prepare(request)
            async for lines in events(self._store, watch, encoder, partial(_bookmark, resource, form), self._stopping):
                # write() waits while the client does not read; the history, not a queue, holds what is to come.
                await response.write(lines)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            # The client has gone, or the server ends; both are a watch's normal end.
            pass
        except problems.ApiProblem as problem:
            await response.write(error_line(problem))
        return response

    # -- writing

    async def _body(self, request: web.Request) -> Any:
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as problem:
            raise problems.too_large(BODY_LIMIT_BYTES) from problem
        media = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if not raw and request.method == "DELETE":
            return {}
        return read_body(raw, media)

    async def _create(self, request: web.Request, target: Target) -> web.Response:
        resource = target.resource
        self._allow(resource, "create")
        options = write_options(request.query, request.headers.get("User-Agent", ""), "")
        body = as_object(await self._body(request))
        if resource.group == "authorization.k8s.io":
            return json_response(encode(reviews.answer(resource, body)), 201)
        if resource.plural == "bindings":
            return self._pods.bind(target.namespace, str(body.get("metadata", {}).get("name", "")), body)
        if resource.namespaced and not target.namespace:
            raise problems.method_not_allowed()
        written, stored_as = self._stored_form(resource, body)
        stored = self._operations.create(stored_as, target.namespace, written, options)
        return self._answer(request, resource, stored, 201, options)

    def _stored_form(self, resource: Resource, body: Document) -> tuple[Document, Resource]:
        if not is_new_event(resource):
            return body, resource
        core = self._catalogue.find("", "v1", "events")
        if core is None:
            raise problems.no_such_path()
        return core_event(body), core

    async def _update(self, request: web.Request, target: Target) -> web.Response:
        self._allow(target.resource, "update")
        options = write_options(request.query, request.headers.get("User-Agent", ""), target.subresource)
        body, resource = self._stored_form(target.resource, as_object(await self._body(request)))
        stored = self._operations.update(resource, target.namespace, target.name, body, options)
        return self._answer(request, target.resource, stored, 200, options)

    async def _patch(self, request: web.Request, target: Target) -> web.Response:
        self._allow(target.resource, "patch")
        options = write_options(request.query, request.headers.get("User-Agent", ""), target.subresource)
        media = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        kind = patch_type(media)
        if kind == "apply" and "fieldManager" not in request.query:
            detail = "fieldManager is required for apply patch"
            raise problems.invalid("meta.k8s.io", "PatchOptions", "", [problems.required("fieldManager", detail)])
        body = await self._body(request)
        resource = target.resource
        if is_new_event(resource):
            body, resource = self._stored_form(resource, as_object(body))
        stored, created = self._operations.patch(resource, target.namespace, target.name, kind, body, options=options)
        return self._answer(request, target.resource, stored, 201 if created else 200, options)

    async def _delete(self, request: web.Request, target: Target) -> web.Response:
        self._allow(target.resource, "delete")
        options = delete_options(request.query, await self._body(request))
        stored, gone = self._operations.delete(target.resource, target.namespace, target.name, options)
        if gone and target.resource.place not in _RETURNED:
            return json_response(encode(_deleted(target.resource, stored)))
        return self._answer(request, target.resource, stored)

    async def _delete_collection(self, request: web.Request, target: Target) -> web.Response:
        resource = target.resource
        self._allow(resource, "deletecollection")
        if resource.namespaced and not target.namespace:
            raise problems.method_not_allowed()
        options = delete_options(request.query, await self._body(request))
        query = list_query(resource, "", request.query)
        test = predicate(query.labels, query.fields)
        deleted = []
        for key, stored in list(self._store.current(resource.place, target.namespace)):
            if test is None or test(stored.document):
                self._operations.delete(resource, key[0], key[1], options)
                deleted.append(stored)
        metadata = {"resourceVersion": str(self._store.revision)}
        return self._list_response(request, resource, Form(), deleted, metadata)

    # -- subresources

    async def _subresource(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, name = target.resource, target.subresource
        if name not in resource.subresources:
            raise problems.no_such_path()
        if resource.place == ("", "pods") and name in ("log", "binding", "eviction"):
            return await self._pod_action(request, target)
        if name == "scale":
            return await self._scale(request, target)
        match request.method:
            case "GET" | "HEAD":
                return self._get(request, target)
            case "PUT" if name == "finalize":
                return await self._finalize(request, target)
            case "PUT":
                return await self._update(request, target)
            case "PATCH":
                return await self._patch(request, target)
        raise problems.method_not_allowed()

    async def _pod_action(self, request: web.Request, target: Target) -> web.StreamResponse:
        if target.subresource == "log" and request.method == "GET":
            return await self._pods.log(request, target.namespace, target.name)
        if target.subresource != "log" and request.method == "POST":
            body = as_object(await self._body(request))
            if target.subresource == "binding":
                return self._pods.bind(target.namespace, target.name, body)
            return self._pods.evict(
                target.namespace, target.name, delete_options(request.query, body.get("deleteOptions") or {})
            )
        raise problems.method_not_allowed()

    async def _finalize(self, request: web.Request, target: Target) -> web.Response:
        body = as_object(await self._body(request))
        return json_response(encode(self._pods.finalize(target.name, body)))

    async def _scale(self, request: web.Request, target: Target) -> web.Response:
        resource = target.resource
        stored = self._operations.get(resource, target.namespace, target.name)
        if request.method in ("PUT", "PATCH"):
            body = await self._body(request)
            kind = patch_type(request.content_type) if request.method == "PATCH" else None
            document = scaled_document(resource, stored.document, kind, body)
            options = write_options(request.query, request.headers.get("User-Agent", ""), "")
            stored = self._operations.update(resource, target.namespace, target.name, document, options)
        elif request.method != "GET":
            raise problems.method_not_allowed()
        return json_response(encode(read_scale(resource, stored.document)))

    @staticmethod
    def _allow(resource: Resource, verb: str) -> None:
        if verb not in resource.verbs:
            raise problems.method_not_allowed()


# Kinds whose deletion answers with the object itself.
_RETURNED = frozenset({("", "pods"), ("", "services"), ("", "serviceaccounts"), ("", "persistentvolumeclaims")})


def _page(keys: list[Key], objects: Mapping[Key, Stored], test: Any, limit: int) -> tuple[list[Key], int]:
    """Return the keys of one page, and how many keys are left behind it (to look at, when there is a test)."""
    chosen: list[Key] = []
    for number, key in enumerate(keys):
        if test is not None and not test(objects[key].document):
            continue
        if limit and len(chosen) == limit:
            return chosen, len(keys) - number
        chosen.append(key)
    return chosen, 0


def _media(form: Form) -> str:
    if not form.kind:
        return "application/json"
    return f"application/json;as={form.kind};v={form.version};g=meta.k8s.io"


def _as_served(resource: Resource, stored: Stored) -> bytes:
    if stored.document.get("apiVersion") == resource.api_version:
        return stored.encoded()
    return encode(served(resource, stored.document))


def _as_table(resource: Resource, include: str, now: Any, stored: Stored) -> bytes:
    metadata = {"resourceVersion": stored.document["metadata"].get("resourceVersion", "")}
    return encode(table(resource, [served(resource, stored.document)], include, now(), metadata))


def _as_metadata(stored: Stored) -> bytes:
    shown = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": stored.document["metadata"]}
    return encode(shown)


def _bookmark(resource: Resource, form: Form, revision: int, initial: bool) -> Document:
    metadata: Document = {"resourceVersion": str(revision), "creationTimestamp": None}
    if initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    if form.kind == "Table":
        return {
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": {"resourceVersion": str(revision)},
            "columnDefinitions": [],
            "rows": table_rows(resource, [], "None", 0.0),
        }
    return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}


def _deleted(resource: Resource, stored: Stored) -> Document:
    details = {"name": stored.document["metadata"]["name"], "kind": resource.plural, "uid": stored.uid}
    if resource.group:
        details["group"] = resource.group
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
