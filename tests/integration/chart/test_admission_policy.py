"""The chart's policies for the operator's account: it may write all that the operator makes, and nothing of others.

Their CEL is tried twice: in memory, and by the CEL of a real API server, as rules of a CustomResourceDefinition. (The
control planes of the tests have no ValidatingAdmissionPolicy.)
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from tests.clusters import kubeconfig_of
from tests.unit.unbroken_operator.operator_world import a_job
from tests.waiting import wait_until

from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.objects.manifests import rendezvous_pod, secret, service, tokens_secret
from unbroken_operator.decisions.objects.network_policy import keepers_policy, network_policy
from unbroken_operator.decisions.objects.training_pods import training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions, PolicyOptions

from .test_chart import CHART, REGISTRY, helm_or_skip, rendered, run

JsonObject = dict[str, Any]
KUBECTL = str(Path(sys.executable).parent / "kubectl")
ON = ("--kube-version", "1.33.0", "--set", "scope=Cluster,quarantine.mode=On,quarantine.condition=true")
KIND = {"pods": "Pod", "services": "Service", "secrets": "Secret", "nodes": "Node", "networkpolicies": "NetworkPolicy"}


def changed(item: JsonObject, **paths: Any) -> JsonObject:
    """Return a copy with values at paths such as metadata__name; None removes."""
    found = copy.deepcopy(item)
    for path, value in paths.items():
        *folders, last = path.split("__")
        place = found
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return found


def made() -> dict[str, JsonObject]:
    """Return one object of each kind, as the operator makes it and the API server fills it in."""
    verdict = admit(a_job())
    assert isinstance(verdict, ValidSpec)
    spec, settings, options = verdict.spec, verdict.settings, OperatorOptions("r.io/sidecar:1")
    return {
        "trainer": training_pod(spec, settings, 0, Role.ACTIVE, options),
        "rendezvous": rendezvous_pod(spec, settings, 0, options),
        "service": changed(service(settings), spec__type="ClusterIP"),
        "secret": secret(settings),
        "policy": network_policy(settings, PolicyOptions("ops")),
        "keepers": keepers_policy(spec, settings),
        "tokens": tokens_secret(settings, 0),
        "foreign": {"metadata": {"name": "db", "labels": {"app": "db"}}, "spec": {"containers": [{"name": "a"}]}},
        "node": {
            "metadata": {"name": "n", "labels": {"zone": "a"}, "annotations": {"x": "y"}},
            "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}], "providerID": "p"},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
                "allocatable": {"cpu": "4"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        },
    }


MADE = made()
POD, SERVICE, SECRET, NODE, FOREIGN = (MADE[name] for name in ("trainer", "service", "secret", "node", "foreign"))
POLICY = MADE["policy"]
TOKENS = MADE["tokens"]
TAINT = {"key": "unbroken.dev/quarantine", "effect": "NoSchedule"}
MARKED = changed(
    NODE, spec__taints=[*NODE["spec"]["taints"], TAINT], metadata__annotations={"x": "y", TAINT["key"]: "t"}
)
READY = NODE["status"]["conditions"][0]
OFFENDS = changed(NODE, status__conditions=[READY, {"type": "UnbrokenRepeatOffender", "status": "True"}])
IMAGES = changed(NODE, status__images=[{"names": ["a"], "sizeBytes": 1}])
NOBODY = {"apiVersion": "v1", "kind": "Namespace", "name": "gone", "uid": "0"}
ORPHAN = changed(POD, metadata__ownerReferences=None)
BALANCED = changed(SERVICE, spec__type="LoadBalancer", spec__externalIPs=["1.2.3.4"])
Case = tuple[str, str, JsonObject | None, JsonObject | None, str]
CASES: dict[str, Case] = {
    "it makes training pods": ("pods", "CREATE", POD, None, ""),
    "it makes rendezvous pods": ("pods", "CREATE", MADE["rendezvous"], None, ""),
    "it makes Services": ("services", "CREATE", SERVICE, None, ""),
    "it makes Secrets": ("secrets", "CREATE", SECRET, None, ""),
    "it makes NetworkPolicies": ("networkpolicies", "CREATE", POLICY, None, ""),
    "a NetworkPolicy for others' pods": (
        "networkpolicies", "CREATE", changed(POLICY, spec__podSelector={}), None, "for pods of its jobs only"),
    "it makes NetworkPolicies for keepers": ("networkpolicies", "CREATE", MADE["keepers"], None, ""),
    "a NetworkPolicy for keepers of another name": (
        "networkpolicies", "CREATE", changed(MADE["keepers"], metadata__name="digits-x"), None, "JOB-keepers"),
    "a NetworkPolicy of nobody": (
        "networkpolicies", "CREATE", changed(POLICY, metadata__ownerReferences=None), None, "objects of its jobs only"),
    "another NetworkPolicy": (
        "networkpolicies", "UPDATE", changed(POLICY, spec__ingress=[]), POLICY, "changes and deletes no"),
    "it labels its pods": ("pods", "UPDATE", changed(POD, metadata__labels__x="y"), POD, ""),
    "it takes an orphan back": ("pods", "UPDATE", POD, ORPHAN, ""),
    "it deletes its pods": ("pods", "DELETE", None, POD, ""),
    "it deletes an orphan": ("pods", "DELETE", None, ORPHAN, ""),
    "it mends a Service": ("services", "UPDATE", SERVICE, changed(SERVICE, spec__selector={}), ""),
    "it mends what leads elsewhere": (
        "services", "UPDATE", SERVICE, changed(SERVICE, spec__type="ExternalName"), ""),
    "it leaves what others set": ("services", "UPDATE", BALANCED, changed(BALANCED, spec__selector={}), ""),
    "it taints a node": ("nodes", "UPDATE", MARKED, NODE, ""),
    "it releases a node": ("nodes", "UPDATE", NODE, MARKED, ""),
    "it tells of a node": ("nodes/status", "UPDATE", OFFENDS, NODE, ""),
    "it tells no more of a node": ("nodes/status", "UPDATE", NODE, OFFENDS, ""),
    "a pod of nobody": ("pods", "CREATE", FOREIGN, None, "creates objects of its jobs only"),
    "a pod with another job's uid": (
        "pods", "CREATE", changed(POD, metadata__annotations={"unbroken.dev/job-uid": "other"}), None,
        "creates objects of its jobs only"),
    "a pod of a Deployment": (
        "pods", "CREATE",
        changed(POD, metadata__ownerReferences=[{**POD["metadata"]["ownerReferences"][0], "kind": "ReplicaSet"}]), None,
        "creates objects of its jobs only"),
    "a pod named after another": (
        "pods", "CREATE", changed(POD, metadata__name="db-0"), None, "names pods after their job"),
    "another image in a foreign pod": ("pods", "UPDATE", changed(FOREIGN, spec__x="y"), FOREIGN, "of its jobs only"),
    "a foreign pod made its own": (
        "pods", "UPDATE", changed(FOREIGN, metadata=POD["metadata"]), FOREIGN, "deletes objects of its jobs only"),
    "another image in its own pod": (
        "pods", "UPDATE", changed(POD, spec__containers=[{"name": "trainer", "image": "evil"}]), POD,
        "nothing but the metadata"),
    "a pod given away": (
        "pods", "UPDATE", changed(ORPHAN, metadata__annotations=None), POD, "does not give objects of its jobs away"),
    "deleting a foreign pod": ("pods", "DELETE", None, FOREIGN, "changes and deletes objects of its jobs only"),
    "a token of a service account": (
        "secrets", "CREATE", changed(SECRET, type="kubernetes.io/service-account-token"), None, "Opaque Secrets"),
    "a Secret of another name": ("secrets", "CREATE", changed(SECRET, metadata__name="x"), None, "names this JOB-"),
    "it makes Secrets of tokens": ("secrets", "CREATE", TOKENS, None, ""),
    "it writes tokens of another key": (
        "secrets", "UPDATE", changed(TOKENS, data={"digits-0": "bmV3"}),
        changed(TOKENS, data={"digits-0": "b2xk"}), ""),
    "it writes the token of readers": (
        "secrets", "UPDATE", changed(SECRET, data={"job-key": "aw==", "token": "bmV3"}),
        changed(SECRET, data={"job-key": "aw==", "token": "b2xk"}), ""),
    "another key of a job": (
        "secrets", "UPDATE", changed(SECRET, data={"job-key": "eA=="}), changed(SECRET, data={"job-key": "aw=="}),
        "nothing in a Secret but tokens"),
    "a certificate less": (
        "secrets", "UPDATE", changed(SECRET, data={}), changed(SECRET, data={"ca.crt": "aw=="}),
        "nothing in a Secret but tokens"),
    "changing a foreign Secret": (
        "secrets", "UPDATE", changed(FOREIGN, data={"a": "b"}), FOREIGN,
        "changes and deletes objects of its jobs only"),
    "deleting a Secret": ("secrets", "DELETE", None, SECRET, "deletes no Secrets"),
    "a load balancer": (
        "services", "CREATE", changed(SERVICE, spec__type="LoadBalancer"), None, "type ClusterIP only"),
    "an external address": (
        "services", "CREATE", changed(SERVICE, spec__externalIPs=["1.2.3.4"]), None, "no external addresses"),
    "a Service made a load balancer": (
        "services", "UPDATE", changed(SERVICE, spec__type="LoadBalancer"), SERVICE, "type ClusterIP only"),
    "it writes over what others wrote": (
        "nodes", "UPDATE", changed(MARKED, metadata__managedFields=[{"manager": "x"}], metadata__resourceVersion="2"),
        NODE, ""),
    "another taint": (
        "nodes", "UPDATE", changed(NODE, spec__taints=[TAINT, {"key": "x", "effect": "NoExecute"}]), NODE, "of a node"),
    "a taint that evicts": (
        "nodes", "UPDATE", changed(NODE, spec__taints=[*NODE["spec"]["taints"], {**TAINT, "effect": "NoExecute"}]),
        NODE, "nothing of a node but its taint"),
    "a taint less": ("nodes", "UPDATE", changed(NODE, spec__taints=[]), NODE, "nothing of a node but its taint"),
    "a label of a node": ("nodes", "UPDATE", changed(NODE, metadata__labels__zone="b"), NODE, "of a node's metadata"),
    "an annotation less": ("nodes", "UPDATE", changed(NODE, metadata__annotations={}), NODE, "of a node's metadata"),
    "a cordon": ("nodes", "UPDATE", changed(NODE, spec__unschedulable=True), NODE, "nothing of a node but its taint"),
    "a condition of others": (
        "nodes/status", "UPDATE", changed(NODE, status__conditions=[READY, {"type": "x", "status": "True"}]), NODE,
        "nothing of a node's status but"),
    "a node that is not ready": (
        "nodes/status", "UPDATE", changed(NODE, status__conditions=[{**READY, "status": "False"}]), NODE,
        "nothing of a node's status but"),
    "a condition less": (
        "nodes/status", "UPDATE", changed(NODE, status__conditions=[]), NODE, "nothing of a node's status but"),
    "an address of a node": (
        "nodes/status", "UPDATE", changed(NODE, status__addresses=[{"type": "InternalIP", "address": "6.6.6.6"}]), NODE,
        "nothing of a node's status but"),
    "room of a node": (
        "nodes/status", "UPDATE", changed(NODE, status__allocatable={"cpu": "64"}), NODE,
        "nothing of a node's status but"),
    "a label of a node beside its status": (
        "nodes/status", "UPDATE", changed(NODE, metadata__labels__zone="b"), NODE, "nothing of a node's metadata but"),
    "a mark of a node beside its status": (
        "nodes/status", "UPDATE", changed(OFFENDS, metadata__annotations={"x": "y", TAINT["key"]: "t"}), NODE,
        "nothing of a node's metadata but"),
    "a condition twice": (
        "nodes/status", "UPDATE", changed(NODE, status__conditions=[READY, READY]), NODE, "of a node's status but"),
    **{
        f"{what} through {resource}": (
            resource, "UPDATE", changed(NODE, **{path: value}), NODE, "nothing of a node's metadata but")
        for resource in ("nodes", "nodes/status")
        for what, path, value in [
            ("an owner that is not, for which a node is deleted", "metadata__ownerReferences", [NOBODY]),
            ("a finalizer of a node", "metadata__finalizers", ["example.com/stuck"]),
            ("a field that metadata may have one day", "metadata__one_day", "x"),
            ("no labels of a node", "metadata__labels", None),
        ]
    },
    **{
        f"{path} of a node": (
            "nodes/status", "UPDATE", changed(IMAGES, **{f"status__{path}": value}), IMAGES, "of a node's status but")
        for path, value in {
            "images": [{"names": ["evil"], "sizeBytes": 1}],
            "capacity": {"cpu": "64"},
            "config": {"error": "x"},
            "runtimeHandlers": [{"name": "runc"}],
            "features": {"supplementalGroupsPolicy": True},
            "declaredFeatures": ["x"],
            "one_day": "x",
            "addresses": None,
        }.items()
    },
    "fields of a node that specs may have one day": (
        "nodes", "UPDATE", changed(NODE, spec__one_day="x"), NODE, "nothing of a node but its taint"),
    "a network of a node": (
        "nodes", "UPDATE", changed(NODE, spec__podCIDRs=["10.0.0.0/8"]), NODE, "nothing of a node but its taint"),
    "deleting a node": ("nodes", "DELETE", None, NODE, "with quarantine.mode On only"),
}  # fmt: skip


RESERVED = (*ON[:-1], f"{ON[-1]},admissionPolicy.reservePods=true")
OTHER = changed(FOREIGN, metadata__labels__mine="yes")
OWNER = POD["metadata"]["ownerReferences"]
RESERVED_CASES: dict[str, Case] = {
    "a pod of somebody's own": ("pods", "CREATE", FOREIGN, None, ""),
    "a pod of a ReplicaSet": (
        "pods", "CREATE",
        changed(FOREIGN, metadata__ownerReferences=[{**OWNER[0], "apiVersion": "apps/v1", "kind": "ReplicaSet"}]), None,
        ""),
    "a label of somebody's own": ("pods", "UPDATE", OTHER, FOREIGN, ""),
    "a pod that is a job's already": ("pods", "UPDATE", changed(POD, metadata__labels__mine="yes"), POD, ""),
    "a pod that a job lets go": ("pods", "UPDATE", FOREIGN, POD, ""),
    "a copy of a job's pod": ("pods", "CREATE", POD, None, "alone creates pods of its jobs"),
    "a pod with a job's label": (
        "pods", "CREATE", changed(FOREIGN, metadata__labels={"unbroken.dev/job": "digits"}), None,
        "alone creates pods"),
    "a pod with a job as its owner": (
        "pods", "CREATE", changed(FOREIGN, metadata__ownerReferences=OWNER), None, "alone creates pods"),
    "a pod with an annotation of ours": (
        "pods", "CREATE", changed(FOREIGN, metadata__annotations={"unbroken.dev/template": "x"}), None,
        "alone creates pods"),
    "a pod that gets a job's label": (
        "pods", "UPDATE", changed(FOREIGN, metadata__labels={"unbroken.dev/job": "digits"}), FOREIGN,
        "no pod becomes one"),
    "a pod that gets a job as its owner": (
        "pods", "UPDATE", changed(FOREIGN, metadata__ownerReferences=OWNER), FOREIGN, "no pod becomes one"),
}  # fmt: skip


@lru_cache(maxsize=8)
def policies(*options: str) -> dict[str, JsonObject]:
    """Return the policies' specs by resource."""
    items = rendered(helm_or_skip(), *options)
    found = {item["metadata"]["name"]: item["spec"] for item in items if item["kind"] == "ValidatingAdmissionPolicy"}
    return {name.removeprefix("unbroken-"): spec for name, spec in found.items()}


