"""The objects of a job, as docs/architecture.md describes them."""

import base64
import copy
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, LAYERS, a_job

from unbroken_core.protocol.wire import settings_from_json
from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.objects.credentials import (
    Certificates,
    TokenKeys,
    certificates_of,
    identity_of,
    missing_keys,
    pod_tokens,
    with_credentials,
)
from unbroken_operator.decisions.objects.manifests import rendezvous_pod, secret, service, tokens_secret
from unbroken_operator.decisions.objects.training_pods import launched_command, training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions

OPTIONS = OperatorOptions("sidecar:1")
CERTIFICATES = Certificates("authority", "certificate", "key")


def admitted(**spec: Any) -> ValidSpec:
    """Return the verdict about a sound job."""
    verdict = admit(a_job(**spec))
    assert isinstance(verdict, ValidSpec)
    return verdict


def pod_of(role: Role = Role.ACTIVE, options: OperatorOptions = OPTIONS, **spec: Any) -> dict[str, Any]:
    """Return a training pod."""
    verdict = admitted(**spec)
    return training_pod(verdict.spec, verdict.settings, 7, role, options)


def environment(container: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a container: values, or paths of the downward API."""
    return {item["name"]: item.get("value") or item["valueFrom"]["fieldRef"]["fieldPath"] for item in container["env"]}


def test_a_training_pod_has_launcher_agent_library_and_no_service_account() -> None:
    pod = pod_of()
    assert pod["metadata"]["name"] == "digits-7"
    assert pod["metadata"]["labels"] == {
        "unbroken.dev/job": "digits",
        "unbroken.dev/component": "trainer",
        "unbroken.dev/role": "active",
    }
    spec = pod["spec"]
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    (trainer,) = spec["containers"]
    assert trainer["command"] == ["python3", "-m", "unbroken.launch", "--", "python3", "t.py"]
    assert environment(trainer) == {
        "UNBROKEN_POD": "metadata.name",
        "UNBROKEN_POD_UID": "metadata.uid",
        "UNBROKEN_NODE": "spec.nodeName",
        "UNBROKEN_POD_IP": "status.podIP",
        "UNBROKEN_DIR": "/var/run/unbroken",
        "UNBROKEN_RANKS_PER_POD": "2",
        "UNBROKEN_DRAIN": "23",
        "UNBROKEN_WATCH": "1",
        "PYTHONPATH": "/opt/unbroken/lib",
    }
    install, agent = spec["initContainers"]
    assert install["command"] == ["python", "-m", "unbroken.install", "/opt/unbroken/lib"]
    assert (agent["name"], agent["restartPolicy"]) == ("unbroken-agent", "Always")
    assert environment(agent)["UNBROKEN_RENDEZVOUS_URL"] == "https://digits-rendezvous.ml.svc:29600"
    assert settings_from_json(environment(agent)["UNBROKEN_SETTINGS"]) == admitted().settings
    assert environment(agent)["UNBROKEN_TERMINATION_LOG"] == agent["terminationMessagePath"] == "/dev/termination-log"
    volumes = ["unbroken-lib", "unbroken-run", "unbroken-private", "unbroken-token"]
    assert [volume["name"] for volume in spec["volumes"]] == volumes


@pytest.mark.parametrize(
    ("changes", "drain"),
    [
        pytest.param({"timeouts": {"drainSeconds": 10}}, "10", id="as long as the job wants"),
        pytest.param({"grace": 600}, "30", id="the default where the pod has the time"),
        pytest.param({"grace": 5}, None, id="no time"),
        pytest.param({"timeouts": {"drainSeconds": 0}}, None, id="not wanted"),
        pytest.param({"restart": {"rungs": [{"name": "process"}]}}, None, id="processes are told to end at once"),
    ],
)
def test_workers_of_a_deleted_pod_may_train_within_its_grace(changes: dict[str, Any], drain: str | None) -> None:
    spec = {name: value for name, value in changes.items() if name != "grace"}
    grace = {"terminationGracePeriodSeconds": changes["grace"]} if "grace" in changes else {}
    pod = pod_of(template={"spec": {"containers": [CONTAINER], **grace}}, **spec)
    assert environment(pod["spec"]["containers"][0]).get("UNBROKEN_DRAIN") == drain


def test_the_users_container_cannot_read_the_token() -> None:
    (trainer,) = pod_of()["spec"]["containers"]
    assert [mount["mountPath"] for mount in trainer["volumeMounts"]] == ["/opt/unbroken/lib", "/var/run/unbroken"]


def test_what_the_agent_believes_lies_where_the_agent_alone_can_write() -> None:
    spec = pod_of()["spec"]
    _install, agent = spec["initContainers"]
    (private,) = [volume for volume in spec["volumes"] if volume["name"] == "unbroken-private"]
    assert private == {"name": "unbroken-private", "emptyDir": {"medium": "Memory"}}
    path = environment(agent)["UNBROKEN_PRIVATE_DIR"]
    assert {"name": "unbroken-private", "mountPath": path} in agent["volumeMounts"]
    others = [*spec["containers"], *(one for one in spec["initContainers"] if one is not agent)]
    assert all(mount["name"] != "unbroken-private" for one in others for mount in one["volumeMounts"])


def test_only_our_own_containers_get_a_security_context() -> None:
    spec = pod_of()["spec"]
    assert "securityContext" not in spec
    assert "securityContext" not in spec["containers"][0]
    for container in spec["initContainers"]:
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["runAsNonRoot"]) == (False, True)
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("users", [{}, {"runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}, {"runAsUser": 1000}])
def test_our_containers_have_a_user_of_their_own_whatever_the_template_says_of_the_pod(users: dict[str, int]) -> None:
    spec = pod_of(template={"spec": {"containers": [CONTAINER], "securityContext": users}})["spec"]
    assert spec["securityContext"] == users
    for container in spec["initContainers"]:
        context = container["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (65532, 65532, True)
        assert (context["privileged"], context["readOnlyRootFilesystem"]) == (False, True)


@pytest.mark.parametrize(
    ("mode", "has_native", "is_native"),
    [
        pytest.param("Auto", True, True, id="auto on a new cluster"),
        pytest.param("Auto", False, False, id="auto on an old cluster"),
        pytest.param("Native", False, True, id="native by wish"),
        pytest.param("Container", True, False, id="container by wish"),
    ],
)
def test_the_agent_is_a_native_sidecar_or_a_plain_container(mode: str, has_native: bool, is_native: bool) -> None:
    options = OperatorOptions("sidecar:1", has_native_sidecars=has_native)
    spec = pod_of(options=options, sidecar={"mode": mode})["spec"]
    plain = [container["name"] for container in spec["containers"]]
    assert plain == (["trainer"] if is_native else ["trainer", "unbroken-agent"])
    assert ("restartPolicy" in spec["initContainers"][-1]) is is_native


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        pytest.param(["/opt/venv/bin/python3.12", "t.py"], "/opt/venv/bin/python3.12", id="a Python of its own"),
        pytest.param(["bash", "-c", "exec python t.py"], "python3", id="another program"),
    ],
)
def test_the_launcher_runs_in_the_interpreter_of_the_command(command: list[str], interpreter: str) -> None:
    assert launched_command(command) == [interpreter, "-m", "unbroken.launch", "--", *command]


def test_the_rest_of_the_template_stays_as_it_is() -> None:
    container = {
        **CONTAINER,
        "args": ["--lr", "0.1"],
        "env": [{"name": "PYTHONPATH", "value": "/app"}, {"name": "A", "value": "$(UNBROKEN_POD)"}],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod: dict[str, Any] = {
        "containers": [container, {"name": "helper", "image": "busybox"}],
        "initContainers": [{"name": "fetch", "image": "busybox"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "hostIPC": True,
        "tolerations": [{"operator": "Exists"}],
    }
    template = {"metadata": {"labels": {"team": "x"}, "annotations": {"a/b": "c"}}, "spec": pod}
    before = copy.deepcopy(template)
    result = pod_of(template=template)
    assert template == before
    spec = result["spec"]
    assert spec["containers"][1] == pod["containers"][1]
    assert spec["initContainers"][-1] == {"name": "fetch", "image": "busybox"}
    assert (spec["hostIPC"], spec["tolerations"]) == (True, [{"operator": "Exists"}])
    trainer = spec["containers"][0]
    assert (trainer["args"], trainer["resources"]) == (container["args"], container["resources"])
    assert environment(trainer)["PYTHONPATH"] == "/opt/unbroken/lib:/app"
    assert trainer["volumeMounts"][0] == {"name": "data", "mountPath": "/data"}
    assert result["metadata"]["labels"]["team"] == "x"
    assert result["metadata"]["annotations"].items() >= {"a/b": "c"}.items()


def test_actives_are_drawn_together_and_spares_apart_beside_the_users_affinity() -> None:
    users = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}, "nodeAffinity": {}}
    template = {"spec": {"containers": [CONTAINER], "affinity": users}}
    active = pod_of(topology={"layers": LAYERS}, template=template)["spec"]["affinity"]
    terms = active["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0] == {"weight": 1}
    keys = [(term["weight"], term["podAffinityTerm"]["topologyKey"]) for term in terms[1:]]
    assert keys == [(10, "example.com/rack"), (20, "example.com/nvlink")]
    assert "nodeAffinity" in active
    spare = pod_of(Role.SPARE, topology={"layers": LAYERS})["spec"]["affinity"]
    terms = spare["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms][-1] == "kubernetes.io/hostname"
    assert pod_of(Role.SPARE, spares={"count": 1, "spread": "Anywhere"})["spec"]["affinity"] == {}


def test_the_rendezvous_runs_where_the_user_wants_it() -> None:
    verdict = admitted(
        rendezvous={
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "cpu", "operator": "Exists"}],
            "resources": {"requests": {"cpu": 1}},
        }
    )
    pod = rendezvous_pod(verdict.spec, verdict.settings, 3, OPTIONS)
    spec = pod["spec"]
    assert pod["metadata"]["name"] == "digits-rendezvous-3"
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Always", False)
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert spec["tolerations"] == [{"key": "cpu", "operator": "Exists"}]
    (container,) = spec["containers"]
    assert container["resources"] == {"requests": {"cpu": 1}}
    assert environment(container)["UNBROKEN_LISTEN"] == "$(UNBROKEN_POD_IP):29600"
    assert environment(container)["UNBROKEN_JOB_KEY_FILE"] == "/etc/unbroken/job-key"
    assert "UNBROKEN_TOKEN_FILE" not in environment(container)


def test_secret_and_service_belong_to_the_job() -> None:
    settings = admitted().settings
    identity = TokenKeys("k" * 64)
    manifest = with_credentials(secret(settings), identity, settings.uid, CERTIFICATES)
    assert (identity_of(manifest), certificates_of(manifest)) == (identity, CERTIFICATES)
    in_clear = with_credentials(secret(settings), identity, settings.uid, None)
    assert (identity_of(in_clear), certificates_of(in_clear)) == (identity, None)
    names = ["digits-rendezvous", "digits.agents-3-rendezvous", "digits-rendezvous"]
    for item, name in zip((manifest, tokens_secret(settings, 3), service(settings)), names, strict=True):
        assert item["metadata"]["name"] == name
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == (layout.KIND, "uid-of-digits", True)
    assert service(settings)["spec"]["selector"] == {
        "unbroken.dev/job": "digits",
        "unbroken.dev/component": "rendezvous",
    }


@pytest.mark.parametrize("encrypts", [True, False])
def test_only_the_rendezvous_gets_the_key_and_only_agents_the_authority(encrypts: bool) -> None:
    options = OperatorOptions("sidecar:1", encrypts=encrypts)
    verdict = admitted()
    rendezvous = rendezvous_pod(verdict.spec, verdict.settings, 3, options)["spec"]
    trainer = pod_of(options=options)["spec"]
    authority = [("digits-rendezvous", "ca.crt", "ca.crt")] if encrypts else []
    assert keys_in(rendezvous) == ["job-key", *(["tls.crt", "tls.key"] if encrypts else [])]
    # Of the tokens it sees its own only.
    assert projected_in(trainer) == [("digits.agents-0-rendezvous", "digits-7", "token"), *authority]
    agent = environment(trainer["initContainers"][-1])
    scheme = "https" if encrypts else "http"
    assert agent["UNBROKEN_RENDEZVOUS_URL"] == f"{scheme}://digits-rendezvous.ml.svc:29600"
    assert agent.get("UNBROKEN_RENDEZVOUS_CA") == ("/etc/unbroken/ca.crt" if encrypts else None)
    server = environment(rendezvous["containers"][0])
    assert server.get("UNBROKEN_TLS_KEY") == ("/etc/unbroken/tls.key" if encrypts else None)
    assert server.get("UNBROKEN_TLS_CERTIFICATE") == ("/etc/unbroken/tls.crt" if encrypts else None)


def keys_in(spec: dict[str, Any]) -> list[str]:
    """Return which keys of the job's Secret a pod gets."""
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    return [item["key"] for item in volume["secret"]["items"]]


def projected_in(spec: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what a pod gets of which Secrets: their names, keys, and the files."""
    (volume,) = (volume for volume in spec["volumes"] if "projected" in volume)
    secrets = [source["secret"] for source in volume["projected"]["sources"]]
    return [(one["name"], item["key"], item["path"]) for one in secrets for item in one["items"]]


def test_pods_of_a_job_that_an_earlier_release_began_share_its_token() -> None:
    options = OperatorOptions("sidecar:1", has_job_key=False)
    verdict = admitted()
    rendezvous = rendezvous_pod(verdict.spec, verdict.settings, 3, options)["spec"]
    assert keys_in(rendezvous) == ["token", "tls.crt", "tls.key"]
    assert environment(rendezvous["containers"][0])["UNBROKEN_TOKEN_FILE"] == "/etc/unbroken/token"
    assert keys_in(pod_of(options=options)["spec"]) == ["token", "ca.crt"]


def test_tokens_of_a_block_are_those_of_its_pods_and_small() -> None:
    """A Secret may have 1 MiB; a node's kubelet reads all of it for one pod."""
    name = "a" * layout.MAX_JOB_NAME
    last = layout.token_block(9_999_999)
    tokens = pod_tokens("k" * 64, name, "uid", last)
    assert len(tokens) == len(set(tokens.values())) == layout.TOKENS_PER_SECRET
    assert layout.training_pod_name(name, 9_999_999) in tokens
    assert layout.training_pod_name(name, last * layout.TOKENS_PER_SECRET - 1) not in tokens
    assert sum(len(key) + len(text) for key, text in tokens.items()) < 16 << 10
    assert not set(tokens.values()) & set(pod_tokens("k" * 64, name, "another uid", last).values())
    assert len(layout.tokens_name(name, last)) <= 253


def encoded(content: bytes) -> str:
    """Return what a Secret has for this content."""
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("data", "lost"),
    [
        pytest.param({}, "token", id="nothing"),
        pytest.param({"token": "???"}, "token", id="not base64"),
        pytest.param({"token": "/w=="}, "token", id="not text"),
        pytest.param({"token": encoded(b"short")}, "token", id="too short"),
        pytest.param({"token": encoded(b"t" * 40 + b"\n" + b"t" * 40)}, "token", id="two lines"),
        pytest.param({"token": encoded(b"reader//" + b"f" * 64)}, "job-key", id="readers' token alone"),
        pytest.param({"token": encoded(b"t" * 64), "job-key": ""}, "job-key", id="empty key beside a token"),
        pytest.param({"job-key": encoded(b"k" * 40 + b"\r\nX: y" * 9)}, "job-key", id="a header in the key"),
        pytest.param({"job-key": encoded(b"k" * (1 << 20))}, "job-key", id="1 MB"),
        pytest.param({"job-key": encoded(bytes(range(256)))}, "job-key", id="binary"),
    ],
)
def test_a_secret_that_someone_broke_has_no_identity(data: dict[str, str], lost: str) -> None:
    assert identity_of({"data": data}) is None
    assert missing_keys({"data": data}, is_encrypted=False) == (lost,)


def test_the_content_of_a_secret_decides_whether_its_job_has_a_key() -> None:
    old = {"data": {"token": encoded(b"t" * 64)}}
    assert identity_of(old) == TokenKeys("", "t" * 64)
    assert missing_keys(old, is_encrypted=False) == ()
    identity = TokenKeys("k" * 64)
    new = with_credentials({}, identity, "uid", None)
    assert identity_of(new) == identity
    assert identity.operator_token("uid").startswith("operator//")
    assert TokenKeys("", "t" * 64).operator_token("uid") == "t" * 64
    assert base64.b64decode(new["data"]["token"]).startswith(b"reader//")


def test_the_longest_name_leaves_room_for_the_ordinals() -> None:
    name = "a" * layout.MAX_JOB_NAME
    assert len(layout.rendezvous_pod_name(name, 99_999)) <= 63
    assert len(layout.training_pod_name(name, 9_999_999)) <= 63
