"""Whether the demonstration succeeded: one check after the other over the job's end. Pure."""

from collections.abc import Mapping
from typing import Any

from unbroken_local.demo.snapshot import Snapshot

MIN_ACCURACY = 0.95


def violations(snapshot: Snapshot, result: Mapping[str, Any] | None, steps: int) -> list[str]:
    """Return one message for each promise that the end of the job breaks.

    `result` is what the example filed at its end, None when it did not; `steps` is how many it was asked for.
    """
    found: list[str] = []
    complete = {item.get("type"): item.get("status") for item in snapshot.conditions}.get("Complete")
    if complete != "True":
        found.append(f"job: want condition Complete True, got {complete} (state {snapshot.state or 'unknown'})")
    if result is None:
        return [*found, "result.json: want the example's result, got no file"]
    accuracy, num_steps = result.get("accuracy", 0.0), result.get("steps")
    if not accuracy >= MIN_ACCURACY:
        found.append(f"test accuracy: want at least {MIN_ACCURACY}, got {accuracy}")
    if num_steps != steps:
        found.append(f"steps: want {steps} applied, got {num_steps}")
    if result.get("steps_add_up") is not True:
        found.append("steps: want each applied exactly once and in order, got another history or other samples")
    return found
