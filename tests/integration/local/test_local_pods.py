"""Containers of a pod: start, environment, files, end. On our API server and on real ones."""

import os
import signal

import pytest
from tests.waiting import wait_until

from .local_bench import (
    FORCE,
    Space,
    condition,
    container,
    is_alive,
    is_ready,
    sh,
    terminated,
    waiting_reason,
)


def test_init_containers_run_in_order_before_the_main_containers(space: Space) -> None:
    inits = [sh(f"echo {name} >> /shared/order", name=name) for name in ("one", "two")]
    space.run("p", sh("echo main >> /shared/order"), initContainers=inits, restartPolicy="Never")
    pod = space.wait_phase("p", "Succeeded")
    assert space.read("order").split() == ["one", "two", "main"]
    assert [terminated(pod["status"], name)["reason"] for name in ("one", "two", "main")] == ["Completed"] * 3
    assert condition(pod["status"], "Ready")["reason"] == "PodCompleted"
    assert condition(pod["status"], "Initialized")["status"] == "True"


def test_a_failed_pod_shows_exit_code_times_and_termination_message(space: Space) -> None:
    script = "echo some output; echo the reason > /dev/termination-log; exit 3"
    space.run("p", sh(script), restartPolicy="Never")
    end = terminated(space.wait_phase("p", "Failed")["status"])
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "the reason\n")
    assert end["startedAt"] <= end["finishedAt"]


def test_the_end_of_the_log_is_the_message_of_a_failure_without_one(space: Space) -> None:
    failing = sh("echo a traceback; exit 1", terminationMessagePolicy="FallbackToLogsOnError")
    space.run("p", failing, restartPolicy="Never")
    assert terminated(space.wait_phase("p", "Failed")["status"])["message"] == "a traceback\n"


def test_a_signal_that_kills_a_container_shows_as_137(space: Space) -> None:
    space.run("p", sh("echo $$$$ > /shared/pid; sleep 600"), restartPolicy="Never")
    os.kill(int(space.wait_file("pid")), signal.SIGKILL)
    assert terminated(space.wait_phase("p", "Failed")["status"])["exitCode"] == 137


def test_pods_have_addresses_of_their_own_and_can_listen_on_the_same_port(space: Space) -> None:
    script = (
        "import os, socket, time; s = socket.create_server((os.environ['IP'], 29600)); print('up'); time.sleep(600)"
    )
    listen = {**sh(""), "command": ["python", "-c", script]}
    listen["env"] = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    listen["readinessProbe"] = {"tcpSocket": {"port": 29600}, "periodSeconds": 1, "timeoutSeconds": 30}
    for name in ("a", "b"):
        space.run(name, listen)
    addresses = {space.wait_ready(name)["status"]["podIP"] for name in ("a", "b")}
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)


def test_environment_comes_from_values_fields_secrets_config_maps_and_resources(space: Space) -> None:
    space.make("secrets", "s", data={"token": "czNjcmV0"})
    space.make("configmaps", "c", data={"MODE": "fast"})
    env = [
        {"name": "PLAIN", "value": "a"},
        {"name": "BOTH", "value": "$(PLAIN)-$(MODE)"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]
    main = sh(
        'echo "$MODE $BOTH $TOKEN $POD $NODE $CPUS $(hostname | wc -w) $HOSTNAME $0" "$@" > /shared/out',
        env=env,
        envFrom=[{"configMapRef": {"name": "c"}}],
        resources={"limits": {"cpu": "1500m"}},
        args=["zero", "$(BOTH)"],
    )
    space.run("p", main, restartPolicy="Never", nodeSelector={"rack": "b"})
    space.wait_phase("p", "Succeeded")
    assert space.read("out").split() == ["fast", "a-fast", "s3cret", "p", "gpu-2", "2", "1", "p", "zero", "a-fast"]


def test_volumes_are_folders_at_their_mount_paths(space: Space) -> None:
    space.make("secrets", "s", data={"token": "czNjcmV0", "other": "eA=="})
    space.make("configmaps", "c", data={"a.conf": "alpha", "b.conf": "beta"})
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "token", "path": "deep/t"}]}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "down", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {
            "name": "all",
            "projected": {
                "sources": [
                    {"configMap": {"name": "c", "items": [{"key": "b.conf", "path": "b"}]}},
                    {"secret": {"name": "s", "items": [{"key": "other", "path": "o"}]}},
                ]
            },
        },
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "scratch", "mountPath": "/part", "subPath": "inner/part"},
        {"name": "secret", "mountPath": "/etc/secret"},
        {"name": "config", "mountPath": "/etc/one.conf", "subPath": "a.conf"},
        {"name": "down", "mountPath": "/etc/pod"},
        {"name": "all", "mountPath": "/etc/all/"},
    ]
    init = sh("echo from init > /part/file", name="init", volumeMounts=mounts[:2])
    script = (
        "cat /scratch/inner/part/file /etc/secret/deep/t > /shared/out; echo >> /shared/out; "
        "cat /etc/one.conf /etc/pod/labels /etc/all/b /etc/all/o >> /shared/out; ls /etc/secret >> /shared/out"
    )
    main = sh(script, volumeMounts=mounts, workingDir="/scratch")
    space.run("p", main, initContainers=[init], volumes=volumes, restartPolicy="Never", labels={"x": "y"})
    space.wait_phase("p", "Succeeded")
    assert space.read("out") == 'from init\ns3cret\nalphax="y"betaxdeep\n'


