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
    num_faults: int = 0
    """Faults of the schedule that struck before the job was over."""
    num_recoveries: int = 0
    num_common: int = 0
    """Moves between two steps."""
    num_growths: int = 0
    """Those of them by which the job grew back."""
    num_named: int = 0
    """Hangs of which somebody was named."""
    num_unnamed: int = 0
    """Hangs of which it was said that the rank is not known."""
    num_restored: int = 0
    """Restores from memory."""
    num_chosen_again: int = 0
    """Those of them that were not the first choice: a rank could not read it."""
    num_pair_orders: int = 0
    """Orders to pods to test with another one."""
    num_pairs_named: int = 0
    """Pods that were named by such tests."""
    num_left_out: int = 0
    """Plans that leave out a pod that fails each time."""
    num_kept_promises: int = 0
    """Plans that restore a step that was called protected, though pods that had parts of it are lost."""


def run_seed(seed: int) -> Result:
    """Run one schedule; a failure is described, not raised."""
    world = World(make_schedule(seed))
    try:
        world.run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            text += "\n" + traceback.format_exc()
        return _result(world, seed, "violation", text)
    coordinator = world.coordinator
    status = None if coordinator is None else coordinator.status(world.now_s, str)
    outcome = "down" if status is None else str(status.phase)
    if status is not None and outcome == "failed":
        outcome = f"failed {status.reason}"
    return _result(world, seed, outcome, "")


def _result(world: World, seed: int, outcome: str, failure: str) -> Result:
    ledger = world.ledger
    counts: tuple[int, ...] = (world.num_faults, ledger.num_recoveries, ledger.num_common, ledger.num_growths)
    counts += (ledger.num_named, ledger.num_unnamed, world.memory.num_restored, world.memory.num_chosen_again)
    counts += (world.pairing.num_orders, world.pairing.num_named, world.failing.num_left_out)
    counts += (world.memory.num_kept_promises,)
    return Result(seed, outcome, failure, world.story, *counts)
