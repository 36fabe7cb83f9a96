"""What is special about pods: binding, eviction, logs (from the node's kubelet); and namespaces' finalizers.

Logs come from `http://<InternalIP>:<status.daemonEndpoints.kubeletEndpoint.Port>/containerLogs/NAMESPACE/POD/CONTAINER`
of the pod's node, with the query of the request.
"""

import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.documents import Document, as_dict, as_list, copy_of, encode, look_up, time_text
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.operations import DeleteOptions, Operations
from unbroken_local.apiserver.selectors import parse_labels
from unbroken_local.apiserver.store import Stored

_CONNECT_S = 5.0
_QUERY = ("follow", "tailLines", "previous", "timestamps", "sinceSeconds", "sinceTime", "limitBytes")


class PodActions:
    """Acts on pods. `session` gives the HTTP client that asks kubelets."""

    def __init__(self, operations: Operations, session: aiohttp.ClientSession) -> None:
        self._operations = operations
        self._session = session

    def _resource(self, group: str, plural: str) -> Resource:
        found = self._operations.catalogue.find(group, "v1", plural)
        if found is None:
            raise problems.no_such_path()
        return found

    def _pod(self, namespace: str, name: str) -> Stored:
        return self._operations.get(self._resource("", "pods"), namespace, name)

    def bind(self, namespace: str, name: str, body: Document) -> web.Response:
        """Set the pod's node, once. Raises ApiProblem: 400, 404, 409."""
        node = look_up(body, "target", "name")
        if not isinstance(node, str) or not node:
            cause = problems.required("target.name")
            raise problems.invalid("", "Binding", name, [cause])
        stored = self._pod(namespace, name)
        bound = look_up(stored.document, "spec", "nodeName")
        if "deletionTimestamp" in stored.document["metadata"]:
            raise problems.conflict(
                "", "pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host"
            )
        if bound:
            raise problems.conflict("", "pods/binding", name, f'pod {name} is already assigned to node "{bound}"')
        uid = look_up(body, "metadata", "uid")
        if uid and uid != stored.uid:
            raise problems.conflict("", "pods/binding", name, f"Precondition failed: UID in precondition: {uid}, "
                                    f"UID in object meta: {stored.uid}")  # fmt: skip
        document = copy_of(stored.document)
        document["spec"]["nodeName"] = node
        document["metadata"].setdefault("annotations", {}).update(as_dict(look_up(body, "metadata", "annotations")))
        if not document["metadata"]["annotations"]:
            del document["metadata"]["annotations"]
        now = time_text(self._operations.now())
        others = [
            entry for entry in as_list(document["status"].get("conditions")) if entry.get("type") != "PodScheduled"
        ]
        document["status"]["conditions"] = [
            *others,
            {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now},
        ]
        self._operations.store.put(("", "pods"), (namespace, name), document)
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return web.Response(body=encode(done), status=201, content_type="application/json")

    def evict(self, namespace: str, name: str, options: DeleteOptions) -> web.Response:
        """Delete the pod unless a disruption budget would be broken (429)."""
        stored = self._pod(namespace, name)
        finished = look_up(stored.document, "status", "phase") in ("Succeeded", "Failed", "Pending")
        if not finished and "deletionTimestamp" not in stored.document["metadata"]:
            self._check_budgets(namespace, stored)
        if not options.dry_run:
            self._operations.delete(self._resource("", "pods"), namespace, name, options)
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return web.Response(body=encode(done), status=201, content_type="application/json")

    def _check_budgets(self, namespace: str, pod: Stored) -> None:
        for (_, name), budget in list(self._operations.store.current(("policy", "poddisruptionbudgets"), namespace)):
            spec = as_dict(budget.document.get("spec"))
            selector = spec.get("selector")
            if not isinstance(selector, dict) or not selects(selector, pod.document):
                continue
            matching = [stored.document for _, stored in self._operations.store.current(("", "pods"), namespace)
                        if selects(selector, stored.document)]  # fmt: skip
            healthy = sum(_is_healthy(document) for document in matching)
            wanted = _wanted_healthy(spec, len(matching))
            if healthy - 1 < wanted:
                message = "Cannot evict pod as it would violate the pod's disruption budget."
                detail = f"The disruption budget {name} needs {wanted} healthy pods and has {healthy} currently"
                cause = {"reason": "DisruptionBudget", "message": detail}
                raise problems.ApiProblem(429, "TooManyRequests", message, details={"causes": [cause]})

    def finalize(self, name: str, body: Document) -> Document:
        """Replace a namespace's spec.finalizers; the namespace goes with its last one. Raises ApiProblem (404)."""
        stored = self._operations.get(self._resource("", "namespaces"), "", name)
        document = copy_of(stored.document)
        document["spec"] = {"finalizers": as_list(look_up(body, "spec", "finalizers"))}
        store = self._operations.store
        finished = "deletionTimestamp" in document["metadata"] and not document["spec"]["finalizers"]
        if finished and not document["metadata"].get("finalizers"):
            return store.remove(("", "namespaces"), ("", name)).document
        return store.put(("", "namespaces"), ("", name), document).document

    async def log(self, request: web.Request, namespace: str, name: str) -> web.StreamResponse:
        """Stream a container's log from the kubelet of the pod's node. Raises ApiProblem: 400, 404, 500, 502."""
        pod = self._pod(namespace, name).document
        container = _container(pod, name, request.query.get("container", ""))
        if not look_up(pod, "spec", "nodeName"):
            return web.Response(status=204)
        url = self._kubelet(pod) / "containerLogs" / namespace / name / container
        query = {key: request.query[key] for key in _QUERY if key in request.query}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            async with self._session.get(url.with_query(query), timeout=timeout) as reply:
                if reply.status != 200:
                    detail = (await reply.text()).strip()
                    reason = {400: "BadRequest", 404: "NotFound"}.get(reply.status, "InternalError")
                    raise problems.ApiProblem(reply.status, reason, detail or f"the kubelet answered {reply.status}")
                return await _relay(request, reply)
        except aiohttp.ClientConnectionError as problem:
            message = f"Get {url}: {problem}"
            raise problems.ApiProblem(500, "InternalError", message) from problem

    def _kubelet(self, pod: Document) -> URL:
        node_name = look_up(pod, "spec", "nodeName")
        node = self._operations.store.get(("", "nodes"), ("", node_name))
        if node is None:
            raise problems.not_found("", "nodes", node_name)
        port = look_up(node.document, "status", "daemonEndpoints", "kubeletEndpoint", "Port")
        addresses = as_list(look_up(node.document, "status", "addresses"))
        address = next((entry.get("address") for entry in addresses if entry.get("type") == "InternalIP"), None)
        if not port or not address:
            detail = f"node {node_name} names no kubelet: want status.addresses (InternalIP) and status.daemonEndpoints"
            raise problems.ApiProblem(500, "InternalError", detail)
        return URL.build(scheme="http", host=str(address), port=int(port))


