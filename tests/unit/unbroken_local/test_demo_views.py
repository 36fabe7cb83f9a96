"""The demonstration's pure parts: what it sees, whom it hits, what it calls a success, and what it shows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console, RenderableType

from unbroken_core.protocol.messages import JobStatus, PodStatus, Recovery
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase
from unbroken_local.demo import faults, manifest, render, verdict
from unbroken_local.demo.faults import FaultKind
from unbroken_local.demo.processes import Process, find_worker
from unbroken_local.demo.snapshot import Snapshot, natural_key, take_snapshot

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.yaml"


def node(name: str, rack: str, nvlink: str, status: dict[str, Any] | None = None) -> dict[str, Any]:
    labels = {"unbroken.dev/rack": rack, "unbroken.dev/nvlink-domain": nvlink}
    return {"metadata": {"name": name, "labels": labels}, "status": READY if status is None else status}


def pod(name: str, on: str, component: str = "trainer", **metadata: str) -> dict[str, Any]:
    labels = {"unbroken.dev/job": "digits", "unbroken.dev/component": component}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, **metadata},
        "spec": {"nodeName": on},
        "status": {"phase": "Running", "podIP": "127.0.7.1"},
    }


def member(name: str, on: str, ranks: tuple[int, ...], *workers: WorkerPhase) -> PodStatus:
    role = Role.ACTIVE if ranks else Role.SPARE
    return PodStatus(name, f"uid-{name}", on, role, ranks, (), workers, True)


def recovery(number: int, cause: Cause, rung: Rung, ended_at: str = "2030-01-01T00:00:01Z") -> Recovery:
    began = "2030-01-01T00:00:00Z"
    phase_s = {"stop": 0.1, "first-progress": 0.2} if ended_at else {}
    return Recovery(
        number, cause, rung, 1, "digits-0", "node-1", "node-1", "", 0, 1, ("digits-4",), phase_s, began, ended_at
    )


def status(*recoveries: Recovery, phase: JobPhase = JobPhase.RUNNING) -> JobStatus:
    run, ready = WorkerPhase.RUNNING, WorkerPhase.READY
    pods = (
        member("digits-1", "node-2", (2, 3), run, run),
        member("digits-0", "node-1", (0, 1), run, run),
        member("digits-4", "node-10", (), ready, ready),
    )
    return JobStatus(
        1, "digits", 3, 9, phase, Reason.TRAINING, "4 ranks train", 1, 4, 2, 0, pods, {}, {}, recoveries, 120, 0.9
    )


def snapshot(*recoveries: Recovery, phase: JobPhase = JobPhase.RUNNING) -> Snapshot:
    nodes = [node("node-10", "b", "b1"), node("node-2", "a", "a1", {}), node("node-1", "a", "a1")]
    pods = [
        pod("digits-1", "node-2"),
        pod("digits-0", "node-1"),
        pod("digits-4", "node-10"),
        pod("digits-rendezvous-0", "node-2", "rendezvous"),
    ]
    job = {"status": {"state": "Running", "history": [], "conditions": []}}
    return take_snapshot(nodes, pods, job, status(*recoveries, phase=phase))


def shown(picture: RenderableType) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def test_nodes_stand_in_the_order_of_rack_domain_and_number() -> None:
    names = ["node-10", "node-2", "node-1"]
    assert sorted(names, key=natural_key) == ["node-1", "node-2", "node-10"]
    assert [item.name for item in snapshot().nodes] == ["node-1", "node-2", "node-10"]


def test_snapshot_joins_pods_with_the_rendezvous_word_on_them() -> None:
    now = snapshot()
    assert [(item.name, item.ranks) for item in now.active_pods] == [("digits-0", (0, 1)), ("digits-1", (2, 3))]
    assert now.num_ready_spares == 1
    assert [item.is_ready for item in now.nodes] == [True, False, True]


def test_spare_that_is_being_deleted_does_not_count_as_ready() -> None:
    pods = [pod("digits-4", "node-10", deletionTimestamp="2030-01-01T00:00:00Z")]
    assert take_snapshot([node("node-10", "b", "b1")], pods, None, status()).num_ready_spares == 0


@pytest.mark.parametrize("kind", list(FaultKind))
def test_each_fault_hits_a_pod_that_holds_ranks(kind: FaultKind) -> None:
    victim = faults.choose_victim(kind, snapshot())
    assert victim.pod in {"digits-0", "digits-1"}
    assert victim.rank == {"digits-0": 1, "digits-1": 3}[victim.pod]
    assert victim.local_rank == 1


def test_node_that_goes_down_does_not_hold_the_rendezvous() -> None:
    assert faults.choose_victim(FaultKind.NODE_DOWN, snapshot()).node == "node-1"


def test_fault_without_anyone_to_hit_is_an_error_that_says_so() -> None:
    with pytest.raises(faults.NoVictimError, match="want an active pod to hit, got none of 0 pods"):
        faults.choose_victim(FaultKind.KILL, Snapshot())


def test_recovery_counts_only_when_it_began_after_the_fault_and_the_job_trains() -> None:
    earlier = recovery(1, Cause.EXCEPTION, Rung.IN_PROCESS)
    mark = faults.newest_recovery(snapshot(earlier))
    assert mark == (3, 1)
    later, running = recovery(2, Cause.PROCESS_SIGNAL, Rung.POD), recovery(2, Cause.PROCESS_SIGNAL, Rung.POD, "")
    assert not faults.has_recovered(snapshot(earlier), mark)
    assert not faults.has_recovered(snapshot(earlier, running), mark)
    assert not faults.has_recovered(snapshot(earlier, later, phase=JobPhase.INTERRUPTED), mark)
    assert not faults.has_recovered(snapshot(earlier, replace(later, phase_s={"stop": 0.1})), mark)
    assert faults.has_recovered(snapshot(earlier, later), mark)


def test_recovery_of_a_newer_rendezvous_counts_from_its_first() -> None:
    assert faults.has_recovered(snapshot(recovery(1, Cause.POD_LOST, Rung.POD)), (2, 7))


@pytest.mark.parametrize(
    ("recoveries", "expected"),
    [
        pytest.param((recovery(1, Cause.PROCESS_SIGNAL, Rung.POD),), [], id="as it should be"),
        pytest.param((), ["worker SIGKILLed: want one recovery, got 0 (none)"], id="none"),
        pytest.param(
            (recovery(1, Cause.PROCESS_SIGNAL, Rung.JOB),),
            ["worker SIGKILLed: rung: want pod, got job"],
            id="too high on the ladder",
        ),
        pytest.param(
            (recovery(1, Cause.EXCEPTION, Rung.POD),),
            ["worker SIGKILLed: cause: want one of process-signal, got exception"],
            id="a consequence taken for the cause",
        ),
    ],
)
def test_recovery_is_compared_with_what_the_fault_should_lead_to(
    recoveries: tuple[Recovery, ...], expected: list[str]
) -> None:
    assert faults.deviations(FaultKind.KILL, recoveries) == expected


def test_operator_has_noted_a_recovery_when_its_history_shows_the_end() -> None:
    record = {"term": 3, "number": 2, "endedAt": "2030-01-01T00:00:01Z"}
    earlier, running = {**record, "number": 1}, {**record, "endedAt": None}
    assert faults.record_after(replace(snapshot(), history=(earlier, record)), (3, 1)) == record
    assert faults.record_after(replace(snapshot(), history=(earlier, record)), (3, 2)) is None
    assert faults.record_after(replace(snapshot(), history=(earlier, running)), (3, 1)) is None


def test_worker_is_found_by_its_environment_and_not_by_that_of_its_children() -> None:
    worker = {"UNBROKEN_POD_UID": "uid-0", "UNBROKEN_LOCAL_RANK": "1", "UNBROKEN_INCARNATION": "2"}
    processes = {
        7: Process(1, {"UNBROKEN_POD_UID": "uid-0"}),
        12: Process(7, {**worker, "UNBROKEN_INCARNATION": "1"}),
        90: Process(7, worker),
        41: Process(90, worker),
    }
    assert find_worker(processes, "uid-0", 1) == 90
    assert find_worker(processes, "uid-0", 0) is None


def test_worker_of_a_pod_with_the_same_name_in_another_cluster_is_left_alone() -> None:
    ours, theirs = (
        {"UNBROKEN_POD": "digits-1", "UNBROKEN_POD_UID": uid, "UNBROKEN_LOCAL_RANK": "1"} for uid in ("ours", "theirs")
    )
    assert find_worker({5: Process(1, theirs), 9: Process(1, ours)}, "ours", 1) == 9
    assert find_worker({5: Process(1, theirs)}, "ours", 1) is None


def test_live_view_shows_ranks_spares_and_what_happens() -> None:
    text = shown(render.describe_all(snapshot(), [render.Line(12.0, "a pod is deleted", "bold red")], 60))
    for part in ("rack a", "NVLink b1", "node-2 down", "digits-0  0   1", "digits-4  s   s", "step 120"):
        assert part in text
    assert "  12.0 s  a pod is deleted" in text


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param(None, None, id="a job without checkpoints in memory"),
        pytest.param(MemoryStatus(120, steps_redone=3), None, id="ranks have not told what they went back to"),
        pytest.param(MemoryStatus(120, restored_step=117, steps_redone=3, source="memory"), 3, id="from the memory"),
        pytest.param(MemoryStatus(-1, steps_redone=121, source="nothing"), 121, id="from the first step"),
        pytest.param(MemoryStatus(120, restored_step=120, source="memory"), 0, id="none"),
    ],
)
def test_steps_lost_are_those_that_the_rendezvous_says_were_made_again(
    memory: MemoryStatus | None, expected: int | None
) -> None:
    assert faults.steps_lost(Snapshot()) is None
    assert faults.steps_lost(Snapshot(status=replace(status(), memory=memory))) == expected


@pytest.mark.parametrize(("lost", "cell"), [(None, "-"), (0, "0"), (12, "12")])
def test_closing_table_shows_steps_lost_also_where_the_operator_has_recorded_nothing(
    lost: int | None, cell: str
) -> None:
    text = shown(render.describe_result([render.Row("node goes down", None, lost)]))
    cells = next(line for line in text.splitlines() if "node goes down" in line).split()
    assert cells[3:] == ["-", "-", "-", cell, "-", "-", "-", "-", "-", "-"]


def test_closing_table_shows_rung_replacement_steps_lost_and_seconds_of_each_phase() -> None:
    record = {
        "cause": "pod-lost",
        "rung": "pod",
        "replacedBy": ["digits-4"],
        "seconds": {"detect": 0.01, "stop": 0.2, "plan": 0.003, "enter": 0.1},
    }
    text = shown(render.describe_result([render.Row("node goes down", record, 2)]))
    cells = next(line for line in text.splitlines() if "node goes down" in line).split()
    assert cells[-10:] == ["pod-lost", "pod", "digits-4", "2", "0.01", "0.20", "0.00", "0.10", "-", "0.31"]


@pytest.mark.parametrize(
    ("result", "conditions", "expected"),
    [
        pytest.param({"accuracy": 0.97, "steps": 800, "steps_add_up": True}, "True", [], id="all is well"),
        pytest.param(None, "True", ["result.json: want the example's result, got no file"], id="no result"),
        pytest.param(
            {"accuracy": 0.5, "steps": 799, "steps_add_up": False},
            "False",
            [
                "job: want condition Complete True, got False (state Running)",
                "test accuracy: want at least 0.95, got 0.5",
                "steps: want 800 applied, got 799",
                "steps: want each applied exactly once and in order, got another history or other samples",
            ],
            id="everything is wrong",
        ),
        pytest.param(
            {"accuracy": float("nan"), "steps": 800, "steps_add_up": True},
            "True",
            ["test accuracy: want at least 0.95, got nan"],
            id="not a number",
        ),
    ],
)
def test_verdict_names_each_broken_promise(result: dict[str, Any] | None, conditions: str, expected: list[str]) -> None:
    end = replace(snapshot(), conditions=({"type": "Complete", "status": conditions},))
    assert verdict.violations(end, result, 800) == expected


def test_example_is_applied_with_another_folder_and_nothing_else_changed() -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    changed = manifest.with_folder(job, "/somewhere")
    assert changed["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"] == "/somewhere"
    changed["spec"]["template"]["spec"]["volumes"] = job["spec"]["template"]["spec"]["volumes"]
    assert changed == job == yaml.safe_load(EXAMPLE.read_text())


def test_number_of_steps_is_read_from_the_trainers_command() -> None:
    assert manifest.number_of_steps(yaml.safe_load(EXAMPLE.read_text())) >= 400


def test_manifest_without_a_shared_folder_is_refused() -> None:
    job = {"spec": {"template": {"spec": {"containers": [{"command": ["python"]}]}}}}
    with pytest.raises(InputError, match="want one with a persistentVolumeClaim, got 0"):
        manifest.with_folder(job, "/somewhere")
    with pytest.raises(InputError, match=r"want --steps=NUMBER among the words, got \['python'\]"):
        manifest.number_of_steps(job)
