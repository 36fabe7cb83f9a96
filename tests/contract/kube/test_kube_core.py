"""Core kinds: pods, services, secrets, events, workloads, tables."""

from tests.waiting import wait_until

from .kube_target import Document, Target, config_map, needs, pod

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@needs("core-defaults")
def test_pod_is_completed_with_defaults(target: Target, namespace: str) -> None:
    made = target.post(pods(namespace), pod("p")).ok(201)
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["dnsPolicy"], spec["terminationGracePeriodSeconds"]) == (
        "Always",
        "ClusterFirst",
        30,
    )
    assert (spec["schedulerName"], spec["serviceAccountName"]) == ("default-scheduler", "default")
    container = spec["containers"][0]
    assert (container["imagePullPolicy"], container["terminationMessagePath"]) == (
        "IfNotPresent",
        "/dev/termination-log",
    )
    assert (made["status"]["phase"], made["status"]["qosClass"]) == ("Pending", "BestEffort")
    keys = {entry["key"] for entry in spec["tolerations"]}
    assert keys >= {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


@needs("core-defaults")
def test_limits_become_requests(target: Target, namespace: str) -> None:
    container = {
        "name": "m",
        "image": "i:1",
        "resources": {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": 8}},
    }
    made = target.post(pods(namespace), pod("p", containers=[container])).ok(201)
    assert made["spec"]["containers"][0]["resources"]["requests"] == {
        "cpu": "1",
        "memory": "1Gi",
        "nvidia.com/gpu": "8",
    }
    assert made["status"]["qosClass"] == "Guaranteed"


@needs("core-validation")
def test_broken_pods_are_refused(target: Target, namespace: str) -> None:
    image = {"name": "m", "image": "i"}
    table: list[tuple[Document, str]] = [
        ({"containers": []}, "spec.containers"),
        ({"containers": [{"image": "i"}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "m"}]}, "spec.containers[0].image"),
        ({"containers": [image, image]}, "spec.containers[1].name"),
        ({"containers": [{"name": "M_", "image": "i"}]}, "spec.containers[0].name"),
        ({"containers": [image], "restartPolicy": "Perhaps"}, "spec.restartPolicy"),
        (
            {"containers": [{**image, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
            "spec.containers[0].volumeMounts[0].name",
        ),
        ({"containers": [{**image, "env": [{"value": "x"}]}]}, "spec.containers[0].env[0].name"),
        ({"containers": [{**image, "ports": [{"containerPort": 99999}]}]}, "spec.containers[0].ports[0].containerPort"),
    ]
    for spec, field in table:
        refused = target.post(pods(namespace), pod("p", **spec))
        assert refused.status == (422, "Invalid"), spec
        assert field in {cause["field"] for cause in refused.body["details"]["causes"]}, refused.body
        assert refused.body["message"].startswith('Pod "p" is invalid: ')


def test_status_of_a_pod_is_written_apart(target: Target, namespace: str) -> None:
    target.post(pods(namespace), pod("p")).ok(201)
    target.merge(f"{pods(namespace)}/p/status", {"status": {"phase": "Running", "podIP": "127.1.0.1"}}).ok()
    target.merge(f"{pods(namespace)}/p", {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Failed"}}).ok()
    found = target.get(f"{pods(namespace)}/p").ok()
    assert (found["status"]["phase"], found["metadata"]["labels"]) == ("Running", {"a": "b"})


@needs("pod-subresources", "scheduler-free")
def test_pod_is_bound_once(target: Target, namespace: str) -> None:
    target.post(pods(namespace), pod("p")).ok(201)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p"},
        "target": {"kind": "Node", "name": "n1"},
    }
    assert target.post(f"{pods(namespace)}/p/binding", binding).code == 201
    found = target.get(f"{pods(namespace)}/p").ok()
    assert found["spec"]["nodeName"] == "n1"
    scheduled = {entry["type"]: entry["status"] for entry in found["status"]["conditions"]}
    assert scheduled["PodScheduled"] == "True"
    refused = target.post(f"{pods(namespace)}/p/binding", binding)
    assert refused.status == (409, "Conflict")
    assert 'already assigned to node "n1"' in refused.body["message"]
    target.delete(f"{pods(namespace)}/p", gracePeriodSeconds=0)


@needs("eviction")
def test_eviction_obeys_a_disruption_budget(target: Target, namespace: str) -> None:
    body = pod("p", nodeName="n1")
    body["metadata"]["labels"] = {"app": "x"}
    target.post(pods(namespace), body).ok(201)
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    target.merge(f"{pods(namespace)}/p/status", {"status": ready}).ok()
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}
    target.post(budgets, budget).ok(201)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p", "namespace": namespace}}
    assert target.post(f"{pods(namespace)}/p/eviction", eviction).status == (429, "TooManyRequests")
    target.delete(f"{budgets}/b").ok()
    assert target.post(f"{pods(namespace)}/p/eviction", eviction).code == 201
    assert target.get(f"{pods(namespace)}/p").ok()["metadata"]["deletionTimestamp"]


@needs("pod-subresources")
def test_log_of_a_pod_without_a_node_is_empty(target: Target, namespace: str) -> None:
    target.post(pods(namespace), pod("p")).ok(201)
    assert target.get(f"{pods(namespace)}/p/log").code == 204
    assert target.get(f"{pods(namespace)}/p/log", container="none").status == (400, "BadRequest")
    assert target.get(f"{pods(namespace)}/nobody/log").status == (404, "NotFound")


def service(name: str, **spec: object) -> Document:
    whole = {"ports": [{"name": "web", "port": 80, "protocol": "TCP"}], "selector": {"a": "b"}, **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": whole}


@needs("core-strategies", "loopback-services")
def test_services_get_addresses_on_loopback(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services"
    one = target.post(path, service("one")).ok(201)["spec"]
    two = target.post(path, service("two")).ok(201)["spec"]
    assert one["clusterIP"].startswith("127.96.")
    assert one["clusterIP"] != two["clusterIP"]
    assert one["clusterIPs"] == [one["clusterIP"]]
    assert one["ports"][0]["targetPort"] == 80
    assert target.post(path, service("outside", clusterIP="8.8.8.8")).status == (422, "Invalid")


@needs("core-strategies", "service-patching")
def test_service_keeps_its_address(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services"
    made = target.post(path, service("s")).ok(201)
    body = service("s", selector={"c": "d"})
    body["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    assert target.put(f"{path}/s", body).ok()["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    assert target.merge(f"{path}/s", {"spec": {"clusterIP": "1.2.3.4"}}).status == (422, "Invalid")
    headless = target.post(path, service("headless", clusterIP="None")).ok(201)
    assert headless["spec"]["clusterIP"] == "None"
    assert target.post(path, service("Upper")).status == (422, "Invalid")


@needs("core-strategies")
def test_secret_text_becomes_data(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    made = target.post(path, {"metadata": {"name": "s"}, "stringData": {"a": "b"}}).ok(201)
    assert (made["data"], made["type"]) == ({"a": "Yg=="}, "Opaque")
    assert "stringData" not in made
    assert target.post(path, {"metadata": {"name": "bad"}, "data": {"a": "?"}}).status == (400, "BadRequest")


@needs("events-v1")
def test_event_is_seen_in_both_versions(target: Target, namespace: str) -> None:
    about = {"kind": "Pod", "name": "p", "namespace": namespace}
    made = target.post(
        f"/apis/events.k8s.io/v1/namespaces/{namespace}/events",
        {
            "metadata": {"name": "e"},
            "regarding": about,
            "reason": "Tested",
            "note": "hello",
            "type": "Normal",
            "action": "Do",
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "contract.test/x",
            "reportingInstance": "i",
        },
    ).ok(201)
    assert (made["note"], made["regarding"]["name"]) == ("hello", "p")
    core = target.get(f"/api/v1/namespaces/{namespace}/events/e").ok()
    assert (core["message"], core["involvedObject"]["name"], core["reportingComponent"]) == (
        "hello",
        "p",
        "contract.test/x",
    )


def test_lease_is_renewed(target: Target, namespace: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    body = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "me", "leaseDurationSeconds": 8}}
    made = target.post(path, body).ok(201)
    made["spec"]["renewTime"] = "2026-01-01T00:00:00.123456Z"
    assert target.put(f"{path}/l", made).ok()["spec"]["renewTime"] == "2026-01-01T00:00:00.123456Z"
    assert target.put(f"{path}/l", made).status == (409, "Conflict")


@needs("core-tables")
def test_pods_are_printed_with_their_state(target: Target, namespace: str) -> None:
    node = f"{namespace}-node"
    target.post(pods(namespace), pod("p", nodeName=node)).ok(201)
    status = {
        "phase": "Running",
        "podIP": "127.1.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "main",
                "ready": True,
                "restartCount": 0,
                "image": "i",
                "imageID": "i",
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }
        ],
    }
    target.merge(f"{pods(namespace)}/p/status", {"status": status}).ok()
    table = target.call("GET", pods(namespace), headers=TABLE).ok()
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Ready", "Status", "Restarts", "Age", "IP", "Node", "Nominated Node", "Readiness Gates"]
    cells = table["rows"][0]["cells"]
    assert [str(cell) for cell in cells[:4]] == ["p", "1/1", "Running", "0"]
    assert cells[5:] == ["127.1.0.1", node, "<none>", "<none>"]
    target.delete(f"{pods(namespace)}/p", gracePeriodSeconds=30)
    assert target.call("GET", f"{pods(namespace)}/p", headers=TABLE).ok()["rows"][0]["cells"][2] == "Terminating"
    target.delete(f"{pods(namespace)}/p", gracePeriodSeconds=0)


@needs("core-tables")
def test_waiting_and_failed_containers_are_printed(target: Target, namespace: str) -> None:
    base = {"name": "main", "ready": False, "restartCount": 3, "image": "i", "imageID": ""}
    table = [
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "Running", "CrashLoopBackOff"),
        ({"terminated": {"exitCode": 3, "reason": "Error"}}, "Failed", "Error"),
        ({"terminated": {"exitCode": 0, "reason": "Completed"}}, "Succeeded", "Completed"),
        ({"terminated": {"exitCode": 7}}, "Failed", "ExitCode:7"),
        ({"terminated": {"exitCode": 137, "signal": 9}}, "Failed", "Signal:9"),
    ]
    target.post(pods(namespace), pod("p")).ok(201)
    for state, phase, text in table:
        status = {"phase": phase, "containerStatuses": [{**base, "state": state}]}
        target.merge(f"{pods(namespace)}/p/status", {"status": status}).ok()
        row = target.call("GET", f"{pods(namespace)}/p", headers=TABLE).ok()["rows"][0]["cells"]
        assert (row[2], str(row[3])) == (text, "3")


@needs("core-tables")
def test_nodes_are_printed_with_their_state(target: Target, namespace: str) -> None:
    name = f"{namespace}-node"
    body = {
        "metadata": {"name": name, "labels": {"node-role.kubernetes.io/worker": ""}},
        "spec": {"unschedulable": True},
    }
    target.post("/api/v1/nodes", body).ok(201)
    ready = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"kubeletVersion": "v1"},
        "addresses": [{"type": "InternalIP", "address": "127.0.0.9"}],
    }
    target.strategic(f"/api/v1/nodes/{name}/status", {"status": ready}).ok()
    cells = target.call("GET", f"/api/v1/nodes/{name}", headers=TABLE).ok()["rows"][0]["cells"]
    target.delete(f"/api/v1/nodes/{name}")
    assert cells[:3] == [name, "Ready,SchedulingDisabled", "worker"]
    assert cells[5] == "127.0.0.9"


@needs("core-tables")
def test_other_kinds_have_their_columns(target: Target, namespace: str) -> None:
    target.post(f"/api/v1/namespaces/{namespace}/configmaps", config_map("a", x="1")).ok(201)
    prefix = f"/api/v1/namespaces/{namespace}"
    table = {
        f"{prefix}/configmaps": ["Name", "Data", "Age"],
        f"{prefix}/secrets": ["Name", "Type", "Data", "Age"],
        f"{prefix}/services": ["Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age"],
        f"{prefix}/events": ["Last Seen", "Type", "Reason", "Object", "Message"],
        "/api/v1/namespaces": ["Name", "Status", "Age"],
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases": ["Name", "Holder", "Age"],
    }
    for path, wanted in table.items():
        columns = target.call("GET", path, headers=TABLE).ok()["columnDefinitions"]
        assert [column["name"] for column in columns if column["priority"] == 0] == wanted, path


@needs("reviews")
def test_access_review_is_answered(target: Target) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}},
    }
    assert target.post(path, body).ok(201)["status"]["allowed"] is True


def test_rbac_kinds_are_kept(target: Target, namespace: str) -> None:
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    target.post(f"{path}/roles", {"metadata": {"name": "r"}, "rules": rules}).ok(201)
    binding = {
        "metadata": {"name": "b"},
        "subjects": [{"kind": "ServiceAccount", "name": "x", "namespace": namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
    }
    target.post(f"{path}/rolebindings", binding).ok(201)
    assert target.get(f"{path}/roles/r").ok()["rules"] == rules
    target.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "x"}}).ok(201)


@needs("kubelet")
def test_node_that_is_gone_has_no_logs(target: Target, namespace: str) -> None:
    target.post(pods(namespace), pod("p", nodeName="no-such-node")).ok(201)
    assert target.get(f"{pods(namespace)}/p/log").status == (404, "NotFound")
    wait_until(lambda: target.delete(f"{pods(namespace)}/p", gracePeriodSeconds=0).code in (200, 404), "the pod goes")
