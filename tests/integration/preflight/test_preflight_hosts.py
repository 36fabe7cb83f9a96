"""Preflights of real processes with real gloo: who is broken is named, and nobody else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.one_device import as_host, ranks_of_nccl
from tests.ports import free_port

BROKEN_HOST = Path(__file__).with_name("broken_host.py")
LIMIT_S = 280.0
pytestmark = pytest.mark.timeout(300)
PATIENT = ("--pair-timeout", "60", "--own-timeout", "100")
"""For faults that show at once: no sound host is to be slow for it."""

Start = Callable[..., list[subprocess.Popen[str]]]


def command(fault: str = "") -> list[str]:
    """Return a host's command, broken in one way or sound."""
    return [sys.executable, str(BROKEN_HOST), fault] if fault else [sys.executable, "-m", "unbroken.preflight"]


def environment(**more: str) -> dict[str, str]:
    """Return that of a host: nothing of a job's, and one thread, since all hosts share this machine."""
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {**ours, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def start() -> Iterator[Start]:
    """Start hosts, each broken in the way that is named by its number, and end them after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        num_hosts: int, faults: dict[int, str], *options: str, log: Path | None = None
    ) -> list[subprocess.Popen[str]]:
        leader = f"127.0.0.1:{free_port()}"
        for rank in range(num_hosts):
            words = [*command(faults.get(rank, "")), "--hosts", str(num_hosts), "--host-rank", str(rank)]
            words += ["--leader", leader, "--name", f"h{rank}", "-o", "json", *options]
            env = environment(**(as_host(f"h{rank}", log) if log else {}))
            started.append(subprocess.Popen(words, text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def report_of(hosts: Sequence[subprocess.Popen[str]]) -> tuple[dict[str, Any], list[str]]:
    """Return the report that host 0 prints, and what the others say; all of them end with one exit code."""
    outputs = [host.communicate(timeout=LIMIT_S) for host in hosts]
    assert outputs[0][0], outputs[0][1]
    report = json.loads(outputs[0][0])
    assert [host.returncode for host in hosts] == [report["exitCode"]] * len(hosts), outputs
    return report, [error.strip() for _, error in outputs[1:]]


def verdicts(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {host["name"]: (host["verdict"], host["why"]) for host in report["hosts"]}


OK = ("ok", "passed")


def test_pods_of_one_host_test_each_other() -> None:
    words = [*command(), "--pods", "3", *PATIENT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("preflight of 3 hosts: 2 rounds of pairs")
    assert lines[1] == "ok       3 hosts: pod-0, pod-1, pod-2"
    assert lines[2].startswith("speed ")


def test_a_host_with_wrong_products_is_named_and_tests_with_nobody(start: Start) -> None:
    report, lines = report_of(start(3, {1: "product"}, *PATIENT))
    assert verdicts(report) == {"h0": OK, "h1": ("bad", "own-checks"), "h2": OK}
    host = report["hosts"][1]
    assert host["evidence"] == "matmul cpu: float32: 1 of 65536 products are wrong"
    assert (host["passed"], host["failed"], report["links"], report["exitCode"]) == ([], [], [], 1)
    assert lines == [
        f"unbroken preflight: h1 is bad: {host['evidence']}",
        "unbroken preflight: h2 is ok; 1 other host is bad",
    ]


def test_a_host_whose_data_arrive_changed_is_named_by_those_that_pass_with_others(start: Start) -> None:
    report, _ = report_of(start(4, {2: "data"}, *PATIENT))
    assert verdicts(report) == {"h0": OK, "h1": OK, "h2": ("bad", "proven-partners"), "h3": OK}
    assert (report["links"], report["exitCode"]) == ([], 1)
    assert len(report["hosts"][2]["failed"]) >= 4
    assert "numbers are wrong" in report["hosts"][2]["evidence"]


def test_a_host_whose_tests_die_is_named(start: Start) -> None:
    report, _ = report_of(start(3, {0: "dying-pair"}, "--pair-timeout", "8", "--own-timeout", "100"))
    assert verdicts(report) == {"h0": ("bad", "proven-partners"), "h1": OK, "h2": OK}


def test_of_two_hosts_the_pair_is_named(start: Start) -> None:
    report, _ = report_of(start(2, {1: "data"}, *PATIENT))
    assert verdicts(report) == dict.fromkeys(("h0", "h1"), ("unknown", "one-of-two"))
    assert [link["hosts"] for link in report["links"]] == [["h0", "h1"]]
    assert report["exitCode"] == 1


def test_a_product_that_hangs_is_a_finding() -> None:
    words = [*command("hanging-product"), "--own-timeout", "5", "--name", "h0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 1, done
    assert "bad      h0: matmul cpu: no end within 5 s" in done.stdout


def test_a_host_that_lacks_gpus_and_one_with_a_version_that_is_bad_here_are_said() -> None:
    words = [*command(), "--devices", "3", "--bad-version", "torch=*", "--name", "h0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 1, done
    assert "bad      h0: devices: want 3 GPUs, got " in done.stdout
    assert "is named by --bad-version" in done.stdout


def test_nobody_waits_for_ever_for_a_leader_that_is_not_there() -> None:
    words = [*command(), "--hosts", "2", "--host-rank", "1", "--leader", f"127.0.0.1:{free_port()}"]
    words += ["--arrival-timeout", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 3, done
    assert "no answer" in done.stderr
    assert done.stdout == ""


def test_torchrun_gives_a_host_its_place_and_other_ranks_of_it_end_at_once() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--master-port"]
    words += [str(free_port()), "-m", "unbroken.preflight", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 0, done
    assert [host["verdict"] for host in json.loads(done.stdout)["hosts"]] == ["ok"]


@pytest.mark.gpu
def test_a_host_with_gpus_multiplies_on_each_and_sums_with_nccl() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    words = [*command(), "-o", "json", "--devices", str(torch.cuda.device_count())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
    assert done.returncode == 0, done
    host = json.loads(done.stdout)["hosts"][0]
    assert host["gpus"] == torch.cuda.device_count()
    assert "cuda:0" in [check["entity"] for check in host["checks"]]
    assert host["versions"]["nccl"]


@pytest.mark.gpu
def test_hosts_with_gpus_test_each_other_with_nccl(start: Start, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    report, lines = report_of(start(2, {}, *PATIENT, log=tmp_path))
    assert verdicts(report) == {"h0": OK, "h1": OK}
    assert [host["gpus"] for host in report["hosts"]] == [1, 1]
    assert ranks_of_nccl(tmp_path, 2) == [0, 1]
    assert lines == ["unbroken preflight: h1 is ok"]


def test_command_loads_no_torch_itself() -> None:
    words = [sys.executable, "-c", "import sys, unbroken.preflight.command; print('torch' in sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "False"
