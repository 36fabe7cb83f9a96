"""Manifests of jobs, sound ones and bad ones: fields of the CRD at and beyond their limits, each rule broken once."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.api.schema import custom_resource_definition

JsonObject = dict[str, Any]
Case = tuple[str, JsonObject]
"""What it is about, and the job."""
_TEMPLATE_DEPTH = 3
"""Deeper in the template are the fields of Kubernetes' own pods."""


@functools.cache
def spec_schema() -> JsonObject:
    """Return the schema of spec."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: JsonObject = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def sound_job(name: str = "digits", **spec: Any) -> JsonObject:
    """Return a job that nobody refuses; `spec` replaces fields."""
    container = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}
    return {
        "apiVersion": layout.API_VERSION,
        "kind": layout.KIND,
        "metadata": {"name": name},
        "spec": {"replicas": 4, "template": {"spec": {"containers": [container]}}, **spec},
    }


def by_schema() -> Iterator[Case]:
    """Yield jobs with one value at, beyond or beside what the schema of its field says."""
    for path, schema in _leaves(spec_schema(), ()):
        for what, value in _values(schema):
            job = sound_job()
            _put(job["spec"], spec_schema(), path, value)
            yield f"spec.{'.'.join(map(str, path))}: {what}", job


def _leaves(schema: JsonObject, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], JsonObject]]:
    if path[:1] == ("template",) and len(path) > _TEMPLATE_DEPTH:
        return
    if path:
        yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from _leaves(inner, (*path, key))
    items = schema.get("items")
    if isinstance(items, dict):
        yield from _leaves(items, (*path, 0))


def _values(schema: JsonObject) -> Iterator[tuple[str, Any]]:
    if schema.get("x-kubernetes-int-or-string"):
        yield from (("a list", []), ("true", True), ("-1", -1), ("no quantity", "x"))
        return
    kind = str(schema.get("type"))
    if kind in _WRONG:
        yield "another type", _WRONG[kind]
    yield from {"integer": _numbers, "number": _numbers, "string": _texts, "array": _lists}.get(kind, _nothing)(schema)


_WRONG: JsonObject = {"string": 7, "integer": "7", "number": "7", "boolean": "yes", "array": {}, "object": []}


def _nothing(_: JsonObject) -> Iterator[tuple[str, Any]]:
    yield "empty", {}


def _numbers(schema: JsonObject) -> Iterator[tuple[str, Any]]:
    for limit, step in (("minimum", -1), ("maximum", 1)):
        if limit in schema:
            yield f"the {limit}", schema[limit]
            yield f"beyond the {limit}", schema[limit] + step
    yield "a fraction", 1.5


def _texts(schema: JsonObject) -> Iterator[tuple[str, Any]]:
    yield "empty", ""
    yield "no word", "!\n"
    if "maxLength" in schema:
        yield "too long", "a" * (schema["maxLength"] + 1)


def _lists(schema: JsonObject) -> Iterator[tuple[str, Any]]:
    yield "empty", []
    one = _sample(schema["items"])
    yield "the same twice", [one, one]
    if "maxItems" in schema and schema["maxItems"] <= 64:
        yield "too many", [one] * (schema["maxItems"] + 1)


def _sample(schema: JsonObject) -> Any:
    """Return the least that fits."""
    if "default" in schema:
        return copy.deepcopy(schema["default"])
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("x-kubernetes-int-or-string"):
        return "1Gi"
    least: dict[str, Callable[[], Any]] = {
        "object": lambda: {key: _sample(schema["properties"][key]) for key in schema.get("required", ())},
        "array": lambda: [_sample(schema["items"])] * schema.get("minItems", 0),
        "integer": lambda: schema.get("minimum", 1),
        "number": lambda: schema.get("minimum", 1),
        "boolean": lambda: False,
    }
    return least.get(str(schema.get("type")), lambda: "a" * max(1, schema.get("minLength", 1)))()


def _put(target: Any, schema: JsonObject, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value in the depth, with what has to be on the way."""
    *before, last = path
    for key in before:
        inner = schema["items"] if isinstance(key, int) else schema["properties"][key]
        if isinstance(key, int):
            if not target:
                target.append(_sample(inner))
        elif key not in target:
            target[key] = _sample(inner) if inner.get("type") != "array" else []
        target, schema = target[key], inner
    if isinstance(last, int):
        target[:] = [value]
    else:
        target[last] = value


