"""Scheduling, services, logs and failing nodes of a running cluster."""

import itertools
import socket
import time
import urllib.request
from typing import Any

import pytest
from tests.waiting import LIMIT_S, wait_until

from .local_bench import Json, Space, condition, container, is_alive, is_ready, sh

SERVER = (
    "import os, http.server as h\n"
    "class H(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        body = os.environ['HOSTNAME'].encode()\n"
    "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
    "        self.wfile.write(body)\n"
    "    def log_message(self, *a): pass\n"
    "h.ThreadingHTTPServer((os.environ['IP'], 8080), H).serve_forever()"
)
LISTENS_FOR_A_WORD = (
    "import os, socket, time\n"
    "server = socket.create_server((os.environ['IP'], 8080))\n"
    "word = b''\n"
    "while not word:\n"
    "    client = server.accept()[0]\n"
    "    word = client.recv(10)\n"
    "    client.close() if not word else client.sendall(word)\n"
    "client.close()\n"
    "server.close()\n"
    "time.sleep(600)\n"
)
CLIENT = (
    "import os, time, urllib.request\n"
    "while True:\n"
    "    try:\n"
    "        print(urllib.request.urlopen(os.environ['URL'], timeout=30).read().decode(), flush=True)\n"
    "        break\n"
    "    except OSError:\n"
    "        time.sleep(0.05)\n"
)
WEB_PORTS = [{"name": "http", "containerPort": 8080}]


def python(script: str, **env: str) -> Json:
    variables: list[Json] = [{"name": name, "value": value} for name, value in env.items()]
    variables.append({"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return {**sh(""), "command": ["python", "-c", script], "env": variables}


def web(**more: Any) -> Json:
    probe = {"httpGet": {"port": 8080}, "periodSeconds": 1, "timeoutSeconds": 30}
    return {**python(SERVER), "readinessProbe": probe, "ports": WEB_PORTS, **more}


def uncached_get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=LIMIT_S) as reply:
        return str(reply.read().decode())


def service(space: Space) -> None:
    ports = [{"port": 80, "targetPort": "http"}]
    space.make("services", "web", spec={"selector": {"app": "web"}, "ports": ports})


def test_pods_reach_a_service_by_its_name_before_and_after_its_pod_is_replaced(space: Space) -> None:
    client = python(CLIENT, URL=f"http://web.{space.name}.svc:80/")
    space.run("early", client, restartPolicy="Never")
    service(space)
    space.run("one", web(), labels={"app": "web"})
    early = space.wait_phase("early", "Succeeded")
    assert space.log(early, "main").split() == ["one"]
    space.bench.delete(f"{space.pods}/one")
    space.wait_gone("one")
    space.run("two", web(), labels={"app": "web"})
    space.wait_ready("two")
    space.run("late", client, restartPolicy="Never")
    late = space.wait_phase("late", "Succeeded")
    assert space.log(late, "main").split() == ["two"]


def test_service_variables_name_the_local_address(space: Space) -> None:
    service(space)
    space.run("one", web(), labels={"app": "web"})
    space.wait_ready("one")
    space.run("p", sh('echo "$WEB_SERVICE_HOST $WEB_SERVICE_PORT"'), restartPolicy="Never")
    host, port = space.log(space.wait_phase("p", "Succeeded"), "main").split()
    assert host.startswith("127.")
    assert uncached_get(f"http://{host}:{port}/") == "one"


def test_a_service_spreads_connections_and_refuses_them_without_a_ready_pod(builtin_space: Space) -> None:
    space = builtin_space
    service(space)
    found = space.bench.get(f"/api/v1/namespaces/{space.name}/services/web")
    assert found is not None
    address = found["spec"]["clusterIP"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, 80), timeout=5)
    for name in ("one", "two"):
        space.run(name, web(), labels={"app": "web"})
    for name in ("one", "two"):
        space.wait_ready(name)
    seen: set[str] = set()

    def ask() -> bool:
        try:
            seen.add(uncached_get(f"http://{address}:80/"))
        except OSError:
            return False
        return seen == {"one", "two"}

    wait_until(ask, "both pods answer")


