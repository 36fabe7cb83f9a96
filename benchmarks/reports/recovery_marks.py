"""What the workers of all systems share: the body of an iteration, and the file of time stamps that they write.

Stamps are CLOCK_MONOTONIC nanoseconds: one clock for all processes of a machine.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HANGS = ("hang", "blocked")
"""Kinds of faults without an end of their own."""
SOFT_S, HARD_S = 1.0, 2.0
"""Timeouts for these."""
SETTLE_S = 0.1
"""Quiet time before a fault: what the former recovery left in the background must not count."""


@dataclass(frozen=True)
class Scenario:
    """What to do to the workers."""

    kind: str
    """exception or pods (the same in pods of one worker), kill or spare (the same with a spare pod),
    hang (a Python loop that does not ping any more) or blocked (a call that does not return)."""
    num_faults: int
    marks: Path

    @classmethod
    def read(cls) -> "Scenario":
        """Read the variables that the benchmark set."""
        return cls(os.environ["BENCH_KIND"], int(os.environ["BENCH_FAULTS"]), Path(os.environ["BENCH_MARKS"]))

    def variables(self) -> dict[str, str]:
        """Return the variables that `read` reads."""
        return {"BENCH_KIND": self.kind, "BENCH_FAULTS": str(self.num_faults), "BENCH_MARKS": str(self.marks)}


@dataclass(frozen=True)
class Mark:
    """One stamp."""

    name: str
    """fault, or done: the first collective of the iteration has ended here."""
    iteration: int
    pid: int
    at_ns: int


def mark(scenario: Scenario, name: str, iteration: int) -> None:
    """Append a stamp of now."""
    at_ns = time.monotonic_ns()
    line = json.dumps({"name": name, "iteration": iteration, "pid": os.getpid(), "at_ns": at_ns}) + "\n"
    descriptor = os.open(scenario.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def read_marks(path: Path) -> list[Mark]:
    """Return all stamps, in the order of writing."""
    return [Mark(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def after_first_collective(
    scenario: Scenario, iteration: int, rank: int, world_size: int, ping: Callable[[], object]
) -> None:
    """Stamp, then have the fault of this iteration: one rank fails, the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    mark(scenario, "done", iteration)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if iteration >= scenario.num_faults:
        return
    is_kill = scenario.kind in ("kill", "spare")
    victim = world_size - 1 if is_kill else iteration % world_size
    if rank == victim:
        time.sleep(SETTLE_S)
        if scenario.kind == "hang":
            ping()
        mark(scenario, "fault", iteration)
        if is_kill:
            os.kill(os.getpid(), signal.SIGKILL)
        _hang(scenario.kind)
        raise RuntimeError("injected by the benchmark")
    dist.all_reduce(tensor)


def _hang(kind: str) -> None:
    """Make no progress, in one of two ways; returns at once for other kinds."""
    while kind == "hang":
        # Not a busy one: it would take a processor from those who recover.
        time.sleep(0.001)
    if kind == "blocked":
        time.sleep(1000 * HARD_S)


def recoveries_ms(marks: list[Mark]) -> list[float]:
    """Return, for each fault, milliseconds until the last worker had finished its first collective after it."""
    found = []
    for fault in (item for item in marks if item.name == "fault"):
        done = [item.at_ns for item in marks if item.name == "done" and item.at_ns > fault.at_ns]
        following = [item.iteration for item in marks if item.name == "done" and item.at_ns > fault.at_ns]
        if not done:
            raise RuntimeError(f"fault of iteration {fault.iteration}: no collective was finished after it")
        last_ns = max(at_ns for at_ns, iteration in zip(done, following, strict=True) if iteration == min(following))
        found.append((last_ns - fault.at_ns) / 1e6)
    return found
