"""A job with `spec.memory` whose worker and agent's container are killed goes on from memory, bit for bit."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.waiting import eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, ROOT, Bench, Json, job

WORKLOAD = ROOT / "tests" / "integration" / "sidecar" / "memory_workload.py"
END_S = 280.0


def memory_job(name: str, folder: Path, *faults: str) -> Json:
    """Return a job of two pods of two ranks, which breaks as it is told."""
    made = job(
        name,
        ["python", str(WORKLOAD), "fsdp2", str(folder), *faults],
        replicas=2,
        ranksPerPod=2,
        memory={"sizeLimit": "9Mi", "every": 2},
        # Nothing hangs here, and a machine that is busy must not look like it.
        timeouts={
            "softSeconds": 60,
            "hardSeconds": 90,
            "heartbeatSeconds": 120,
            "reconnectSeconds": 120,  # the agent's container is started again meanwhile
            "barrierSeconds": 120,
        },
    )
    container = made["spec"]["template"]["spec"]["containers"][0]
    # Without it MKL computes another last bit where a tensor's memory begins elsewhere.
    container["env"] = [{"name": "MKL_CBWR", "value": "COMPATIBLE"}, {"name": "OMP_NUM_THREADS", "value": "1"}]
    return made


def lines_of(path: Path) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in path.read_text().splitlines()]


def losses(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Return all losses that were computed, by rank and step."""
    found: dict[tuple[str, str], set[str]] = {}
    for _, rank, step, bits in lines_of(folder / "losses"):
        found.setdefault((rank, step), set()).add(bits)
    return found


async def ending(bench: Bench, name: str) -> Json:
    """Return the status of a job that is over."""
    end: Json = {}

    async def look() -> bool:
        nonlocal end
        end = await bench.status(name, name)
        return end.get("state") in ("Complete", "Failed")

    await eventually(look, f"the end of {name}", END_S, lambda: json.dumps(end, indent=1), KUBECTL_PAUSE_S)
    return end


async def agent_restarts(bench: Bench, namespace: str) -> int:
    """Return how often containers of agents were started again."""
    pods = json.loads(await bench.cluster.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    statuses = [
        status
        for pod in pods
        for kind in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(kind, ())
        if status["name"] == "unbroken-agent"
    ]
    assert len(statuses) == 2
    return sum(status["restartCount"] for status in statuses)


@pytest.mark.timeout(700)
@ON_ONE_REAL_SERVER
def test_killed_worker_and_agent_cost_two_saves_at_most_and_no_bit(bench: Bench, tmp_path: Path) -> None:
    folders = {"calm": tmp_path / "calm", "broken": tmp_path / "broken"}
    # Before Kubernetes 1.29 an agent is a plain container, which nobody starts again: its pod is replaced.
    restarts = 0 if bench.profile == "full" else 1
    faults = {"calm": (), "broken": ("kill:0:1:5", *["kill-agent:1:2:8"] * restarts, "raise:1:1:10")}

    async def scenario() -> None:
        for name, folder in folders.items():
            folder.mkdir()
            async with bench.namespace(name):
                await bench.apply(name, memory_job(name, folder, *faults[name]))
                end = await ending(bench, name)
                assert end["state"] == "Complete", json.dumps(end, indent=1)
                if name == "broken":
                    assert await agent_restarts(bench, name) == restarts

    asyncio.run(scenario())
    assert losses(folders["broken"]) == losses(folders["calm"])
    restored = {iteration: step for iteration, _, _, step in lines_of(folders["broken"] / "restored")}
    # Of memory, since there is no disk: what was saved last before each fault, or the one before, if another rank was
    # still at it when the fault interrupted it.
    assert restored["0"] == "None"
    assert restored["1"] in ("2", "4")
    assert restored["2"] in ("6", "8")
