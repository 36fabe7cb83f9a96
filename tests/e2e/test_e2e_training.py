"""Apply, train, break, recover, complete: the example on real processes, on each kind of API server."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from unbroken_core.vocabulary.reasons import Cause, Rung
from unbroken_local.demo.faults import (
    FaultKind,
    choose_victim,
    deviations,
    has_recovered,
    newest_recovery,
    record_after,
    recoveries_after,
)
from unbroken_local.demo.manifest import with_folder
from unbroken_local.demo.observer import Observer
from unbroken_local.demo.processes import find_worker, read_processes
from unbroken_local.demo.verdict import violations

from .e2e_bench import ROOT, Bench, Json

STEPS = 300
LIMIT_S = 90.0


def example(folder: Path) -> Json:
    """Return the example, smaller: two pods of two ranks and one spare."""
    small: Json = with_folder(yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text()), str(folder))
    small["spec"] |= {"replicas": 2, "spares": {"count": 1}}
    # Nothing hangs here: a disk that is busy while a checkpoint is written must not look like it.
    small["spec"]["timeouts"] |= {"softSeconds": 30, "hardSeconds": 40, "heartbeatSeconds": 30}
    container = small["spec"]["template"]["spec"]["containers"][0]
    container["command"] = [
        f"--steps={STEPS}" if word.startswith("--steps=") else word for word in container["command"]
    ]
    return small


async def break_and_recover(observer: Observer, kind: FaultKind, control: Path) -> None:
    """Have one fault, and wait until the job recovered from it, the operator noted it, and the spare is back."""
    before = await observer.wait("a ready spare", lambda now: now.is_training and now.num_ready_spares > 0, LIMIT_S)
    mark, victim = newest_recovery(before), choose_victim(kind, before)
    if kind is FaultKind.RAISE:
        (control / "new").write_text(f"raise {victim.rank}")
        (control / "new").replace(control / "fault")
    else:
        pid = find_worker(read_processes(), victim.pod_uid, victim.local_rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    after = await observer.wait(
        kind.value, lambda now: has_recovered(now, mark) and record_after(now, mark) is not None, LIMIT_S
    )
    assert deviations(kind, recoveries_after(after, mark)) == []


@pytest.mark.timeout(300)
def test_job_survives_an_exception_and_a_killed_worker_and_completes(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        control = tmp_path / "control"
        control.mkdir()
        (control / "step-seconds").write_text("0.2")
        async with bench.namespace("training") as namespace, bench.observe(namespace, "digits") as observer:
            await bench.apply(namespace, example(tmp_path))
            await break_and_recover(observer, FaultKind.RAISE, control)
            await break_and_recover(observer, FaultKind.KILL, control)
            (control / "step-seconds").write_text("0")
            end = await observer.wait("the end", lambda now: now.state in {"Complete", "Failed"}, LIMIT_S)
            result = json.loads((tmp_path / "checkpoints" / "result.json").read_text())
            assert violations(end, result, STEPS) == []
            seen = {(record["cause"], record["rung"]) for record in end.history}
            assert seen == {(Cause.EXCEPTION, Rung.IN_PROCESS), (Cause.PROCESS_SIGNAL, Rung.POD)}
            await bench.cluster.kubectl("delete", "rtj", "digits", "-n", namespace)
            await bench.wait_gone(namespace, "digits")

    asyncio.run(scenario())
