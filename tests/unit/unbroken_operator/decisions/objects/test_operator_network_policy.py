"""Who may reach a job's rendezvous."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.adapters.test_operator_retry import Server, _executor
from tests.unit.unbroken_operator.operator_world import World, a_job

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import KubeConflict, KubeError, KubeNotServed, KubeRefused, KubeUnavailable
from unbroken_operator.config import parse
from unbroken_operator.decisions.actions import CreateNetworkPolicy, CreatePod
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.objects.network_policy import keepers_policy, network_policy
from unbroken_operator.decisions.snapshot import OperatorOptions, PolicyOptions

MONITORING = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
OPTIONS = OperatorOptions("sidecar:1", network_policy=PolicyOptions("ops", (MONITORING,)))


def test_the_api_is_for_the_jobs_pods_and_the_operator_and_metrics_for_whom_the_options_name() -> None:
    verdict = admit(a_job())
    assert isinstance(verdict, ValidSpec)
    made = network_policy(verdict.settings, PolicyOptions("ops", (MONITORING,)))
    assert made["metadata"]["name"] == "digits-rendezvous"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ResilientTrainingJob", verdict.settings.uid, True)
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "unbroken-operator"}},
    }
    assert made["spec"] == {
        "podSelector": {"matchLabels": {"unbroken.dev/job": "digits", "unbroken.dev/component": "rendezvous"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "ports": [{"port": 29600, "protocol": "TCP"}],
                "from": [{"podSelector": {"matchLabels": {"unbroken.dev/job": "digits"}}}, operator],
            },
            {"ports": [{"port": 29601, "protocol": "TCP"}], "from": [MONITORING]},
        ],
    }
    open_to_all = network_policy(verdict.settings, PolicyOptions("ops"))
    assert open_to_all["spec"]["ingress"][1] == {"ports": [{"port": 29601, "protocol": "TCP"}]}


COPYING = {"sizeLimit": "4Gi", "replicas": 1}


def with_ports(*ports: object, **more: object) -> dict[str, Any]:
    container = {"name": "trainer", "image": "torch:2", "command": ["python3", "t.py"], "ports": list(ports)}
    return a_job(memory=COPYING, template={"spec": {"containers": [container], **more}})


def test_only_the_jobs_pods_reach_its_keepers_and_all_else_stays_open() -> None:
    verdict = admit(with_ports({"containerPort": 6006}, {"containerPort": 53, "protocol": "UDP"}))
    assert isinstance(verdict, ValidSpec)
    made = keepers_policy(verdict.spec, verdict.settings)
    assert made["metadata"]["name"] == "digits-keepers"
    assert made["spec"]["podSelector"] == {
        "matchLabels": {"unbroken.dev/job": "digits", "unbroken.dev/component": "trainer"}
    }
    assert made["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"unbroken.dev/job": "digits"}}}]},
        {
            "ports": [
                {"port": 1, "endPort": 29602, "protocol": "TCP"},
                {"port": 29604, "endPort": 65535, "protocol": "TCP"},
                {"protocol": "UDP"},
                {"port": 53, "protocol": "UDP"},
                {"port": 6006, "protocol": "TCP"},
                {"port": 29602, "protocol": "TCP"},
            ]
        },
    ]


@pytest.mark.parametrize(
    "port",
    [29603, 0, 70000, True, "http", None, {"a": 1}],
    ids=str,
)
def test_no_template_opens_the_keepers_port_or_breaks_the_policy(port: object) -> None:
    verdict = admit(with_ports({"containerPort": port}, {"containerPort": 7, "protocol": "SCTP"}, "x", None))
    plain = admit(a_job(memory=COPYING))
    assert isinstance(verdict, ValidSpec)
    assert isinstance(plain, ValidSpec)
    assert keepers_policy(verdict.spec, verdict.settings) == keepers_policy(plain.spec, plain.settings)


def test_jobs_that_copy_nothing_get_no_policy_for_keepers() -> None:
    for memory, names in (
        ({"sizeLimit": "4Gi"}, ["digits-rendezvous"]),
        (COPYING, ["digits-rendezvous", "digits-keepers"]),
    ):
        world = World(a_job(memory=memory))
        world.options = OPTIONS
        world.settle()
        assert list(world.network_policies) == names


def test_it_is_made_just_before_each_rendezvous_pod_and_by_nobody_who_was_not_asked() -> None:
    world = World()
    world.options = OPTIONS
    kinds = [type(action) for action in world.actions()]
    first = kinds.index(CreateNetworkPolicy)
    assert (kinds.count(CreateNetworkPolicy), kinds[first + 1]) == (1, CreatePod)
    world.settle()
    assert list(world.network_policies) == ["digits-rendezvous"]
    world.network_policies.clear()
    del world.pods["digits-rendezvous-0"]
    world.settle()
    assert list(world.network_policies) == ["digits-rendezvous"], "it comes back with the next rendezvous"
    other = World()
    other.settle()
    assert other.network_policies == {}


def test_a_job_in_its_hosts_network_gets_none_since_its_agents_would_be_shut_out() -> None:
    job = a_job()
    job["spec"]["template"]["spec"]["hostNetwork"] = True
    world = World(job)
    world.options = OPTIONS
    world.settle()
    assert world.network_policies == {}
    assert "digits-rendezvous-0" in world.pods


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(KubeConflict("409"), id="there is one"),
        pytest.param(KubeRefused("403"), id="refused"),
        pytest.param(KubeNotServed("404"), id="not served"),
    ],
)
def test_a_job_goes_on_where_none_can_be_made(error: KubeError) -> None:
    server = Server(error, fails_from=0)
    assert asyncio.run(_executor(server).apply((_policy(),))) == ()
    assert server.num_asked == 1


def test_it_is_asked_for_again_when_the_api_server_is_away() -> None:
    with pytest.raises(KubeUnavailable):
        asyncio.run(_executor(Server(KubeUnavailable("503"), fails_from=0)).apply((_policy(),)))


def _policy() -> CreateNetworkPolicy:
    verdict = admit(a_job())
    assert isinstance(verdict, ValidSpec)
    return CreateNetworkPolicy(network_policy(verdict.settings, PolicyOptions("ops")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--job-network-policies", "no/name"], "--job-network-policies: not the name", id="namespace"),
        pytest.param(["--job-network-policies", "ops", "--job-metrics-from", "{"], "JSON list", id="no JSON"),
        pytest.param(["--job-network-policies", "ops", "--job-metrics-from", "{}"], "JSON list", id="no list"),
        pytest.param(["--job-network-policies", "ops", "--job-metrics-from", "[{}]"], "JSON list", id="no peer"),
        pytest.param(["--job-network-policies", "ops", "--job-metrics-from", "[[]]"], "JSON list", id="a list"),
        pytest.param(
            ["--job-network-policies", "ops", "--job-metrics-from", '[{"x": 1}]'], "JSON list", id="unknown key"
        ),
        pytest.param(["--job-network-policies", "ops", "--job-metrics-from", "[" * 100_000], "JSON list", id="nested"),
        pytest.param(
            ["--job-network-policies", "ops", "--job-metrics-from", f"[{','.join(['{}'] * 101)}]"], "100", id="many"
        ),
    ],
)
def test_options_that_make_no_policy_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    with pytest.raises(InputError, match=message):
        parse(["--all-namespaces", "--kubeconfig", str(kubeconfig), *arguments])


def test_options_are_read(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    place = ["--all-namespaces", "--kubeconfig", str(kubeconfig)]
    assert parse(place).network_policy is None
    peers: Any = '[{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]'
    found = parse([*place, "--job-network-policies", "ops", "--job-metrics-from", peers])
    assert found.network_policy == PolicyOptions("ops", (MONITORING,))
