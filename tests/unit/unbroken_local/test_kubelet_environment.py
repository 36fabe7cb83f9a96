"""A container's variables and command line."""

import base64
from pathlib import Path
from typing import Any

import pytest

from unbroken_local.kubelet.container import CreateError, LaunchContext, command_line, plan_launch
from unbroken_local.kubelet.environment import ConfigError, Sources, build_environment, expand, formatted_map
from unbroken_local.kubelet.images import ImageRule, default_rules, find_image
from unbroken_local.kubelet.spec import read_pod

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u-1", "labels": {"a": "x"}, "annotations": {"b": "y"}},
    "spec": {"nodeName": "node-1", "containers": []},
}
SECRET = {"kind": "Secret", "data": {"token": base64.b64encode(b"s3cret").decode()}}
CONFIG = {"kind": "ConfigMap", "data": {"MODE": "fast", "bad key": "x"}}
SERVICE = {"metadata": {"name": "my-db"}, "spec": {"ports": [{"name": "sql", "port": 5432}]}}


def sources(**changes: Any) -> Sources:
    values: dict[str, Any] = {"pod": POD, "host_ip": "127.1.0.2", "pod_ip": "127.1.1.1"}
    return Sources(**values | {"secrets": {"s": SECRET}, "config_maps": {"c": CONFIG}} | changes)


def environment(env: list[dict[str, Any]], **changes: Any) -> dict[str, str]:
    resources = {"limits": {"cpu": "1500m", "memory": "1Gi"}}
    return build_environment({"name": "c", "env": env, "resources": resources}, sources(**changes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)z", "x1y2z"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$A $5", "$A $5"),
        ("$(A", "$(A"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_are_expanded_as_kubernetes_does(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_variables_see_those_before_them_and_not_those_after() -> None:
    env = [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "b"}, {"name": "C", "value": "$(B)$(A)"}]
    assert environment(env) == {"A": "$(B)", "B": "b", "C": "b$(B)"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"fieldRef": {"fieldPath": "metadata.name"}}, "p"),
        ({"fieldRef": {"fieldPath": "metadata.uid"}}, "u-1"),
        ({"fieldRef": {"fieldPath": "metadata.labels['a']"}}, "x"),
        ({"fieldRef": {"fieldPath": "metadata.annotations['b']"}}, "y"),
        ({"fieldRef": {"fieldPath": "metadata.labels['none']"}}, ""),
        ({"fieldRef": {"fieldPath": "spec.nodeName"}}, "node-1"),
        ({"fieldRef": {"fieldPath": "status.podIP"}}, "127.1.1.1"),
        ({"fieldRef": {"fieldPath": "status.hostIP"}}, "127.1.0.2"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "2"),
        ({"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}, "1500"),
        ({"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}}, "1024"),
        ({"secretKeyRef": {"name": "s", "key": "token"}}, "s3cret"),
        ({"configMapKeyRef": {"name": "c", "key": "MODE"}}, "fast"),
    ],
)
def test_values_come_from_fields_resources_secrets_and_config_maps(source: dict[str, Any], expected: str) -> None:
    assert environment([{"name": "V", "valueFrom": source}]) == {"V": expected}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "s", "key": "k"}}, "couldn't find key k in secret s"),
        ({"configMapKeyRef": {"name": "none", "key": "k"}}, 'configmap "none" not found'),
        ({"fieldRef": {"fieldPath": "spec.nothing"}}, "unsupported fieldPath: spec.nothing"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_it(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment([{"name": "V", "valueFrom": source}])


def test_an_optional_key_that_is_not_there_leaves_the_variable_out() -> None:
    env = [{"name": "V", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}}]
    assert environment(env) == {}


def test_env_from_takes_legal_names_with_a_prefix_and_env_overrides_it() -> None:
    container = {
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}],
        "env": [{"name": "P_MODE", "value": "slow"}],
    }
    assert build_environment(container, sources()) == {"P_MODE": "slow"}