def test_a_service_refuses_connections_while_nobody_listens_in_its_pod(builtin_space: Space) -> None:
    """As on a real cluster, where the pod's host refuses: who calls knows that the way is free."""
    space = builtin_space
    ports = [{"port": 80, "targetPort": "http"}]
    spec = {"selector": {"app": "web"}, "ports": ports, "publishNotReadyAddresses": True}
    space.make("services", "web", spec=spec)
    found = space.bench.get(f"/api/v1/namespaces/{space.name}/services/web")
    assert found is not None
    address = (found["spec"]["clusterIP"], 80)
    # No probe: it would say the word before the test does.
    space.run("one", {**python(LISTENS_FOR_A_WORD), "ports": WEB_PORTS}, labels={"app": "web"})

    def answer() -> str:
        try:
            # The pod answers once: who did not wait for it would never hear it.
            with socket.create_connection(address, timeout=LIMIT_S) as client:
                client.sendall(b"end")
                return client.recv(10).decode()
        except ConnectionRefusedError:
            return "refused"
        except OSError as error:
            return type(error).__name__

    wait_until(lambda: answer() == "end", "the pod's answer")
    wait_until(lambda: answer() == "refused", "refusal")
    assert {answer() for _ in range(5)} == {"refused"}


def gpu(number: int, **more: Any) -> Json:
    return sh("sleep 600", resources={"limits": {"nvidia.com/gpu": str(number)}}, **more)


def test_a_pod_waits_for_resources_says_so_and_runs_when_they_are_free(space: Space) -> None:
    selector = {"rack": "a"}
    space.run("first", gpu(8), nodeSelector=selector, terminationGracePeriodSeconds=0)
    space.wait_ready("first")
    space.run("second", gpu(1), nodeSelector=selector)
    pod = space.wait(
        "second", lambda s: condition(s, "PodScheduled").get("status") == "False", "the pod is unschedulable"
    )
    refused = condition(pod["status"], "PodScheduled")
    assert refused["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in refused["message"]
    space.bench.delete(f"{space.pods}/first")
    assert space.wait_ready("second")["spec"]["nodeName"] == "gpu-1"


def test_pods_that_refuse_each_other_spread_and_taints_keep_them_away(space: Space) -> None:
    term = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    for name in ("a", "b", "c"):
        space.run(name, sh("sleep 600"), labels={"app": "x"}, affinity=affinity)

    def nodes() -> list[str]:
        return sorted(filter(None, (_node_of(space, name) for name in ("a", "b", "c"))))

    # One that is refused while a node is still on its way back is bound later.
    wait_until(lambda: len(nodes()) >= 2, "two of them are bound")
    assert nodes() == ["gpu-1", "gpu-2"]
    tolerant = {"tolerations": [{"key": "cpu-only", "operator": "Exists"}], "affinity": affinity}
    space.run("d", sh("sleep 600"), labels={"app": "x"}, **tolerant)
    assert space.wait_ready("d")["spec"]["nodeName"] == "cpu-1"


def _node_of(space: Space, name: str) -> str:
    pod = space.wait(name, lambda s: condition(s, "PodScheduled"), f"the scheduler has looked at {name}")
    return str(pod["spec"].get("nodeName") or "")


def test_a_cordoned_node_gets_no_pods_until_it_is_uncordoned(space: Space) -> None:
    space.bench.patch("/api/v1/nodes/gpu-2", {"spec": {"unschedulable": True}})
    try:
        names = (f"p{number}" for number in itertools.count())

        def refused() -> str | None:
            name = next(names)
            space.run(name, sh("sleep 600"), nodeSelector={"rack": "b"})
            return None if _node_of(space, name) else name

        # The scheduler watches nodes and pods apart: it may hear of a pod first.
        name = wait_until(refused, "a pod is not bound to the node")
    finally:
        space.bench.patch("/api/v1/nodes/gpu-2", {"spec": {"unschedulable": None}})
    space.wait_ready(name)


def test_kubectl_shows_logs_whole_by_lines_followed_and_previous(builtin_space: Space) -> None:
    space = builtin_space
    script = "echo one; echo two; until test -e /shared/go; do sleep 0.05; done; echo three; exit 1"
    space.run("p", sh(script), sh("echo other; sleep 600", name="other"), terminationGracePeriodSeconds=0)
    space.wait_ready("p")

    def log(*words: str) -> str:
        return space.bench.kubectl("logs", "-n", space.name, "p", *words)

    wait_until(lambda: log("-c", "main") == "one\ntwo\n", "both lines are there")
    assert log("-c", "main", "--tail=1") == "two\n"
    wait_until(lambda: log("-c", "other") == "other\n", "the other container's log is its own")
    (space.folder / "go").touch()
    assert log("-c", "main", "-f").endswith("three\n")
    space.wait("p", lambda s: container(s).get("restartCount", 0) >= 1, "it was started again")
    assert log("-c", "main", "--previous").endswith("three\n")


def _ready(space: Space, node: str) -> str:
    found = space.bench.get(f"/api/v1/nodes/{node}") or {}
    return str(condition(found.get("status") or {}, "Ready").get("status"))


def test_a_failed_node_kills_its_processes_and_its_pods_hang_until_it_recovers(space: Space) -> None:
    key = "node.kubernetes.io/unreachable"
    tolerations = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]
    main = sh("setsid sleep 600 & echo $! > /shared/child; echo $$$$ > /shared/main; sleep 600")
    space.run("p", main, nodeSelector={"rack": "b"}, tolerations=tolerations)
    pids = [int(space.wait_file(name)) for name in ("main", "child")]
    space.wait_ready("p")
    space.bench.node("fail", "gpu-2")
    try:
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "all processes are gone")
        wait_until(lambda: _ready(space, "gpu-2") == "Unknown", "the node is not ready")

        def evicted() -> Json | None:
            pod = space.pod("p")
            assert pod is not None
            return pod if "deletionTimestamp" in pod["metadata"] else None

        assert wait_until(evicted, "the pod is evicted")["status"]["phase"] == "Running"
        space.wait("p", lambda s: not is_ready(s), "the pod is not ready")
    finally:
        space.bench.node("recover", "gpu-2")
    space.wait_gone("p")
    wait_until(lambda: _ready(space, "gpu-2") == "True", "the node is ready again")
    space.run("q", sh("sleep 600"), nodeSelector={"rack": "b"})
    space.wait_ready("q")


