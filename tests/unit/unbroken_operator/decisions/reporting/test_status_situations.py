"""What a person reads in each situation: the operator's status of it, as `unbroken status` says it."""

import os
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World

from unbroken_cli.advice import next_steps
from unbroken_cli.freshness import why_stale
from unbroken_cli.job import JobRecord
from unbroken_cli.sources.from_cluster import job_from_objects
from unbroken_cli.text import status_lines
from unbroken_core.vocabulary.reasons import JobPhase

from .status_situations import SITUATIONS

PAGE = Path(__file__).parents[5] / "docs" / "operations" / "situations.md"
NOW = datetime(2026, 1, 1, 0, 5, tzinfo=timezone.utc)
HEAD = """# What `unbroken status` says

One block for each situation of a job. A test makes these blocks from the operator's own decisions,
and compares them with this page: `UNBROKEN_UPDATE_SNAPSHOTS=1` writes it anew.

"""
UNTOUCHED = "No operator has looked at it"
WITHOUT_LEASE = "The operator was started without --lease"
LEASE = "unbroken-system/unbroken"
SERVER_DATE = "Thu, 01 Jan 2026 00:05:00 GMT"
LEASES: dict[str, dict[str, Any] | None] = {
    "The operator is away": {
        "spec": {"holderIdentity": "pod-1", "leaseDurationSeconds": 8, "renewTime": "2026-01-01T00:01:00Z"}
    },
    "The operator was uninstalled": None,
}
"""What the command line finds in the place of the operator's Lease; it reads none of the other situations."""


def settled(name: str) -> tuple[World, JobRecord]:
    """Return a situation once the operator has written what it sees, and what is read of it."""
    world = SITUATIONS[name]()
    world.options = replace(world.options, lease="" if name == WITHOUT_LEASE else LEASE)
    if name != UNTOUCHED:
        world.settle()
    stale = why_stale(LEASE, LEASES[name], SERVER_DATE) if name in LEASES else ""
    return world, job_from_objects(world.job, list(world.events.values()), stale)


def said(name: str) -> list[str]:
    """Return the lines of one situation."""
    return status_lines(settled(name)[1], NOW)


def blocks() -> str:
    """Return the page."""
    parts = (f"## {name}\n\n```text\n{chr(10).join(said(name))}\n```\n" for name in SITUATIONS)
    return HEAD + "\n".join(parts)


def test_the_page_shows_what_status_says_in_each_situation() -> None:
    if os.environ.get("UNBROKEN_UPDATE_SNAPSHOTS"):
        PAGE.write_text(blocks())
    assert PAGE.read_text() == blocks()


@pytest.mark.parametrize("name", SITUATIONS)
def test_status_says_training_where_a_rendezvous_says_so_and_nowhere_else(name: str) -> None:
    world, job = settled(name)
    report = world.report
    trains = report is not None and report.phase is JobPhase.RUNNING and world.is_reachable
    over = job.state in ("Suspended", "Failed")
    is_known = job.state != "Unknown" and not job.deleting
    assert job.is_training is (trains and not over if is_known else None)
    head, *rest = said(name)
    is_claimed = head.startswith("digits in namespace ml: TRAINING, ")
    assert is_claimed is (job.is_training is True and not job.stale and not job.unwatched)
    assert head.startswith("digits in namespace ml: ")
    assert any(line.startswith("  next  ") for line in rest)


@pytest.mark.parametrize("name", SITUATIONS)
def test_who_must_act_is_told_how(name: str) -> None:
    calm = (
        "It trains",
        "It is complete",
        "It trained again after a planned deletion",
        "Ranks that were missing have joined",
        "A node of its pods is NotReady",  # Its agent is heard: only the API server cannot reach the node.
    )
    assert (next_steps(settled(name)[1], NOW) == ("nothing",)) is (name in calm)
