"""A GPU falls off the bus under one pod: its ranks move to a spare after a step, and everybody says why."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.devices import Gpus, System, compile_library

from .test_planned_moves import WORKLOAD, made_by, steps_of
from .test_run_inject import inject

PODS = ("digits-0", "digits-1", "digits-2")


@pytest.mark.timeout(200)
def test_ranks_of_a_lost_gpu_move_to_a_spare_after_a_step_and_status_says_what_was_not_checked(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compile_library(tmp_path / "library")
    gpus = {pod: Gpus(library, tmp_path / "gpus", pod) for pod in PODS}
    for name, value in gpus[PODS[0]].environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UNBROKEN_WATCH_DELAY", "0")
    monkeypatch.setenv("UNBROKEN_WATCH_ROOT", str(System(tmp_path / "root").root))
    options = ("--pods", "2", "--spares", "1", "--last-call", "60", "--health", "Act")
    job = start_job(*options, "--job", "digits", workload="wrapped", command=[str(WORKLOAD)])

    def wait_trained(iteration: int) -> None:
        job.wait_for(lambda: all(len(made_by(tmp_path, rank, iteration)) > 2 for rank in range(2)), f"{iteration}")

    def checked() -> int:
        health = job.status().get("health")
        return 0 if health is None else int(health["num_pods"])

    wait_trained(0)
    job.wait_for(lambda: checked() == len(PODS), "a word of every watch")
    victim = next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [1])
    emitted_s = time.monotonic()
    gpus[victim].emit(0, 31)
    gpus[victim].emit(1, 79)
    job.wait_for(lambda: job.status()["health"]["findings"], "the finding")
    print(f"XID to status: {time.monotonic() - emitted_s:.3f} s")
    wait_trained(1)
    status = job.status()
    recovery = status["recoveries"][-1]
    last = made_by(tmp_path, 0, 0)[-1]
    text = "xid-79 on GPU-0001 is fatal: XID 79: the GPU has fallen off the bus"
    assert [recovery[key] for key in ("cause", "pod", "rung", "detail")] == [
        "device-fault",
        victim,
        "pod",
        f"{text}; moves after step {last}",
    ]
    assert {pod["pod"]: pod.get("unfit", "") for pod in status["pods"]} == {
        pod: text if pod == victim else "" for pod in PODS
    }
    unchecked = dict(status["health"]["unchecked"])
    assert {check: unchecked.get(check) for check in ("ports", "storage", "gpu-events")} == {
        "ports": 3,
        "storage": 3,
        "gpu-events": None,
    }
    assert job.complete() == 0
    for each in gpus.values():
        each.close()


@pytest.mark.timeout(400)
def test_ranks_of_a_suspect_pod_stay_there_where_the_spare_is_lost_as_they_move(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: the job waited for another pod for timeouts.startupSeconds, and failed without one."""
    monkeypatch.setenv("UNBROKEN_WATCH_DELAY", "0")
    monkeypatch.setenv("UNBROKEN_WATCH_ROOT", str(System(tmp_path / "root").root))
    options = ("--pods", "2", "--spares", "1", "--last-call", "60", "--health", "Act", "--allow-faults")
    limits = ("--heartbeat-timeout", "12", "--startup-timeout", "3000", "--max-replacements", "0")
    job = start_job(*options, *limits, "--job", "digits", workload="wrapped", command=[str(WORKLOAD)])
    job.wait_for(lambda: all(len(made_by(tmp_path, rank, 0)) > 2 for rank in range(2)), "two ranks")
    job.wait_for(lambda: (job.status().get("health") or {}).get("num_pods") == len(PODS), "a word of every watch")
    (spare,) = [str(pod["pod"]) for pod in job.status()["pods"] if not pod["ranks"]]
    frozen = [job.part_of_pod(part, spare) for part in ("unbroken.agent", "unbroken.launch")]
    for part in frozen:
        part.suspend()
    done = inject(job, "--fault", "check", "--check", "scratch", "--rank", "1", "--seconds", "900", "--yes")
    assert done.returncode == 0, done.stderr

    def made_last() -> int:
        return max((iteration for iteration, _step in steps_of(tmp_path, 0)), default=0)

    job.wait_for(lambda: made_last() > 0 and len(made_by(tmp_path, 1, made_last())) > 2, "a second iteration")
    holders = {pod["pod"] for pod in job.status()["pods"] if pod["ranks"]}
    assert holders == set(PODS) - {spare}
    for part in frozen:
        part.kill()
    assert job.complete() == 0
    made = [[step for _iteration, step in steps_of(tmp_path, rank)] for rank in range(2)]
    assert made == [list(range(1, len(made[0]) + 1))] * 2


@pytest.mark.timeout(300)
def test_a_probe_of_the_command_line_looks_in_each_pod(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_WATCH_DELAY", "0")
    monkeypatch.setenv("UNBROKEN_WATCH_ROOT", str(System(tmp_path / "root").root))
    # Of an earlier run: the option counts.
    monkeypatch.setenv("UNBROKEN_WATCH_PROBES", json.dumps([{"name": "earlier", "command": ["false"]}]))
    mark = tmp_path / "broken"
    command = ["sh", "-c", f"if test -e '{mark}'; then echo no scratch; exit 1; fi"]
    probes = [{"name": "scratch", "command": command, "periodSeconds": 1, "timeoutSeconds": 60, "verdict": "fatal"}]
    options = ("--pods", "2", "--health", "Observe", "--probes", json.dumps(probes))
    job = start_job(*options, "--job", "digits", workload="wrapped", command=[str(WORKLOAD)])

    def found() -> set[tuple[str, str, str]]:
        health = job.status().get("health") or {"findings": ()}
        told = [(each["pod"], each["finding"]) for each in health["findings"]]
        return {(pod, each["check"], each["message"]) for pod, each in told if each["check"] in ("scratch", "earlier")}

    job.wait_for(lambda: (job.status().get("health") or {}).get("num_pods") == 2, "a word of every watch")
    assert found() == set()
    mark.touch()
    wanted = {(pod, "scratch", "no scratch") for pod in PODS[:2]}
    job.wait_for(lambda: found() == wanted, "what the probe says")
    assert job.complete() == 0
