"""Runs one seed."""

import traceback
from dataclasses import dataclass

from tests.simulation.schedule import make_schedule
from tests.simulation.world import World


@dataclass(frozen=True)
class Result:
    """How a seed went."""

    seed: int
    outcome: str
    failure: str
    story: tuple[str, ...]
    num_recoveries: int = 0
    num_common: int = 0
    """Moves between two steps."""


def run_seed(seed: int) -> Result:
    """Run one schedule; a failure is described, not raised."""
    world = World(make_schedule(seed))
    try:
        world.run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            text += "\n" + traceback.format_exc()
        return Result(seed, "violation", text, tuple(world.story), world.ledger.num_recoveries, world.ledger.num_common)
    coordinator = world.coordinator
    status = None if coordinator is None else coordinator.status(world.now_s, str)
    outcome = "down" if status is None else str(status.phase)
    if status is not None and outcome == "failed":
        outcome = f"failed {status.reason}"
    return Result(seed, outcome, "", tuple(world.story), world.ledger.num_recoveries, world.ledger.num_common)
