"""Which pods are behind a Service, and where it is reached."""

import itertools
from typing import Any

import pytest

from unbroken_local.kube.informer import Key
from unbroken_local.proxy import ServiceDirectory, ready_endpoints, target_port

Json = dict[str, Any]
PORT = {"port": 80, "targetPort": "http"}
SERVICE: Json = {"metadata": {"name": "web", "namespace": "n"}, "spec": {"selector": {"app": "web"}, "ports": [PORT]}}


def pod(
    name: str, *, ip: str, ready: bool = True, namespace: str = "n", leaving: bool = False, app: str = "web"
) -> Json:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": app},
            **({"deletionTimestamp": "t"} if leaving else {}),
        },
        "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def test_only_ready_selected_pods_of_the_namespace_on_loopback_are_endpoints() -> None:
    pods = [
        pod("b", ip="127.1.1.2"),
        pod("a", ip="127.1.1.1"),
        pod("unready", ip="127.1.1.3", ready=False),
        pod("leaving", ip="127.1.1.4", leaving=True),
        pod("elsewhere", ip="127.1.1.5", namespace="m"),
        pod("other", ip="127.1.1.6", app="db"),
        pod("far", ip="10.0.0.1"),
        pod("new", ip=""),
    ]
    assert ready_endpoints(SERVICE, PORT, pods) == [("127.1.1.1", 8080), ("127.1.1.2", 8080)]


def test_a_service_may_publish_pods_that_are_not_ready() -> None:
    service = {**SERVICE, "spec": {**SERVICE["spec"], "publishNotReadyAddresses": True}}
    assert ready_endpoints(service, PORT, [pod("a", ip="127.1.1.1", ready=False)]) == [("127.1.1.1", 8080)]


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        ({"port": 80}, 80),
        ({"port": 80, "targetPort": 90}, 90),
        ({"port": 80, "targetPort": "http"}, 8080),
        ({"port": 1, "targetPort": "no"}, 0),
    ],
)
def test_target_port_is_a_number_a_name_or_the_port_itself(port: Json, expected: int) -> None:
    assert target_port(port, pod("a", ip="127.1.1.1")) == expected


def directory(services: dict[Key, Json]) -> ServiceDirectory:
    numbers = itertools.count(1)
    return ServiceDirectory(services, lambda: f"127.9.128.{next(numbers)}")


def test_a_loopback_cluster_ip_is_the_address_and_any_other_is_replaced() -> None:
    spec = SERVICE["spec"]
    services: dict[Key, Json] = {
        ("n", "local"): {"metadata": {"name": "local"}, "spec": {**spec, "clusterIP": "127.96.0.7"}},
        ("n", "real"): {"metadata": {"name": "real"}, "spec": {**spec, "clusterIP": "10.96.0.7"}},
        ("n", "headless"): {"metadata": {"name": "headless"}, "spec": {**spec, "clusterIP": "None"}},
    }
    found = directory(services)
    assert found.address_by_cluster_ip() == {"127.96.0.7": "127.96.0.7", "10.96.0.7": "127.9.128.1"}
    assert found.address_of("n", "headless") == "127.9.128.2"
    assert [service["metadata"]["name"] for service, _ in found.of_namespace("n")] == ["local", "real"]


def test_the_address_of_a_service_that_does_not_exist_yet_stays_its_own_when_it_appears() -> None:
    services: dict[Key, Json] = {}
    found = directory(services)
    early = found.address_of("n", "web")
    services[("n", "web")] = {**SERVICE, "spec": {**SERVICE["spec"], "clusterIP": "127.96.0.9"}}
    assert found.address_of("n", "web") == early
    assert found.address_of("m", "web") != early
