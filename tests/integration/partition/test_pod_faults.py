"""A pod that is cut off on purpose: nothing leaves it for a while, then all is as before."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.waiting import wait_until

from unbroken.faults.__main__ import main
from unbroken_core.pod.fault_orders import ALLOW, FaultOrder, write_order

from .partition_network import Network

CUT = FaultOrder(id="0123456789abcdef", kind="partition", seconds=600)
BRIEF = replace(CUT, seconds=1)


def order_on(
    network: Network, host: str, folder: Path, *before: str, order: FaultOrder = CUT
) -> subprocess.CompletedProcess[str]:
    """Run on a host what `kubectl exec` runs in a pod."""
    command = network[host].inside(*before, sys.executable, "-m", "unbroken.faults", write_order(order))
    environment = {**os.environ, ALLOW: "1", "UNBROKEN_DIR": str(folder), "UNBROKEN_POD_IP": network[host].address}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def reaches(network: Network, source: str, target: str, port: int) -> bool:
    """Return whether a connection comes about."""

    def connect() -> bool:
        try:
            with socket.create_connection((network[target].address, port), timeout=1.0):
                return True
        except OSError:
            return False

    return network[source].call(connect)


def test_nothing_leaves_a_pod_that_is_cut_off_until_its_time_or_the_pod_is_over(
    network: Network, tmp_path: Path
) -> None:
    folder = tmp_path / "pod"
    folder.mkdir()
    with network["pod-0"].call(lambda: socket.create_server((network["pod-0"].address, 4000))) as server:
        server.listen(64)
        wait_until(lambda: reaches(network, "pod-1", "pod-0", 4000), "a connection")
        done = order_on(network, "pod-0", folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "partition: nothing leaves by eth0 for 600 s\n"
        again = order_on(network, "pod-0", folder)
        assert (again.returncode, "maybe of an order that still holds; nothing was done" in again.stderr) == (2, True)
        assert not reaches(network, "pod-1", "pod-0", 4000)
        assert not reaches(network, "pod-0", "pod-1", 4000)
        assert reaches(network, "pod-0", "pod-0", 4000), "what stays in the pod arrives"
        shutil.rmtree(folder)
        wait_until(lambda: reaches(network, "pod-1", "pod-0", 4000), "a connection after the pod's end")
        folder.mkdir()
        assert order_on(network, "pod-0", folder, order=BRIEF).returncode == 0
        wait_until(lambda: reaches(network, "pod-1", "pod-0", 4000), "a connection after its time")


def test_without_the_right_to_cut_it_nothing_is_done(network: Network, tmp_path: Path) -> None:
    refused = order_on(network, "pod-1", tmp_path, "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
    assert refused.returncode == 2
    assert refused.stderr == (
        "unbroken.faults: partition: want CAP_NET_ADMIN in the container, got none; nothing was done\n"
    )


def test_a_pod_that_shares_the_machines_network_is_not_cut_off(tmp_path: Path) -> None:
    place = {ALLOW: "1", "UNBROKEN_DIR": str(tmp_path), "UNBROKEN_POD_IP": "127.77.0.1"}
    assert main([write_order(CUT)], place) == 2