def test_a_changed_label_reaches_the_downward_api_file(space: Space) -> None:
    volume = {"name": "d", "downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels['x']"}}]}}
    waiting = "until grep -q new /etc/d/l; do sleep 0.05; done"
    main = sh(waiting, volumeMounts=[{"name": "d", "mountPath": "/etc/d"}])
    space.run("p", main, volumes=[volume], restartPolicy="Never", labels={"x": "old"})
    space.wait_ready("p")
    space.bench.patch(f"{space.pods}/p", {"metadata": {"labels": {"x": "new"}}})
    space.wait_phase("p", "Succeeded")


def test_changed_secrets_and_config_maps_reach_running_pods_all_files_at_once(space: Space) -> None:
    space.make("secrets", "s", data={"token": "b2xk", "left": "eA=="})
    space.make("configmaps", "c", data={"a": "old"})
    sources = [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]
    volumes = [
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "all", "projected": {"sources": sources}},
    ]
    mounts = [
        {"name": "secret", "mountPath": "/etc/secret"},
        {"name": "secret", "mountPath": "/etc/part", "subPath": "token"},
        {"name": "config", "mountPath": "/etc/config"},
        {"name": "all", "mountPath": "/etc/all"},
    ]
    script = (
        "until grep -q new /etc/secret/token && grep -q new /etc/config/a && grep -q new /etc/all/token "
        "&& grep -q new /etc/all/a && test ! -L /etc/secret/left && test ! -L /etc/all/left; do sleep 0.05; done; "
        "cat /etc/part > /shared/out; echo >> /shared/out; "
        "ls /etc/secret /etc/all >> /shared/out"
    )
    space.run("p", sh(script, volumeMounts=mounts), volumes=volumes, restartPolicy="Never")
    space.wait_ready("p")
    space.bench.patch(f"/api/v1/namespaces/{space.name}/secrets/s", {"data": {"token": "bmV3", "left": None}})
    space.bench.patch(f"/api/v1/namespaces/{space.name}/configmaps/c", {"data": {"a": "new"}})
    space.wait_phase("p", "Succeeded")
    listed = space.read("out").split()
    # What is mounted by subPath stays what it was; a key that is gone has no file, a moment after the others are new.
    assert listed[0] == "old"
    assert "left" not in listed
    assert listed.count("token") == 2


def test_a_secret_that_was_deleted_leaves_its_files_and_the_pod_is_told(space: Space) -> None:
    space.make("secrets", "s", data={"token": "b2xk"})
    volume = {"name": "secret", "secret": {"secretName": "s"}}
    script = "until grep -q new /etc/secret/token; do sleep 0.05; done"
    main = sh(script, volumeMounts=[{"name": "secret", "mountPath": "/etc/secret"}])
    space.run("p", main, volumes=[volume], restartPolicy="Never")
    space.wait_ready("p")
    space.bench.delete(f"/api/v1/namespaces/{space.name}/secrets/s")

    def warning() -> str | None:
        found = space.bench.get(f"/api/v1/namespaces/{space.name}/events") or {}
        texts = [item["message"] for item in found["items"] if item["reason"] == "FailedMount"]
        return next((text for text in texts if 'secret "s" not found' in text), None)

    wait_until(warning, "an Event about the Secret")
    assert is_ready((space.pod("p") or {})["status"])
    space.make("secrets", "s", data={"token": "bmV3"})
    space.wait_phase("p", "Succeeded")


