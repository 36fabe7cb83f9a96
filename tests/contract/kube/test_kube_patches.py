"""PATCH in all its kinds, and who owns which field."""

from tests.waiting import wait_until

from .kube_target import Document, Target, config_map, needs, pod


def maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def test_json_patch_changes_tests_and_removes(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a", x="1", y="2")).ok(201)
    operations = [
        {"op": "test", "path": "/data/x", "value": "1"},
        {"op": "replace", "path": "/data/x", "value": "3"},
        {"op": "remove", "path": "/data/y"},
        {"op": "add", "path": "/metadata/labels", "value": {"a/b": "c"}},
        {"op": "copy", "from": "/data/x", "path": "/data/z"},
    ]
    after = target.json_patch(f"{maps(namespace)}/a", operations).ok()
    assert after["data"] == {"x": "3", "z": "3"}
    assert after["metadata"]["labels"] == {"a/b": "c"}


def test_json_patch_whose_test_fails_changes_nothing(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a", x="1")).ok(201)
    operations = [{"op": "test", "path": "/data/x", "value": "2"}, {"op": "remove", "path": "/data/x"}]
    assert target.json_patch(f"{maps(namespace)}/a", operations).status == (422, "Invalid")
    assert target.get(f"{maps(namespace)}/a").ok()["data"] == {"x": "1"}


def test_json_patch_that_is_no_list_is_refused(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    assert target.json_patch(f"{maps(namespace)}/a", {"op": "remove"}).status == (400, "BadRequest")


def test_merge_patch_deletes_with_null(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a", x="1", y="2")).ok(201)
    after = target.merge(f"{maps(namespace)}/a", {"data": {"x": None, "z": "3"}}).ok()
    assert after["data"] == {"y": "2", "z": "3"}


def test_merge_patch_with_a_stale_revision_is_a_conflict(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a", x="1")).ok(201)
    target.merge(f"{maps(namespace)}/a", {"data": {"x": "2"}}).ok()
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "data": {"x": "3"}}
    assert target.merge(f"{maps(namespace)}/a", stale).status == (409, "Conflict")


def test_patch_that_changes_nothing_keeps_the_revision(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a", x="1")).ok(201)
    after = target.merge(f"{maps(namespace)}/a", {"data": {"x": "1"}}).ok()
    assert after["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_patch_of_a_missing_object_is_not_found(target: Target, namespace: str) -> None:
    assert target.merge(f"{maps(namespace)}/a", {"data": {}}).status == (404, "NotFound")


def test_strategic_patch_merges_lists_by_their_keys(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("p", tolerations=[{"key": "a", "operator": "Exists"}])).ok(201)
    status = {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Initialized", "status": "True"}]}
    target.strategic(f"{path}/p/status", {"status": status}).ok()
    after = target.strategic(f"{path}/p/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}).ok()
    found = {
        entry["type"]: entry["status"] for entry in after["status"]["conditions"] if entry["type"] != "PodScheduled"
    }
    assert found == {"Ready": "True", "Initialized": "True"}


def test_strategic_patch_deletes_entries_and_keys(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, {**pod("p"), "metadata": {"name": "p", "finalizers": ["contract.test/a", "contract.test/b"]}}).ok(
        201
    )
    status = {"conditions": [{"type": "One", "status": "True"}, {"type": "Two", "status": "True"}]}
    target.strategic(f"{path}/p/status", {"status": status}).ok()
    removal = {"status": {"conditions": [{"$patch": "delete", "type": "One"}]}}
    after = target.strategic(f"{path}/p/status", removal).ok()
    assert "One" not in {entry["type"] for entry in after["status"]["conditions"]}
    fewer = target.strategic(
        f"{path}/p", {"metadata": {"$deleteFromPrimitiveList/finalizers": ["contract.test/a"]}}
    ).ok()
    assert fewer["metadata"]["finalizers"] == ["contract.test/b"]
    target.merge(f"{path}/p", {"metadata": {"finalizers": None}}).ok()


def test_finalizers_merge_as_a_set(target: Target, namespace: str) -> None:
    body = config_map("a")
    body["metadata"]["finalizers"] = ["contract.test/a"]
    target.post(maps(namespace), body).ok(201)
    after = target.strategic(f"{maps(namespace)}/a", {"metadata": {"finalizers": ["contract.test/b"]}}).ok()
    assert sorted(after["metadata"]["finalizers"]) == ["contract.test/a", "contract.test/b"]
    target.merge(f"{maps(namespace)}/a", {"metadata": {"finalizers": None}}).ok()


def test_unknown_patch_type_is_refused(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    refused = target.call("PATCH", f"{maps(namespace)}/a", {}, media="text/plain")
    assert refused.status == (415, "UnsupportedMediaType")


def applied(name: str, **data: str) -> Document:
    return config_map(name, **data)


def test_apply_creates_then_changes_only_its_own_fields(target: Target, namespace: str) -> None:
    path = f"{maps(namespace)}/a"
    target.apply(path, applied("a", x="1", y="1"), "one").ok(201)
    target.merge(path, {"data": {"z": "3"}}, fieldManager="other").ok()
    after = target.apply(path, applied("a", x="2"), "one").ok()
    assert after["data"] == {"x": "2", "z": "3"}, "y was given up, z is another's"
    managers = {(entry["manager"], entry["operation"]) for entry in after["metadata"]["managedFields"]}
    assert managers == {("one", "Apply"), ("other", "Update")}


def test_apply_refuses_to_change_what_another_set(target: Target, namespace: str) -> None:
    path = f"{maps(namespace)}/a"
    target.apply(path, applied("a", x="1"), "one").ok(201)
    refused = target.apply(path, applied("a", x="2"), "two")
    assert refused.status == (409, "Conflict")
    cause = refused.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".data.x")
    assert cause["message"] == 'conflict with "one"'
    assert refused.body["message"].startswith('Apply failed with 1 conflict: conflict with "one"')
    after = target.apply(path, applied("a", x="2"), "two", force="true").ok()
    assert after["data"] == {"x": "2"}
    owners = [entry["manager"] for entry in after["metadata"]["managedFields"] if "f:data" in entry["fieldsV1"]]
    assert owners == ["two"]


def test_same_value_is_shared_without_conflict(target: Target, namespace: str) -> None:
    path = f"{maps(namespace)}/a"
    target.apply(path, applied("a", x="1"), "one").ok(201)
    target.apply(path, applied("a", x="1"), "two").ok()
    after = target.apply(path, config_map("a"), "one").ok()
    assert after["data"] == {"x": "1"}, "still the other's"


def test_apply_merges_lists_by_their_keys(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services/s"
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {"ports": [{"name": "a", "port": 1, "protocol": "TCP"}]},
    }
    target.apply(path, body, "one").ok(201)
    body["spec"] = {"ports": [{"name": "b", "port": 2, "protocol": "TCP"}]}
    after = target.apply(path, body, "two").ok()
    assert [port["name"] for port in after["spec"]["ports"]] == ["a", "b"]
    body["spec"] = {"ports": []}
    fewer = target.apply(path, body, "two").ok()
    assert [port["name"] for port in fewer["spec"]["ports"]] == ["a"]


def test_apply_that_changes_nothing_keeps_the_revision(target: Target, namespace: str) -> None:
    path = f"{maps(namespace)}/a"
    made = target.apply(path, applied("a", x="1"), "one").ok(201)
    after = target.apply(path, applied("a", x="1"), "one").ok()
    assert after["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_apply_without_a_manager_is_refused(target: Target, namespace: str) -> None:
    refused = target.call("PATCH", f"{maps(namespace)}/a", config_map("a"), media="application/apply-patch+yaml")
    assert refused.code in (400, 422)
    assert "fieldManager" in refused.body["message"]


def test_apply_reads_yaml(target: Target, namespace: str) -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  x: '1'\n"
    reply = target.call(
        "PATCH", f"{maps(namespace)}/a", raw=text.encode(), media="application/apply-patch+yaml", fieldManager="one"
    )
    assert reply.ok(201)["data"] == {"x": "1"}


@needs("workload-scale")
def test_scale_is_read_and_written(target: Target, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    labels = {"app": "a"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "m", "image": "example.test/i:1"}], "nodeSelector": {"contract": "none"}},
    }
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
    }
    target.post(path, body).ok(201)
    scale = target.get(f"{path}/d/scale").ok()
    assert (scale["kind"], scale["apiVersion"], scale["spec"].get("replicas", 0)) == ("Scale", "autoscaling/v1", 0)
    target.merge(f"{path}/d/scale", {"spec": {"replicas": 1}}).ok()
    wait_until(lambda: target.get(f"{path}/d").ok()["spec"]["replicas"] == 1, "the deployment has the new scale")