def test_services_of_the_namespace_give_variables_unless_links_are_off() -> None:
    assert environment([], services=((SERVICE, "127.1.128.1"),)) == {
        "MY_DB_SERVICE_HOST": "127.1.128.1",
        "MY_DB_SERVICE_PORT": "5432",
        "MY_DB_SERVICE_PORT_SQL": "5432",
        "MY_DB_PORT": "tcp://127.1.128.1:5432",
        "MY_DB_PORT_5432_TCP": "tcp://127.1.128.1:5432",
        "MY_DB_PORT_5432_TCP_PROTO": "tcp",
        "MY_DB_PORT_5432_TCP_PORT": "5432",
        "MY_DB_PORT_5432_TCP_ADDR": "127.1.128.1",
    }
    off = {**POD, "spec": {**POD["spec"], "enableServiceLinks": False}}
    assert environment([], services=((SERVICE, "127.1.128.1"),), pod=off) == {}


def test_labels_are_written_one_a_line_quoted_and_sorted() -> None:
    assert formatted_map({"b": 'x"y', "a": "1"}) == 'a="1"\nb="x\\"y"'


def container_of(raw: dict[str, Any]) -> Any:
    return read_pod({**POD, "spec": {"containers": [{"name": "c", "image": "i", **raw}]}}).containers[0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param({"command": ["a"], "args": ["$(X)"]}, ["a", "1"], id="command and args"),
        pytest.param({"args": ["b"]}, ["entry", "b"], id="args replace the image's command"),
        pytest.param({}, ["entry", "default"], id="nothing takes the image's own"),
        pytest.param({"command": ["a"]}, ["a"], id="a command drops the image's arguments"),
    ],
)
def test_command_line_follows_the_rules_of_images(raw: dict[str, Any], expected: list[str]) -> None:
    image = ImageRule("i", entrypoint=("entry",), command=("default",))
    assert command_line(container_of(raw), image, {"X": "1"}) == expected


def test_a_container_without_any_command_cannot_be_created() -> None:
    with pytest.raises(CreateError, match="no command specified"):
        command_line(container_of({}), ImageRule("i"), {})


def test_a_launch_rewrites_command_environment_and_working_directory_once() -> None:
    raw = {
        "command": ["python", "/data/x.py", "--url=$(URL)"],
        "workingDir": "/data/w",
        "env": [{"name": "URL", "value": "http://web.n.svc:1"}, {"name": "LIB", "value": "/a:/data"}],
        "volumeMounts": [{"name": "v", "mountPath": "/data"}],
    }
    context = LaunchContext(
        ImageRule("i", env={"X": "/data"}, path=("/venv/bin",)),
        sources(),
        {"v": Path("/data/real")},
        Path("/ends/c"),
        Path("/log"),
        lambda text: text.replace("web.n.svc", "127.2.2.2"),
    )
    launch = plan_launch(container_of(raw), context)
    assert launch.main.argv == ("python", "/data/real/x.py", "--url=http://127.2.2.2:1")
    assert launch.main.cwd == "/data/real/w"
    env = launch.main.env
    assert (env["URL"], env["LIB"], env["X"]) == ("http://127.2.2.2:1", "/a:/data/real", "/data")
    assert env["PATH"].startswith("/venv/bin:")
    assert env["HOSTNAME"] == "p"


@pytest.mark.parametrize(
    ("image", "is_known"),
    [
        ("unbroken/sidecar:0.1.0", True),
        ("docker.io/unbroken/operator:dev", True),
        ("unbroken/trainer-example", True),
        ("unbroken/sidecar@sha256:abc", True),
        ("unbroken/other:1", False),
        ("other/unbroken/sidecar:1", False),
        ("", False),
    ],
)
def test_only_images_of_the_table_can_be_pulled(image: str, is_known: bool) -> None:
    assert (find_image(image, default_rules()) is not None) is is_known
