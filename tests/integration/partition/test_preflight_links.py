"""A preflight on a network of its own: a link that loses everything is named, and neither of its ends."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .partition_fixtures import find_missing
from .partition_network import Network

LIMIT_S = 280.0
HOSTS = ("h0", "h1", "h2", "h3")


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Four hosts on a switch."""
    if missing := find_missing():
        pytest.skip(f"no network namespaces: {missing}")
    network = Network(*HOSTS)
    yield network
    network.close()


@pytest.mark.timeout(300)
def test_a_link_that_loses_everything_is_named_and_its_ends_are_not(hosts: Network) -> None:
    """The leader reaches both ends: only with each other they are cut off."""
    hosts.part("h1", "h3")
    processes = []
    for rank, name in enumerate(HOSTS):
        words = [sys.executable, "-m", "unbroken.preflight", "--hosts", "4", "--host-rank", str(rank), "--name", name]
        words += [
            "--leader",
            f"{hosts['h0'].address}:29500",
            "--pair-timeout",
            "8",
            "--own-timeout",
            "100",
            "-o",
            "json",
        ]
        processes.append(
            subprocess.Popen(hosts[name].inside(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    report = json.loads(outputs[0][0])
    assert {host["name"]: host["verdict"] for host in report["hosts"]} == dict.fromkeys(HOSTS, "ok"), report
    assert [link["hosts"] for link in report["links"]] == [["h1", "h3"]]
    assert [process.returncode for process in processes] == [1] * 4