def test_a_silent_node_is_not_ready_and_its_processes_run_on(space: Space) -> None:
    main = sh("echo $$$$ > /shared/main; sleep 600")
    # Never evicted.
    space.run("p", main, nodeSelector={"rack": "b"}, tolerations=[{"operator": "Exists", "effect": "NoExecute"}])
    pid = int(space.wait_file("main"))
    space.wait_ready("p")
    space.bench.node("silence", "gpu-2")
    try:
        wait_until(lambda: _ready(space, "gpu-2") == "Unknown", "the node is not ready")
        space.wait("p", lambda s: not is_ready(s), "the pod is not ready")
    finally:
        space.bench.node("recover", "gpu-2")
    wait_until(lambda: _ready(space, "gpu-2") == "True", "the node is ready again")
    space.wait_ready("p")
    assert is_alive(pid)


def test_a_pod_of_a_dead_node_can_be_forced_away(sidecar_space: Space) -> None:
    space = sidecar_space
    space.run("p", sh("sleep 600"), nodeSelector={"rack": "b"})
    uid = space.wait_ready("p")["metadata"]["uid"]
    space.bench.node("fail", "gpu-2")
    try:
        force = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        space.bench.delete(f"{space.pods}/p", force)
        space.wait_gone("p", uid)
    finally:
        space.bench.node("recover", "gpu-2")
    wait_until(lambda: _ready(space, "gpu-2") == "True", "the node is ready again")


def test_a_pod_whose_node_was_down_for_a_moment_is_started_again(sidecar_space: Space) -> None:
    space = sidecar_space
    main = sh("echo run >> /shared/runs; sleep 600")
    # Never evicted, however long the moment is: each of the two commands is a process of its own.
    space.run("p", main, nodeSelector={"rack": "b"}, tolerations=[{"operator": "Exists", "effect": "NoExecute"}])
    space.wait_ready("p")
    space.wait_lines("runs", 1)
    space.bench.node("fail", "gpu-2")
    space.bench.node("recover", "gpu-2")
    space.wait("p", lambda s: container(s).get("restartCount", 0) >= 1 and is_ready(s), "it runs again")
    space.wait_lines("runs", 2)


def test_many_pods_start_together_in_the_time_of_a_few(builtin_space: Space) -> None:
    space = builtin_space
    names = [f"p{number}" for number in range(30)]
    began = time.monotonic()
    for name in names:
        space.run(name, sh("sleep 600"), terminationGracePeriodSeconds=0)
    addresses = {space.wait_ready(name)["status"]["podIP"] for name in names}
    print(f"30 pods ready after {time.monotonic() - began:.2f} s")
    assert len(addresses) == 30