@pytest.mark.parametrize("policy", ["Always", "OnFailure"])
def test_a_container_that_fails_is_started_again_with_growing_pauses(space: Space, policy: str) -> None:
    space.run("p", sh("echo run >> /shared/runs; exit 1"), restartPolicy=policy)
    pod = space.wait(
        "p",
        lambda s: container(s).get("restartCount", 0) >= 3 and waiting_reason(s) == "CrashLoopBackOff",
        "the container is in back-off after three restarts",
    )
    last = container(pod["status"])["lastState"]["terminated"]
    assert (last["exitCode"], pod["status"]["phase"]) == (1, "Running")
    assert not is_ready(pod["status"])


def test_a_container_that_succeeds_is_started_again_only_by_policy_always(space: Space) -> None:
    space.run("p", sh("echo run >> /shared/p"), restartPolicy="OnFailure")
    space.run("q", sh("echo run >> /shared/q"), restartPolicy="Always")
    space.wait("q", lambda s: container(s).get("restartCount", 0) >= 2, "it has been restarted")
    space.wait_phase("p", "Succeeded")
    assert space.read("p").split() == ["run"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"image": "nowhere/nothing:1"}, "ImagePullBackOff", id="unknown image"),
        pytest.param({"command": None}, "CreateContainerError", id="no command"),
        pytest.param(
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]},
            "CreateContainerConfigError",
            id="missing secret",
        ),
    ],
)
def test_a_container_that_cannot_be_made_says_why_and_can_be_deleted(
    space: Space, change: dict[str, object], reason: str
) -> None:
    main = {key: value for key, value in (sh("true") | change).items() if value is not None}
    space.run("p", main)
    pod = space.wait("p", lambda s: waiting_reason(s) == reason, f"the container waits with {reason}")
    assert pod["status"]["phase"] == "Pending"
    space.bench.delete(f"{space.pods}/p")
    space.wait_gone("p")


def test_a_command_that_is_not_there_is_a_start_error(space: Space) -> None:
    space.run("p", {**sh(""), "command": ["no-such-program"]}, restartPolicy="Never")
    end = terminated(space.wait_phase("p", "Failed")["status"])
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert 'exec: "no-such-program": executable file not found in $PATH' in end["message"]


def test_a_pod_starts_once_the_secret_that_it_needs_is_there(space: Space) -> None:
    volume = {"name": "s", "secret": {"secretName": "late"}}
    main = sh("cat /etc/s/k > /shared/out", volumeMounts=[{"name": "s", "mountPath": "/etc/s"}])
    space.run("p", main, volumes=[volume], restartPolicy="Never")
    space.wait("p", lambda s: waiting_reason(s) == "ContainerCreating", "the container waits for its volume")
    space.make("secrets", "late", data={"k": "eA=="})
    space.wait_phase("p", "Succeeded")
    assert space.read("out") == "x"


def test_deletion_sends_sigterm_and_kills_whatever_is_left_after_the_grace(space: Space) -> None:
    polite = sh("trap 'echo asked >> /shared/polite; exit 0' TERM; echo up > /shared/up; while :; do sleep 0.05; done")
    script = "trap '' TERM; setsid sleep 600 & echo $! > /shared/child; echo $$$$ > /shared/rude; "
    rude = sh(script + "while :; do sleep 0.05; done", name="rude")
    space.run("p", polite, rude)
    pids = [int(space.wait_file(name)) for name in ("rude", "child")]
    space.wait_file("up")
    space.wait_ready("p")  # What runs before its node knows that it does is killed without a word.
    space.bench.delete(f"{space.pods}/p")
    assert space.wait_file("polite") == "asked"
    assert [is_alive(pid) for pid in pids] == [True, True]
    # The grace is cut short once it has been used.
    space.bench.delete(f"{space.pods}/p", {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 1})
    space.wait_gone("p")
    assert [is_alive(pid) for pid in pids] == [False, False]


