"""Pure: what a fault has cost, from the stamps of all processes, in the terms of docs/cost.md.

last step ──checkpoint, redo──> fault ──detect──> known ──waiting, restart──> restored
    restored ──redo, checkpoint──> the last step that was there before ──progress──> new step
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from systems.lost_time_job import WORLD_SIZE, Mark

TERMS = ("progress", "checkpoint", "redo", "detect", "restart", "waiting")
"""Of the identity. Nothing is suspended here, and nothing is left open."""
PHASES = {"entered": "restart", "joined": "join", "built": "model", "restored": "restore"}
"""The same time by what the workers do: until all have entered the function, and so on."""


@dataclass(frozen=True)
class Recovery:
    """One fault."""

    lost_s: float
    steps_redone: int
    terms: dict[str, float]
    phases: dict[str, float]
    is_known: bool = True
    """Whether the system said when it knew of the fault; otherwise `detect` is in `restart`."""


@dataclass(frozen=True)
class Row:
    """All faults of one kind in one system."""

    system: str
    fault: str
    recoveries: list[Recovery] = field(default_factory=list)
    reason: str = ""
    """Why there is no figure."""
    step_s: float | None = None
    """Mean of the steps without a fault, checkpoints included."""

    def to_dict(self) -> dict[str, object]:
        """Return it as in the file: medians, and each fault."""
        found = self.recoveries
        median = statistics.median
        return {
            "system": self.system,
            "fault": self.fault,
            "lost_s": round(median(one.lost_s for one in found), 4) if found else None,
            "steps_redone": median(one.steps_redone for one in found) if found else None,
            "terms": medians([one.terms for one in found]),
            "phases": medians([one.phases for one in found]),
            "step_s": None if self.step_s is None else round(self.step_s, 4),
            "faults": [
                {
                    "lost_s": round(one.lost_s, 4),
                    "steps_redone": one.steps_redone,
                    "terms": {name: round(value, 4) for name, value in one.terms.items()},
                    "phases": {name: round(value, 4) for name, value in one.phases.items()},
                    "is_known": one.is_known,
                }
                for one in found
            ],
            "reason": self.reason,
        }


def medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part; empty without any."""
    return {name: round(statistics.median(one[name] for one in parts), 4) for name in parts[0]} if parts else {}


def mean_step_s(marks: Sequence[Mark]) -> float | None:
    """Return the mean seconds of a step of rank 0 that followed another one with nothing between; None without any."""
    seconds = []
    before: Mark | None = None
    for mark in sorted((one for one in marks if one.rank == 0 or one.name == "fault"), key=lambda one: one.at_ns):
        if mark.name == "saved":
            # The next step's time holds it.
            continue
        if mark.name == "step" and before is not None and before.name == "step" and mark.step == before.step + 1:
            seconds.append((mark.at_ns - before.at_ns) / 1e9)
        before = mark
    return statistics.mean(seconds) if seconds else None


def recoveries(marks: Sequence[Mark], fault_steps: Sequence[int]) -> list[Recovery]:
    """Return what each fault has cost; nothing of those after which the next step was not made by all."""
    found = []
    for step in fault_steps:
        at_ns = next((one.at_ns for one in marks if (one.name, one.step) == ("fault", step)), None)
        if at_ns is None:
            continue
        before = [one.at_ns for one in marks if (one.name, one.step) == ("step", step - 1) and one.at_ns < at_ns]
        again: dict[int, int] = {}
        for one in marks:
            if (one.name, one.step) == ("step", step) and one.at_ns > at_ns:
                again.setdefault(one.rank, one.at_ns)
        if len(again) < WORLD_SIZE or not before:
            continue
        start_ns, end_ns = max(before), max(again.values())
        window = [one for one in marks if start_ns < one.at_ns <= end_ns]
        found.append(_recovery(window, step, (start_ns, at_ns, end_ns)))
    return found


def _recovery(window: Sequence[Mark], step: int, instants: tuple[int, int, int]) -> Recovery:
    """Return what one fault has cost: from the last step before it, the fault, until the next new step."""
    start_ns, at_ns, end_ns = instants
    after = [one for one in window if one.at_ns > at_ns]
    phases: dict[str, float] = {}
    last_ns = start_ns
    for name, phase in PHASES.items():
        reached_ns = max((one.at_ns for one in after if one.name == name), default=last_ns)
        phases[phase] = (reached_ns - last_ns) / 1e9
        last_ns = reached_ns
    phases["redo"] = (end_ns - last_ns) / 1e9
    restored = min(one.step for one in after if one.name == "restored")
    terms, is_known = _terms(window, step, instants, last_ns)
    seconds = {name: value / 1e9 for name, value in terms.items()}
    return Recovery((end_ns - start_ns) / 1e9, step - 1 - restored, seconds, phases, is_known)


def _terms(
    window: Sequence[Mark], step: int, instants: tuple[int, int, int], restored_ns: int
) -> tuple[dict[str, int], bool]:
    """Return nanoseconds of each term, which are those of the window, and whether the system said when it knew."""
    start_ns, at_ns, end_ns = instants
    terms = dict.fromkeys(TERMS, 0)
    # What a fault cuts off is done again; a checkpoint that was over by then is one.
    saved_ns = max((one.at_ns for one in window if one.name == "saved" and one.at_ns <= at_ns), default=start_ns)
    terms["checkpoint"] = saved_ns - start_ns
    terms["redo"] = at_ns - saved_ns
    after = [one for one in window if one.at_ns > at_ns]
    known_ns = min((one.at_ns for one in after if one.name == "known"), default=None)
    is_known = known_ns is not None
    # Its line may be read after the workers are back already.
    known_ns = at_ns if known_ns is None else min(known_ns, restored_ns)
    terms["detect"] = known_ns - at_ns
    running_ns = known_ns
    if any(one.name == "created" for one in after):
        started = [one.at_ns for one in after if one.name == "started" and one.at_ns <= restored_ns]
        running_ns = max([known_ns, *started])
    terms["waiting"] = running_ns - known_ns
    terms["restart"] = restored_ns - running_ns
    last_ns = restored_ns
    for number in sorted({one.step for one in after if one.name == "step" and one.step < step}):
        last_ns = _spend(terms, "redo", after, ("step", number), last_ns)
        last_ns = _spend(terms, "checkpoint", after, ("saved", number), last_ns)
    terms["progress"] = end_ns - last_ns
    return terms, is_known


def _spend(terms: dict[str, int], term: str, after: Sequence[Mark], what: tuple[str, int], last_ns: int) -> int:
    """Add the time until the last rank has done something; return when that was."""
    until_ns = max((one.at_ns for one in after if (one.name, one.step) == what), default=last_ns)
    until_ns = max(until_ns, last_ns)
    terms[term] += until_ns - last_ns
    return until_ns
