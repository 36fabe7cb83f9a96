"""The processes of an `unbroken run`, seen from the outside, and what can be done to them."""

import contextlib
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPT = "digits.py"
_PARTS = ("unbroken.agent", "unbroken.launch", "unbroken.rendezvous")

FAULTS = {
    "kill worker": 6.0,
    "stop worker": 1.0,
    "raise": 4.0,
    "kill agent": 2.0,
    "kill launcher": 1.0,
    "kill rendezvous": 0.7,
}
"""Each kind of fault and how often it comes, relative to the others."""


@dataclass(frozen=True)
class Done:
    """One fault that was made."""

    at_s: float
    """Seconds since the job was started."""
    kind: str
    victim: int
    """Process id; of `raise` the rank."""

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.kind} {self.victim}"


def parts(run: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the living processes by kind: agent, launcher, rendezvous, worker."""
    found: dict[str, list[psutil.Process]] = {"agent": [], "launcher": [], "rendezvous": [], "worker": []}
    for process in run.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            module = next((name for name in _PARTS if name in words), None)
            if module is not None:
                found[module.removeprefix("unbroken.").replace("launch", "launcher")].append(process)
            elif any(word.endswith(SCRIPT) for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                found["worker"].append(process)
    return found


def make_fault(chance: random.Random, run: psutil.Process, control: Path, num_ranks: int, at_s: float) -> Done | None:
    """Make one random fault; None when its victim was not there."""
    (kind,) = chance.choices(list(FAULTS), list(FAULTS.values()))
    if kind == "raise":
        rank = chance.randrange(num_ranks)
        written = control / "fault.new"
        written.write_text(f"raise {rank}")
        written.replace(control / "fault")
        return Done(at_s, kind, rank)
    verb, part = kind.split()
    candidates = parts(run)[part]
    if not candidates:
        return None
    victim = chance.choice(candidates).pid
    try:
        os.kill(victim, signal.SIGSTOP if verb == "stop" else signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Done(at_s, kind, victim)