def as_reviewed(case: Case, namespace: str = "ml") -> JsonObject:
    """Return what the expressions see of a request; the API server leaves out what is not there."""
    resource, operation, item, before, _ = case
    resource, _, subresource = resource.partition("/")
    kinded = {"kind": KIND[resource], "apiVersion": "v1"}
    request = {"operation": operation, "namespace": namespace, "subResource": subresource}
    objects = {"object": item, "oldObject": before}
    return {"request": request} | {name: {**kinded, **found} for name, found in objects.items() if found is not None}


def denied_in_memory(spec: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """Return the first message, or nothing."""
    environment = celpy.Environment()
    variables = {name: json_to_cel(seen.get(name)) for name in ("request", "object", "oldObject")}
    for validation in spec["validations"]:
        if not environment.program(environment.compile(validation["expression"])).evaluate(variables):
            return str(validation["message"])
    return ""


@pytest.mark.parametrize("name", CASES)
def test_the_operators_account_may_write_what_the_operator_makes_and_nothing_else(name: str) -> None:
    resource, *_, wanted = CASES[name]
    seen = denied_in_memory(policies(*ON)[resource.partition("/")[0]], as_reviewed(CASES[name]))
    assert (wanted in seen) if wanted else not seen, seen


@pytest.mark.parametrize("name", RESERVED_CASES)
def test_nobody_else_makes_a_pod_of_a_job_where_pods_are_reserved(name: str) -> None:
    wanted = RESERVED_CASES[name][-1]
    seen = denied_in_memory(policies(*RESERVED)["reserved"], as_reviewed(RESERVED_CASES[name]))
    assert (wanted in seen) if wanted else not seen, seen


@pytest.mark.parametrize(("scope", "num"), [("scope=Cluster", 1), ("scope=Namespaces,namespaces={ml}", 2)])
def test_pods_are_reserved_for_the_operator_in_the_namespaces_that_it_serves(scope: str, num: int) -> None:
    wanted = f"{scope},admissionPolicy.enabled=Always,admissionPolicy.reservePods=true"
    conditions = [item["expression"] for item in policies("--set", wanted)["reserved"]["matchConditions"]]
    assert (
        conditions
        == [
            "request.userInfo.username != 'system:serviceaccount:ops:unbroken'",
            'request.namespace in ["ml","ops"]',
        ][:num]
    )


@pytest.mark.parametrize("resource", ["pods", "services", "secrets", "networkpolicies"])
def test_it_writes_nothing_in_the_clusters_own_namespaces(resource: str) -> None:
    kind = "training pods" if resource == "pods" else KIND[resource].replace("Policy", "Policie") + "s"
    name = f"it makes {kind}"
    seen = denied_in_memory(policies(*ON)[resource], as_reviewed(CASES[name], "kube-system"))
    assert "has no business in this namespace" in seen


def test_it_writes_no_node_without_quarantine() -> None:
    off = policies("--kube-version", "1.33.0", "--set", "scope=Cluster")
    for name in ("it taints a node", "it tells of a node"):
        assert "with quarantine.mode On only" in denied_in_memory(off["nodes"], as_reviewed(CASES[name]))


@pytest.mark.parametrize(
    ("words", "denied"),
    [
        ("quarantine.mode=On", "it tells of a node"),
        ("quarantine.mode=DryRun,quarantine.condition=true", "it taints a node"),
    ],
)
def test_taint_and_condition_are_granted_apart(words: str, denied: str) -> None:
    found = policies("--kube-version", "1.33.0", "--set", f"scope=Cluster,{words}")["nodes"]
    for name in ("it taints a node", "it tells of a node"):
        assert bool(denied_in_memory(found, as_reviewed(CASES[name]))) is (name == denied)


@pytest.mark.parametrize(
    ("options", "has_policies"),
    [
        pytest.param(("--kube-version", "1.33.0"), False, id="namespaces"),
        pytest.param(("--kube-version", "1.33.0", "--set", "scope=Cluster"), True, id="cluster"),
        pytest.param(("--kube-version", "1.29.0", "--set", "scope=Cluster"), False, id="too old"),
        pytest.param(("--kube-version", "1.29.0", "--set", "admissionPolicy.enabled=Always"), True, id="always"),
        pytest.param(
            ("--kube-version", "1.33.0", "--set", "scope=Cluster,admissionPolicy.enabled=Never"), False, id="never"
        ),
    ],
)
def test_policies_come_with_all_namespaces_where_kubernetes_knows_them(
    options: tuple[str, ...], has_policies: bool
) -> None:
    items = rendered(helm_or_skip(), *options)
    found = [item for item in items if item["kind"] == "ValidatingAdmissionPolicy"]
    bindings = {item["spec"]["policyName"]: item["spec"] for item in items if item["kind"].endswith("PolicyBinding")}
    assert len(found) == (5 if has_policies else 0)
    for item in found:
        assert item["spec"]["failurePolicy"] == "Fail"
        (condition,) = item["spec"]["matchConditions"]
        assert condition["expression"] == "request.userInfo.username == 'system:serviceaccount:ops:unbroken'"
        assert bindings[item["metadata"]["name"]]["validationActions"] == ["Deny", "Audit"]


@pytest.mark.parametrize("words", ["quarantine.mode=On", "quarantine.condition=true"])
@pytest.mark.parametrize(
    ("version", "more", "names"),
    [
        pytest.param("1.33.0", "scope=Namespaces", ["nodes"], id="any scope"),
        pytest.param("1.33.0", "namespaces={ml},admissionPolicy.reservePods=true", ["nodes"], id="namespaces"),
        pytest.param("1.33.0", "admissionPolicy.enabled=Never", [], id="never"),
        pytest.param("1.29.0", "scope=Cluster", [], id="too old"),
    ],
)
def test_who_may_write_nodes_is_kept_to_its_taint_or_condition_in_any_scope(
    words: str, version: str, more: str, names: list[str]
) -> None:
    """Seen before: with listed namespaces, the default, the account had the right and no policy."""
    found = policies("--kube-version", version, "--set", f"{words},{more}")
    assert list(found) == names
    if names:
        for case in ("a finalizer of a node through nodes", "a finalizer of a node through nodes/status"):
            assert denied_in_memory(found["nodes"], as_reviewed(CASES[case]))
        granted = "it taints a node" if words == "quarantine.mode=On" else "it tells of a node"
        assert denied_in_memory(found["nodes"], as_reviewed(CASES[granted])) == ""


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("quarantine.mode=On,admissionPolicy.enabled=Never", True),
        ("quarantine.condition=true,admissionPolicy.enabled=Never", True),
        ("quarantine.condition=true", False),
        ("admissionPolicy.enabled=Never", False),
    ],
)
def test_helm_says_that_no_policy_keeps_the_account_to_its_taint(words: str, is_told: bool) -> None:
    options = ("--dry-run=client", "--namespace", "ops", "--set", f"registry={REGISTRY},{words}")
    done = run(helm_or_skip(), "install", "unbroken", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    assert ("can have nodes deleted" in done.stdout.partition("NOTES:")[2]) is is_told


_TEXT: JsonObject = {"type": "string", "maxLength": 253}
_MAP: JsonObject = {"type": "object", "maxProperties": 16, "additionalProperties": _TEXT}


def _list(**fields: JsonObject) -> JsonObject:
    return {"type": "array", "maxItems": 8, "items": {"type": "object", "properties": fields}}


def _schema(resource: str) -> JsonObject:
    """Return what the policies read of an object, typed, as the API server types it for them."""
    owner = dict.fromkeys(("apiVersion", "kind", "name", "uid"), _TEXT) | {"controller": {"type": "boolean"}}
    metadata = {"name": _TEXT, "labels": _MAP, "annotations": _MAP, "ownerReferences": _list(**owner)}
    specs: dict[str, JsonObject] = {
        "pods": {"containers": _list(name=_TEXT, image=_TEXT), "x": _TEXT},
        "services": {"type": _TEXT, "externalIPs": {"type": "array", "maxItems": 8, "items": _TEXT}, "selector": _MAP},
        "secrets": {},
        "networkpolicies": {"podSelector": {"type": "object", "properties": {"matchLabels": _MAP}}, "ingress": _list()},
        "nodes": {"taints": _list(key=_TEXT, effect=_TEXT)},
    }
    fields = {"metadata": {"type": "object", "properties": metadata}, "type": _TEXT}
    if resource == "secrets":
        fields |= {"data": _MAP}
    if resource == "nodes":
        conditions = {"conditions": _list(type=_TEXT, status=_TEXT)}
        fields |= {"status": {"type": "object", "properties": conditions}}
    item: JsonObject = {
        "type": "object",
        "properties": fields | {"spec": {"type": "object", "properties": specs[resource]}},
    }
    request = {"type": "object", "properties": dict.fromkeys(("operation", "namespace", "subResource"), _TEXT)}
    # As values of a map both have one type, as they have for a policy.
    objects = {"type": "object", "maxProperties": 2, "additionalProperties": item}
    properties: JsonObject = {"objects": objects, "request": request}
    if resource == "nodes":
        # What rules go through field by field, whatever they are: their values as JSON, so all have one type.
        properties |= {"parts": {"type": "object", "maxProperties": 6, "additionalProperties": _MAP}}
    return {"type": "object", "properties": properties}


def _definition(resource: str, spec: Mapping[str, Any]) -> JsonObject:
    """Return a CustomResourceDefinition that validates requests as the policy would."""
    rules = []
    for item in spec["validations"]:
        text = re.sub(r"\bdyn\((object|oldObject)\.(\w+)\)", r"self.parts['\1 \2']", item["expression"])
        text = re.sub(r"\b(object|oldObject)\.", r"self.objects['\1'].", text)
        text = re.sub(
            r"\brequest\.(namespace)?", lambda found: "self.request." + ("__namespace__" if found[1] else ""), text
        )
        rules.append({"rule": text, "message": item["message"]})
    schema = _schema(resource) | {"x-kubernetes-validations": rules}
    root = {"type": "object", "properties": {"spec": schema}}
    names = {"kind": f"Asked{KIND[resource]}", "plural": f"asked{resource}", "singular": f"asked{resource}x"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": root}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"asked{resource}.policies.test"},
        "spec": {"group": "policies.test", "names": names, "scope": "Cluster", "versions": [version]},
    }


@pytest.fixture
def kubectl() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Type a command at the real API server; what it made of policies.test goes at the end."""
    place = ("--kubeconfig", str(kubeconfig_of("modern")))

    def type_(*words: str, item: JsonObject | None = None) -> subprocess.CompletedProcess[str]:
        given = None if item is None else json.dumps(item)
        return subprocess.run(
            [KUBECTL, *place, *words], input=given, capture_output=True, text=True, timeout=100, check=False
        )

    yield type_
    type_("delete", "crd", *(f"asked{resource}.policies.test" for resource in KIND), "--ignore-not-found")


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_real_api_server_compiles_the_policies_and_answers_alike(
    kubectl: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for resource, spec in policies(*ON).items():
        defined = kubectl("apply", "-f", "-", item=_definition(resource, spec))
        assert defined.returncode == 0, defined.stderr

    def is_served() -> bool:
        listed = kubectl("get", *(",".join(f"asked{resource}.policies.test" for resource in KIND),), "-o", "name")
        return listed.returncode == 0

    wait_until(is_served, "the definitions are served")
    ask_all(kubectl, CASES)
    reserved = kubectl("apply", "-f", "-", item=_definition("pods", policies(*RESERVED)["reserved"]))
    assert reserved.returncode == 0, reserved.stderr
    first = RESERVED_CASES["a copy of a job's pod"]
    wait_until(lambda: first[-1] in ask(kubectl, first).stderr, "the other rules are in force")
    ask_all(kubectl, RESERVED_CASES)


def ask(kubectl: Callable[..., subprocess.CompletedProcess[str]], case: Case) -> subprocess.CompletedProcess[str]:
    """Have the API server judge a case."""
    seen = as_reviewed(case)
    asked = {
        "apiVersion": "policies.test/v1",
        "kind": f"Asked{KIND[case[0].partition('/')[0]]}",
        "metadata": {"name": "x"},
        "spec": {"request": seen.pop("request"), "objects": seen, "parts": _parts(seen)},
    }
    return kubectl("create", "--dry-run=server", "--validate=false", "-f", "-", item=asked)


def _parts(objects: Mapping[str, JsonObject]) -> dict[str, dict[str, str]]:
    """Return the fields of metadata, spec and status, each as JSON."""
    return {
        f"{name} {part}": {field: json.dumps(value, sort_keys=True) for field, value in fields.items()}
        for name, item in objects.items()
        for part, fields in item.items()
        if part in ("metadata", "spec", "status")
    }


def ask_all(kubectl: Callable[..., subprocess.CompletedProcess[str]], cases: Mapping[str, Case]) -> None:
    """Compare what the API server makes of each with what is wanted."""
    for name, case in cases.items():
        done, wanted = ask(kubectl, case), case[-1]
        assert (done.returncode == 0) is (not wanted), f"{name}: {done.stderr}"
        assert wanted in done.stderr, name