def test_a_process_that_left_its_session_dies_with_its_container(space: Space) -> None:
    space.run("p", sh("setsid sleep 600 & echo $! > /shared/child; sleep 0.3; exit 0"), restartPolicy="Never")
    child = int(space.wait_file("child"))
    space.wait_phase("p", "Succeeded")
    assert not is_alive(child)


def test_pre_stop_runs_before_sigterm(space: Space) -> None:
    main = sh(
        "trap 'echo term >> /shared/order; exit 0' TERM; echo up > /shared/up; while :; do sleep 0.05; done",
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.2; echo hook >> /shared/order"]}}},
    )
    space.run("p", main)
    space.wait_file("up")
    space.wait_ready("p")  # What runs before its node knows that it does is killed without a word.
    space.bench.delete(f"{space.pods}/p")
    space.wait_gone("p")
    assert space.read("order").split() == ["hook", "term"]


def test_a_pod_that_is_forced_away_is_killed_although_nothing_names_it_any_more(space: Space) -> None:
    space.run("p", sh("trap '' TERM; echo $$$$ > /shared/pid; while :; do sleep 0.05; done"))
    pid = int(space.wait_file("pid"))
    space.bench.delete(f"{space.pods}/p", FORCE)
    wait_until(lambda: not is_alive(pid), "its process ends")


def test_a_pod_may_be_deleted_at_any_moment_of_its_start(space: Space) -> None:
    space.run("p", sh("sleep 600"), initContainers=[sh("sleep 600", name="init")], terminationGracePeriodSeconds=0)
    for delay in range(6):
        name = f"q{delay}"
        space.run(name, sh("sleep 600"), terminationGracePeriodSeconds=1)
        space.bench.delete(f"{space.pods}/{name}")
    for name in ["p", *(f"q{delay}" for delay in range(6))]:
        space.bench.delete(f"{space.pods}/{name}")
        space.wait_gone(name)


def test_a_pod_of_the_same_name_is_another_pod(space: Space) -> None:
    first = space.run("p", sh("sleep 600"))["metadata"]["uid"]
    space.wait_ready("p")
    space.bench.delete(f"{space.pods}/p", FORCE)
    second = space.run("p", sh("sleep 600"))["metadata"]["uid"]
    pod = space.wait_ready("p")
    assert pod["metadata"]["uid"] == second != first
    assert container(pod["status"])["restartCount"] == 0


def test_readiness_follows_the_probe_and_liveness_restarts_the_container(space: Space) -> None:
    probe = {"periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 30}
    main = sh(
        "echo start >> /shared/starts; sleep 600",
        readinessProbe={"exec": {"command": ["test", "-e", "/shared/ready"]}, **probe},
        livenessProbe={"exec": {"command": ["test", "!", "-e", "/shared/sick"]}, **probe},
    )
    space.run("p", main, terminationGracePeriodSeconds=0)
    space.wait("p", lambda s: (container(s).get("state") or {}).get("running"), "the container runs")
    assert not is_ready((space.pod("p") or {})["status"])
    (space.folder / "ready").touch()
    space.wait_ready("p")
    (space.folder / "ready").unlink()
    space.wait("p", lambda s: not is_ready(s), "the pod is not ready any more")
    (space.folder / "sick").touch()
    space.wait("p", lambda s: container(s).get("restartCount", 0) >= 1, "the sick container is restarted")
    (space.folder / "sick").unlink()
    space.wait_lines("starts", 2)


def test_readiness_that_others_deny_is_said_again(space: Space) -> None:
    """As happens to a node that comes back at the moment in which its silence is noticed."""
    space.run("p", sh("sleep 600"), terminationGracePeriodSeconds=0)
    conditions = space.wait_ready("p")["status"]["conditions"]
    denied = [{**c, "status": "False"} if c["type"] == "Ready" else c for c in conditions]
    pod = space.bench.patch(f"{space.pods}/p/status", {"status": {"conditions": denied}})
    assert not is_ready(pod["status"])
    space.wait_ready("p")


def test_a_startup_probe_holds_the_others_and_http_probes_ask_the_pod(space: Space) -> None:
    server = (
        "import os, http.server as h, time; time.sleep(0.5)\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if self.path == '/ok' else 500); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "h.HTTPServer((os.environ['IP'], 8080), H).serve_forever()"
    )
    often = {"periodSeconds": 1, "timeoutSeconds": 30}
    main = {
        **sh(""),
        "command": ["python", "-c", server],
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "web", "containerPort": 8080}],
        "startupProbe": {"httpGet": {"port": "web", "path": "/ok"}, **often, "failureThreshold": 100},
        "livenessProbe": {"httpGet": {"port": "web", "path": "/ok"}, **often, "failureThreshold": 1},
        "readinessProbe": {"httpGet": {"port": 8080, "path": "ok"}, **often},
    }
    space.run("good", main)
    bad = {**main, "readinessProbe": {"httpGet": {"port": 8080, "path": "/bad"}, **often}}
    space.run("bad", bad)
    assert container(space.wait_ready("good")["status"])["restartCount"] == 0
    pod = space.wait("bad", lambda s: container(s).get("started"), "the other one has started")
    assert not is_ready(pod["status"])


