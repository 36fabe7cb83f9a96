"""Objects: identity, names, namespaces, replacement, refusals."""

import time

from tests.waiting import wait_until

from .kube_target import Target, config_map, definition, needs, pod


def maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def test_created_object_gets_uid_revision_and_time(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a", x="1")).ok(201)
    metadata = made["metadata"]
    assert len(metadata["uid"]) == 36
    assert int(metadata["resourceVersion"]) > 0
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["namespace"] == namespace
    assert target.get(f"{maps(namespace)}/a").ok() == made


def test_same_name_is_refused_as_already_existing(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    refused = target.post(maps(namespace), config_map("a"))
    assert refused.status == (409, "AlreadyExists")
    assert refused.body["message"] == 'configmaps "a" already exists'
    assert refused.body["details"] == {"name": "a", "kind": "configmaps"}


def test_missing_object_is_refused_with_its_name(target: Target, namespace: str) -> None:
    refused = target.get(f"{maps(namespace)}/nowhere")
    assert refused.status == (404, "NotFound")
    assert refused.body["message"] == 'configmaps "nowhere" not found'
    assert refused.body["details"] == {"name": "nowhere", "kind": "configmaps"}


def test_generated_names_differ(target: Target, namespace: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "run-"}}
    names = {target.post(maps(namespace), body).ok(201)["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("run-") and len(name) == 9 for name in names)


@needs("namespace-check")
def test_missing_namespace_is_refused(target: Target) -> None:
    refused = target.post(maps("no-such-namespace"), config_map("a"))
    assert refused.status == (404, "NotFound")
    assert refused.body["message"] == 'namespaces "no-such-namespace" not found'


def test_namespace_of_body_and_path_must_agree(target: Target, namespace: str) -> None:
    body = config_map("a")
    body["metadata"]["namespace"] = "other"
    assert target.post(maps(namespace), body).status == (400, "BadRequest")


@needs("namespace-controller")
def test_standard_namespaces_exist(target: Target) -> None:
    for name in ("default", "kube-system"):
        assert target.get(f"/api/v1/namespaces/{name}").ok()["status"]["phase"] == "Active"


@needs("core-validation")
def test_name_that_is_no_rfc_1123_name_is_refused(target: Target, namespace: str) -> None:
    refused = target.post(maps(namespace), config_map("Not_A_Name"))
    assert refused.status == (422, "Invalid")
    cause = refused.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldValueInvalid", "metadata.name")
    assert cause["message"].startswith('Invalid value: "Not_A_Name": a ')


@needs("core-validation")
def test_name_that_is_too_long_is_refused(target: Target, namespace: str) -> None:
    refused = target.post(maps(namespace), config_map("a" * 254))
    assert refused.status == (422, "Invalid")
    assert "must be no more than 253" in refused.body["message"]
    assert refused.body["details"]["kind"] == "ConfigMap"


@needs("core-validation")
def test_label_value_that_is_too_long_is_refused(target: Target, namespace: str) -> None:
    body = config_map("a")
    body["metadata"]["labels"] = {"x": "v" * 64}
    refused = target.post(maps(namespace), body)
    assert refused.status == (422, "Invalid")
    assert refused.body["details"]["causes"][0]["field"] == "metadata.labels"


def test_stale_replacement_is_a_conflict(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a", x="1")).ok(201)
    made["data"]["x"] = "2"
    newer = target.put(f"{maps(namespace)}/a", made).ok()
    assert int(newer["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    made["data"]["x"] = "3"
    refused = target.put(f"{maps(namespace)}/a", made)
    assert refused.status == (409, "Conflict")
    assert refused.body["message"].startswith('Operation cannot be fulfilled on configmaps "a": ')


def test_replacement_without_revision_wins_for_core_kinds(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a", x="1")).ok(201)
    assert target.put(f"{maps(namespace)}/a", config_map("a", x="2")).ok()["data"] == {"x": "2"}


def test_replacement_that_changes_nothing_keeps_the_revision(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a", x="1")).ok(201)
    again = target.put(f"{maps(namespace)}/a", made).ok()
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_replacement_under_another_name_is_refused(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    assert target.put(f"{maps(namespace)}/a", config_map("b")).status == (400, "BadRequest")


def test_identity_survives_a_replacement(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a")).ok(201)
    body = config_map("a", x="2")
    body["metadata"]["creationTimestamp"] = "2001-01-01T00:00:00Z"
    after = target.put(f"{maps(namespace)}/a", body).ok()
    for field in ("uid", "creationTimestamp"):
        assert after["metadata"][field] == made["metadata"][field]


def test_dry_run_changes_nothing(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a", x="1"), dryRun="All").ok(201)
    assert target.get(f"{maps(namespace)}/a").code == 404
    target.post(maps(namespace), config_map("a", x="1")).ok(201)
    assert target.merge(f"{maps(namespace)}/a", {"data": {"x": "2"}}, dryRun="All").ok()["data"] == {"x": "2"}
    target.delete(f"{maps(namespace)}/a", dryRun="All").ok()
    assert target.get(f"{maps(namespace)}/a").ok()["data"] == {"x": "1"}


def test_revision_set_on_creation_is_refused(target: Target, namespace: str) -> None:
    body = config_map("a")
    body["metadata"]["resourceVersion"] = "5"
    refused = target.post(maps(namespace), body)
    assert refused.code in (400, 500)
    assert "resourceVersion should not be set on objects to be created" in refused.body["message"]


def test_unknown_path_is_not_found(target: Target) -> None:
    for path in ("/api/v1/unicorns", "/apis/no.such.group/v1/things", "/nowhere"):
        assert target.get(path).code == 404


def test_wrong_method_is_refused(target: Target, namespace: str) -> None:
    assert target.post(f"{maps(namespace)}/a", config_map("a")).status == (405, "MethodNotAllowed")


@needs("authentication")
def test_requests_with_a_wrong_token_are_refused(target: Target) -> None:
    for value in ("Bearer wrong", "bearer 0"):
        assert target.call("GET", "/api/v1/nodes", headers={"Authorization": value}).status == (401, "Unauthorized")


def test_health_and_version_answer(target: Target) -> None:
    for path in ("/healthz", "/readyz", "/livez"):
        assert target.get(path).text == "ok"
    assert target.get("/version").ok()["major"] == "1"


@needs("namespace-controller")
def test_deleted_namespace_takes_its_content_along(target: Target, namespace: str) -> None:
    inner = f"{namespace}-inner"
    target.post("/api/v1/namespaces", {"metadata": {"name": inner}}).ok(201)
    target.post(maps(inner), config_map("a")).ok(201)
    body = config_map("held")
    body["metadata"]["finalizers"] = ["contract.test/hold"]
    target.post(maps(inner), body).ok(201)
    target.delete(f"/api/v1/namespaces/{inner}")
    wait_until(lambda: target.get(f"{maps(inner)}/a").code == 404, "the content goes")
    assert target.get(f"/api/v1/namespaces/{inner}").ok()["status"]["phase"] == "Terminating"
    refused = target.post(maps(inner), config_map("late"))
    assert refused.status == (403, "Forbidden")
    assert refused.body["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    target.merge(f"{maps(inner)}/held", {"metadata": {"finalizers": None}}).ok()
    wait_until(lambda: target.get(f"/api/v1/namespaces/{inner}").code == 404, "the namespace goes with its last object")


@needs("namespace-label")
def test_namespace_carries_its_name_as_label(target: Target, namespace: str) -> None:
    found = target.get(f"/api/v1/namespaces/{namespace}").ok()
    assert found["metadata"]["labels"]["kubernetes.io/metadata.name"] == namespace


@needs("service-accounts")
def test_default_service_account_appears(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_until(lambda: target.get(path).code == 200, "the default service account appears")


def test_generation_rises_with_the_spec_only(target: Target, namespace: str) -> None:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    crd = definition(schema, subresources={"status": {}})
    group = crd["spec"]["group"]
    target.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd).ok(201)
    path = f"/apis/{group}/v1/namespaces/{namespace}/widgets"
    body = {
        "apiVersion": f"{group}/v1",
        "kind": "Widget",
        "metadata": {"name": "w"},
        "spec": {"n": 1},
        "status": {"s": 1},
    }
    wait_until(lambda: target.get(path).code == 200, "the custom kind is served")
    wait_until(lambda: target.post(path, body).code in (201, 409), "the custom kind takes objects")
    made = target.get(f"{path}/w").ok()
    assert made["metadata"]["generation"] == 1
    assert "status" not in made
    with_status = target.merge(f"{path}/w/status", {"spec": {"n": 9}, "status": {"s": 2}}).ok()
    assert (with_status["spec"], with_status["status"]) == ({"n": 1}, {"s": 2})
    assert with_status["metadata"]["generation"] == 1
    labelled = target.merge(f"{path}/w", {"metadata": {"labels": {"a": "b"}}, "status": {"s": 3}}).ok()
    assert (labelled["metadata"]["generation"], labelled["status"]) == (1, {"s": 2})
    changed = target.merge(f"{path}/w", {"spec": {"n": 2}}).ok()
    assert changed["metadata"]["generation"] == 2
    target.delete(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}")


@needs("core-validation")
def test_changed_pod_spec_is_refused(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("p")).ok(201)
    refused = target.merge(f"{path}/p", {"spec": {"restartPolicy": "Never"}})
    assert refused.status == (422, "Invalid")
    assert "pod updates may not change fields other than" in refused.body["message"]
    images = [{"name": "main", "image": "example.test/image:2"}]
    assert (
        target.strategic(f"{path}/p", {"spec": {"containers": images}})
        .ok()["spec"]["containers"][0]["image"]
        .endswith(":2")
    )


def test_event_times_are_kept(target: Target, namespace: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.123456Z", time.gmtime())
    body = {
        "metadata": {"name": "e"},
        "reason": "Tested",
        "message": "hello",
        "type": "Normal",
        "eventTime": stamp,
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": namespace},
        "action": "Test",
        "reportingComponent": "contract.test/suite",
        "reportingInstance": "one",
    }
    made = target.post(f"/api/v1/namespaces/{namespace}/events", body).ok(201)
    assert made["eventTime"] == stamp