def by_rule() -> Iterator[Case]:
    """Yield at least one job for each rule across fields, and sound ones beside them."""
    layer = {"name": "rack", "label": "example.com/rack"}
    yield "a name that is too long", sound_job("n" * 47)
    yield "a name of capitals", sound_job("n-")
    yield "the name of another job's pods", sound_job("other-rendezvous")
    for what, spec in (
        ("sound", {}),
        ("minReplicas", {"minReplicas": 5}),
        ("minReplicas, as many", {"minReplicas": 4}),
        ("minRanksPerPod", {"ranksPerPod": 2, "world": {"minRanksPerPod": 3}}),
        ("divisibleBy", {"world": {"divisibleBy": 5}}),
        ("maxRanks", {"world": {"divisibleBy": 4, "maxRanks": 3}}),
        ("maxRanks of a layer and whole pods", {"ranksPerPod": 8, "topology": {"layers": [{**layer, "maxRanks": 4}]}}),
        (
            "maxRanks of a layer and parts of pods",
            {"ranksPerPod": 8, "world": {"minRanksPerPod": 4}, "topology": {"layers": [{**layer, "maxRanks": 4}]}},
        ),
        ("minRanks of a layer", {"topology": {"layers": [{**layer, "minRanks": 5}]}}),
        (
            "minRanks of a layer with spares",
            {"spares": {"count": 1}, "topology": {"layers": [{**layer, "minRanks": 5}]}},
        ),
        ("minRanks above maxRanks", {"topology": {"layers": [{**layer, "minRanks": 3, "maxRanks": 2}]}}),
        ("layers of one name", {"topology": {"layers": [layer, {**layer, "label": "example.com/row"}]}}),
        ("preset and layers", {"topology": {"preset": "EKS", "layers": [layer]}}),
        ("growBack without pod", {"restart": {"rungs": [{"name": "in-process"}], "growBackSeconds": 60}}),
        ("growBack without a drain", {"restart": {"growBackSeconds": 60}, "timeouts": {"drainSeconds": 0}}),
        ("growBack", {"restart": {"growBackSeconds": 60}}),
        ("no rungs", {"restart": {"rungs": []}}),
        ("a rung twice", {"restart": {"rungs": [{"name": "pod"}, {"name": "pod", "limit": 1}]}}),
        ("a code twice", {"restart": {"fatalExitCodes": [3, 3]}}),
        ("a cause twice", {"restart": {"uncountedCauses": ["pod-lost", "pod-lost"]}}),
        ("soft and hard", {"timeouts": {"softSeconds": 90}}),
        ("hard and barrier", {"timeouts": {"hardSeconds": 120}}),
        ("isolation", {"timeouts": {"isolationSeconds": 35}}),
        ("isolation, a second more", {"timeouts": {"isolationSeconds": 36}}),
        ("a probe", {"health": {"probes": [{"name": "disk", "command": ["true"]}]}}),
        ("probes of 16 KiB", {"health": {"probes": [{"name": "disk", "command": ["x" * 1024] * 16}]}}),
        (
            "probes that are too long",
            {"health": {"probes": [{"name": f"p{n}", "command": ["é" * 1024] * 5} for n in range(2)]}},
        ),
        ("a probe twice", {"health": {"probes": [{"name": "disk", "command": ["true"]}] * 2}}),
        ("a probe named like a built-in check", {"health": {"probes": [{"name": "gpu", "command": ["true"]}]}}),
        (
            "a probe named like a part of the preflight",
            {"health": {"probes": [{"name": "preflight-matmul", "command": ["x"]}]}},
        ),
        ("preflight", {"health": {"preflight": {"mode": "Act"}}}),
        ("preflight of pairs", {"health": {"preflight": {"mode": "Act", "pairs": True}}}),
        ("pairs without a preflight", {"health": {"preflight": {"pairs": True}}}),
        ("preflight, off", {"health": {"preflight": {"timeoutSeconds": 200}}, "timeouts": {"startupSeconds": 200}}),
        (
            "preflight as long as the start",
            {"health": {"preflight": {"mode": "Act", "timeoutSeconds": 200}}, "timeouts": {"startupSeconds": 200}},
        ),
        ("a pull secret of ours", {"rendezvous": {"imagePullSecrets": ["other-rendezvous"]}}),
    ):
        yield what, sound_job(**spec)
    yield from _by_memory(layer)
    yield from _by_log_rules()
    yield from _by_template()


def _by_log_rules() -> Iterator[Case]:
    rule = {"name": "loss", "pattern": "loss=[0-9]", "verdict": "hang"}
    for what, rules in (
        ("log rules", [{**rule, "recurringSeconds": 60}, {**rule, "name": "first", "expectedWithinSeconds": 60}]),
        ("a log rule twice", [rule, rule]),
        ("a log rule with both times", [{**rule, "recurringSeconds": 60, "expectedWithinSeconds": 60}]),
        ("16 log rules", [{**rule, "name": f"r{number}"} for number in range(16)]),
        ("17 log rules", [{**rule, "name": f"r{number}"} for number in range(17)]),
    ):
        yield what, sound_job(health={"logRules": rules})


