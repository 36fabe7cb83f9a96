"""`unbroken why`: one fault of a job: the culprit, the evidence, what repaired it, the seconds of each phase."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unbroken_cli.advice import fault_steps, next_steps
from unbroken_cli.commands.framework import make_parser, now, read_job, run
from unbroken_cli.job import FaultSummary, JobRecord
from unbroken_cli.text import faultless_lines, why_lines
from unbroken_core.vocabulary.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = make_parser("why", "Explain a fault of a job.")
    made.add_argument("fault", metavar="FAULT", nargs="?", help="its number, as the timeline shows it (the last one)")
    return made


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    job = read_job(arguments)
    found = job.condition("NodesHealthy")
    about: dict[str, Any] = {"job": job.name, "nodes": None if found is None else asdict(found)}
    if not job.faults and arguments.fault is None:
        return faultless_lines(job, now()), about | {"fault": None, "next": list(next_steps(job, now()))}
    fault = find_fault(job, arguments.fault)
    return why_lines(job, fault, now()), about | {"fault": asdict(fault), "next": fault_steps(job, fault)}


def find_fault(job: JobRecord, wanted: str | None) -> FaultSummary:
    """Return the fault of that number, or the last one. Raises InputError when it is not kept."""
    if wanted is None:
        return job.faults[-1]
    for fault in job.faults:
        if fault.id == wanted:
            return fault
    kept = ", ".join(fault.id for fault in job.faults) or "none"
    before = f" ({job.forgotten})" if job.forgotten else ""
    raise InputError(f"FAULT: {job.title} keeps its last 20 faults, numbers {kept}{before}; got {wanted!r}")
