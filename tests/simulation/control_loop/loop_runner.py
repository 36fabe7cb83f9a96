"""Runs one seed."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.control_loop.loop_schedule import make_loop_schedule
from tests.simulation.control_loop.loop_world import ControlLoopWorld


@dataclass(frozen=True)
class LoopResult:
    """How a seed went."""

    seed: int
    outcome: str
    failure: str
    story: tuple[str, ...]
    strikes: Counter[str] = field(default_factory=Counter)
    num_pods: int = 0
    """Pods that the operator has made."""
    num_recoveries: int = 0
    num_events: int = 0
    num_forgot: int = 0
    """How often a new rendezvous knew less than the one before: then numbers may be used again."""


def run_loop_seed(seed: int) -> LoopResult:
    """Run one schedule; a failure is described, not raised."""
    world = ControlLoopWorld(make_loop_schedule(seed))
    failure = ""
    try:
        world.run()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            failure += "\n" + traceback.format_exc()
    final = world.final_status
    outcome = "violation" if failure else str(final.phase if final is not None else "none")
    if final is not None and outcome == "failed":
        outcome = f"failed {final.reason}"
    return LoopResult(
        seed,
        outcome,
        failure,
        world.story,
        world.strikes,
        len(world.holds.created),
        world.ledger.num_recoveries,
        world.num_events,
        world.forgot,
    )