def _by_memory(layer: JsonObject) -> Iterator[Case]:
    for what, memory, others in (
        ("memory", {}, {}),
        ("sizeLimit in words", {"sizeLimit": "much"}, {}),
        ("sizeLimit with a fraction", {"sizeLimit": "1.5Gi"}, {}),
        ("across a layer", {"across": "rack"}, {"topology": {"layers": [layer]}}),
        ("across another one", {"across": "row"}, {"topology": {"layers": [layer]}}),
        ("across hosts", {"across": "host"}, {}),
        ("across a layer of the preset", {"across": "network-2"}, {"topology": {"preset": "EKS"}}),
        ("across none of the preset", {"across": "rack"}, {"topology": {"preset": "EKS"}}),
    ):
        yield f"memory: {what}", sound_job(memory={"sizeLimit": "4Gi", **memory}, **others)
    for what, pod, container in (
        ("its volume", {"volumes": [{"name": "unbroken-state", "emptyDir": {}}]}, {}),
        ("a mount of it", {}, {"volumeMounts": [{"name": "unbroken-state", "mountPath": "/x"}]}),
        ("a mount in its place", {}, {"volumeMounts": [{"name": "x", "mountPath": "/var/lib/unbroken-state/a"}]}),
    ):
        job = _templated(pod, container)
        yield f"without memory: {what}", copy.deepcopy(job)
        job["spec"]["memory"] = {"sizeLimit": "4Gi"}
        yield f"memory: {what}", job


def _by_template() -> Iterator[Case]:
    ours, secret = "unbroken-agent", {"name": "other-rendezvous"}
    containers: tuple[tuple[str, JsonObject], ...] = (
        ("no command", {"command": []}),
        ("our container's name", {"name": ours}),
        ("our volume", {"volumeMounts": [{"name": "unbroken-token", "mountPath": "/x"}]}),
        ("our Secret", {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {**secret, "key": "token"}}}]}),
        ("our Secret, whole", {"envFrom": [{"secretRef": secret}]}),
        ("our variable", {"env": [{"name": "UNBROKEN_DIR", "value": "/x"}]}),
        ("the user's variable", {"env": [{"name": "UNBROKEN_PREIMPORT", "value": ""}]}),
    )
    for what, container in containers:
        yield f"trainer: {what}", _templated({}, container)
        other = {"name": "other", "image": "other:1", **container}
        yield f"init container: {what}", _templated({"initContainers": [other]}, {})
    for what, pod in (
        ("two containers of one name", {"initContainers": [{"name": "a", "image": "x"}] * 2}),
        ("shared processes", {"shareProcessNamespace": True}),
        ("the node's processes", {"hostPID": True}),
        ("our volume's name", {"volumes": [{"name": "unbroken-lib", "emptyDir": {}}]}),
        ("our Secret as a volume", {"volumes": [{"name": "v", "secret": {"secretName": "other-rendezvous"}}]}),
        (
            "our Secret for a driver",
            {"volumes": [{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": secret}}]},
        ),
        ("our Secret, projected", {"volumes": [{"name": "v", "projected": {"sources": [{"secret": secret}]}}]}),
        ("our Secret to pull", {"imagePullSecrets": [secret]}),
        ("restarts by the kubelet", {"restartPolicy": "Always"}),
    ):
        yield f"template: {what}", _templated(pod, {})
    for kind in ("labels", "annotations"):
        for key in ("unbroken.dev/x", "a.unbroken.dev/x", "notunbroken.dev/x"):
            job = sound_job()
            job["spec"]["template"]["metadata"] = {kind: {key: "x"}}
            yield f"template: {kind} {key}", job


def _templated(pod: JsonObject, container: JsonObject) -> JsonObject:
    job = sound_job()
    found = job["spec"]["template"]["spec"]
    found["containers"][0] |= container
    found |= pod
    return job


def messages_of_rules() -> set[str]:
    """Return the message of each rule of the CRD that looks at one object alone."""
    found: set[str] = set()
    (version,) = custom_resource_definition()["spec"]["versions"]
    waiting = [version["schema"]["openAPIV3Schema"]]
    while waiting:
        schema = waiting.pop()
        rules = schema.get("x-kubernetes-validations", ())
        found |= {item["message"] for item in rules if "oldSelf" not in item["rule"]}
        waiting += [
            *schema.get("properties", {}).values(),
            *filter(lambda one: isinstance(one, dict), [schema.get("items")]),
        ]
    return found
