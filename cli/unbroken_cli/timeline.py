"""`unbroken timeline`: what happened to a job, oldest first."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unbroken_cli.command import make_parser, read_job, run
from unbroken_cli.words import timeline_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(make_parser("timeline", "Show what happened to a job."), _show, argv)


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    job = read_job(arguments)
    faults, notes = [asdict(fault) for fault in job.faults], [asdict(note) for note in job.notes]
    return timeline_lines(job), {"job": job.name, "namespace": job.namespace, "faults": faults, "events": notes}