def test_a_pod_past_its_active_deadline_fails(space: Space) -> None:
    space.run("p", sh("sleep 600"), restartPolicy="Never", activeDeadlineSeconds=1, terminationGracePeriodSeconds=0)
    assert space.wait_phase("p", "Failed")["status"]["reason"] == "DeadlineExceeded"


def test_sidecars_start_in_order_stay_and_end_last_first(sidecar_space: Space) -> None:
    space = sidecar_space
    loop = "trap 'echo end-{0} >> /shared/order; exit 0' TERM; echo {0} >> /shared/order; while :; do sleep 0.05; done"
    has_begun = {"exec": {"command": ["grep", "-q", "a", "/shared/order"]}}
    probe = {**has_begun, "periodSeconds": 1, "timeoutSeconds": 30, "failureThreshold": 100}
    sidecars = [
        sh(loop.format("a"), name="a", restartPolicy="Always", startupProbe=probe),
        sh("echo init >> /shared/order", name="init"),
        sh(loop.format("b"), name="b", restartPolicy="Always"),
    ]
    main = sh("until grep -q b /shared/order; do sleep 0.05; done; echo main >> /shared/order")
    space.run("p", main, initContainers=sidecars, restartPolicy="Never")
    pod = space.wait_phase("p", "Succeeded")
    assert space.read("order").split() == ["a", "init", "b", "main", "end-b", "end-a"]
    assert terminated(pod["status"], "b")["exitCode"] == 0


def test_a_sidecar_that_dies_is_started_again_beside_the_main_container(sidecar_space: Space) -> None:
    space = sidecar_space
    side = sh("echo $$$$ >> /shared/pids; sleep 600", name="side", restartPolicy="Always")
    space.run("p", sh("sleep 600"), initContainers=[side], restartPolicy="Never")
    space.wait_ready("p")
    os.kill(int(space.wait_file("pids")), signal.SIGKILL)
    pod = space.wait("p", lambda s: container(s, "side").get("restartCount") == 1 and is_ready(s), "it is back")
    assert container(pod["status"])["restartCount"] == 0
    assert len(space.wait_lines("pids", 2)) == 2


def test_a_deleted_pod_ends_its_sidecar_after_its_main_container(sidecar_space: Space) -> None:
    space = sidecar_space
    loop = (
        "trap 'sleep 0.2; echo {0} >> /shared/ends; exit 0' TERM; echo up > /shared/{0}; while :; do sleep 0.05; done"
    )
    side = sh(loop.format("side"), name="side", restartPolicy="Always")
    space.run("p", sh(loop.format("main")), initContainers=[side])
    # The main container may be ahead of the one that was started before it.
    for name in ("side", "main"):
        space.wait_file(name)
    space.wait_ready("p")
    space.bench.delete(f"{space.pods}/p")
    space.wait_gone("p")
    assert space.read("ends").split() == ["main", "side"]


def test_a_pod_may_use_its_service_account_by_the_kubeconfig_that_it_is_given(space: Space) -> None:
    if space.bench.name != "builtin":  # It does not ask whether the account exists.
        space.make("serviceaccounts", "robot")
    main = {**sh(""), "command": ["kubectl", "version"]}
    space.run("p", main, restartPolicy="Never", serviceAccountName="robot", automountServiceAccountToken=True)
    pod = space.wait("p", lambda s: s.get("phase") in {"Succeeded", "Failed"}, "the pod has ended")
    assert pod["status"]["phase"] == "Succeeded", space.log(pod, "main")
    assert "Server Version" in space.log(pod, "main")