async def _relay(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    response.enable_chunked_encoding()
    try:
        await response.prepare(request)
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (ConnectionError, aiohttp.ClientPayloadError, asyncio.CancelledError):
        # The reader has gone, or the kubelet has: what was sent is all there is.
        pass
    return response


def _container(pod: Document, pod_name: str, asked: str) -> str:
    spec = as_dict(pod.get("spec"))
    main = [str(entry.get("name")) for entry in as_list(spec.get("containers"))]
    initial = [str(entry.get("name")) for entry in as_list(spec.get("initContainers"))]
    if asked:
        if asked not in (*main, *initial):
            raise problems.bad_request(f"container {asked} is not valid for pod {pod_name}")
        return asked
    if len(main) == 1 and not initial:
        return main[0]
    default = as_dict(pod["metadata"].get("annotations")).get("kubectl.kubernetes.io/default-container")
    if default in main:
        return str(default)
    if len(main) == 1:
        return main[0]
    raise problems.bad_request(
        f"a container name must be specified for pod {pod_name}, choose one of: [{' '.join(main)}]"
    )


def selects(selector: Document, document: Document) -> bool:
    """True if a LabelSelector (matchLabels, matchExpressions) selects the object."""
    labels = as_dict(document["metadata"].get("labels"))
    if any(labels.get(key) != value for key, value in as_dict(selector.get("matchLabels")).items()):
        return False
    return all(_meets(entry, labels) for entry in as_list(selector.get("matchExpressions")))


def _meets(expression: Document, labels: dict[str, Any]) -> bool:
    key, values = expression.get("key"), ",".join(as_list(expression.get("values")))
    text = {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": f"{key}",
            "DoesNotExist": f"!{key}"}.get(str(expression.get("operator")), "!=")  # fmt: skip
    return all(requirement.matches(labels) for requirement in parse_labels(text))


def _is_healthy(pod: Document) -> bool:
    conditions = as_list(look_up(pod, "status", "conditions"))
    ready = any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _wanted_healthy(spec: Document, count: int) -> int:
    if "minAvailable" in spec:
        return _share(spec["minAvailable"], count)
    return count - _share(spec.get("maxUnavailable", 0), count)


def _share(value: Any, count: int) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return -(-int(value[:-1]) * count // 100)
    return int(value)
