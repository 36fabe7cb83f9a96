"""A job whose pods have IPv6 addresses only: rendezvous, agent, metrics, workers and their store at ::1, over TLS."""

import os
import signal
import socket
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.integration.sidecar.conftest import WORKLOAD, RunningJob
from tests.waiting import LIMIT_S

PROGRAM = Path(__file__).parents[1] / "ipv6_run.py"
PORTS = (29600, 29601, 29602)
"""Of the rendezvous, of its metrics, and of the agent's."""


def listeners(job: RunningJob) -> set[tuple[str, int]]:
    """Return where rendezvous and agent listen; what gloo does is its own affair."""
    parts = [*job.parts("unbroken.rendezvous"), *job.parts("unbroken.agent")]
    found = [one for part in parts for one in part.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {(one.laddr.ip, one.laddr.port) for one in found}


@pytest.mark.timeout(200)
def test_a_job_on_ipv6_trains_recovers_and_completes(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
        tried.bind(("::1", 0))  # Else there is nothing to show here.
    job = RunningJob(tmp_path, ["--ranks-per-pod", "2"], [str(WORKLOAD), "wrapped"], (str(PROGRAM),))
    try:
        before = job.wait_started(0, 2)
        assert listeners(job) == {("::1", port) for port in PORTS}
        with urllib.request.urlopen("http://[::1]:29602/metrics", timeout=LIMIT_S) as response:
            assert b"unbroken_agent_connected 1.0" in response.read()
        os.kill(before[1], signal.SIGKILL)
        after = job.wait_started(1, 2)
        assert after[0] == before[0], "rank 0 goes on in its process"
        assert job.complete() == 0
    finally:
        job.close()
