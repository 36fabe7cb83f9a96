"""`unbroken status` and `why` say of a rendezvous' watches what the operator would write into its conditions."""

import argparse
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from unbroken_cli.advice import next_steps
from unbroken_cli.commands import why
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.text import faultless_lines, status_lines, why_lines
from unbroken_core.protocol.messages import HealthStatus, JobStatus, PodFinding, Recovery
from unbroken_core.recovery.health_words import nodes_healthy, straggling
from unbroken_core.vocabulary.findings import STRAGGLERS, Finding, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung

NOW = datetime(2026, 1, 1, 0, 20, tzinfo=timezone.utc)
HELD = "findings speak against 3 pods within 5 min, which may be a false alarm: no ranks move for it"
LOST = Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79", message="XID 79: fell off the bus")
SENTENCE = (
    "small-1 on node n1: xid-79 on GPU-a is fatal: XID 79: fell off the bus; "
    "small-2 on node n2: xid-79 on GPU-a is fatal: XID 79: fell off the bus; "
    f"{HELD}; not checked everywhere: ecc, links"
)
SICK = HealthStatus(
    4, (PodFinding("small-1", "n1", LOST), PodFinding("small-2", "n2", LOST)), 2, (("ecc", 4), ("links", 1)), HELD
)
WELL = HealthStatus(4, unchecked=(("ecc", 4),))
MOVED = Recovery(
    1, Cause.DEVICE_FAULT, Rung.POD, 1, "small-1", "n1", "", "xid-79", 0, 1, ("small-4",), {"stop": 0.1},
    "2026-01-01T00:10:00Z", "2026-01-01T00:10:01Z",
)  # fmt: skip
STATUS = JobStatus(1, "small", 1, 1, JobPhase.RUNNING, Reason.TRAINING, "", 1, 4, 1, 0, (), {}, {}, (), -1, None)


def test_status_of_a_rendezvous_says_what_was_found_why_nothing_moves_and_what_was_not_checked() -> None:
    job = job_from_status(replace(STATUS, health=SICK))
    assert f"  nodes      {SENTENCE}" in status_lines(job, NOW)
    assert f"  nodes      {SENTENCE}" in faultless_lines(job, NOW), "why without a fault"
    assert "docs/runbooks/broken-device.md" in next_steps(job, NOW)[0]
    well = job_from_status(replace(STATUS, health=WELL))
    assert "  nodes      nothing broken was found; not checked everywhere: ecc" in status_lines(well, NOW)
    assert next_steps(well, NOW) == ("nothing",)
    over = job_from_status(replace(STATUS, health=WELL, phase=JobPhase.COMPLETE))
    assert not [line for line in status_lines(over, NOW) if line.startswith("  nodes")]


def test_why_of_a_device_fault_says_the_same_sentence_and_not_that_nobody_knows() -> None:
    still, moved = (job_from_status(replace(STATUS, recoveries=(MOVED,), health=health)) for health in (SICK, WELL))
    assert f"  nodes      {SENTENCE}" in why_lines(still, still.faults[0], NOW)
    assert "  nodes      nothing broken was found; not checked everywhere: ecc" in why_lines(
        moved, moved.faults[0], NOW
    )
    silent = job_from_status(replace(STATUS, recoveries=(MOVED,)))
    (line,) = [line for line in why_lines(silent, silent.faults[0], NOW) if line.startswith("  nodes")]
    assert "GPUs, links and nodes are not looked at, as health.mode is Off" in line
    assert "no pod's watch has said anything so far" in line


def test_a_job_that_looks_for_no_stragglers_is_not_said_to_be_young_or_without_steps() -> None:
    job = job_from_status(STATUS)
    (pace,) = [one.message for one in job.conditions if one.type == "Straggling"]
    assert "health.stragglers.mode is Off" in pace


def test_stragglers_of_a_rendezvous_are_a_next_step() -> None:
    slow = PodFinding("small-3", "n3", Finding(STRAGGLERS, "rank 3", Verdict.SUSPECT, message="busy 2.1 times as long"))
    job = job_from_status(replace(STATUS, health=HealthStatus(4, (slow,), 1, num_paced=4)))
    assert any("small-3 on node n3: stragglers on rank 3" in step for step in next_steps(job, NOW))


@pytest.mark.parametrize("health", [None, WELL, SICK])
def test_the_words_are_those_of_the_conditions(health: HealthStatus | None) -> None:
    job = job_from_status(replace(STATUS, health=health))
    said = {one.type: (one.reason, one.message) for one in job.conditions}
    nodes, pace = nodes_healthy(health), straggling(health)
    assert said == {
        "NodesHealthy": (nodes.reason.value, nodes.message),
        "Straggling": (pace.reason.value, pace.message),
    }


def test_why_as_json_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_from_status(replace(STATUS, recoveries=(MOVED,), health=SICK))
    monkeypatch.setattr(why, "read_job", lambda _arguments: job)
    data: dict[str, Any] = why._show(argparse.Namespace(fault=None))[1]
    assert (data["nodes"]["status"], data["nodes"]["message"]) == ("False", SENTENCE)
