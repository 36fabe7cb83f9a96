"""`unbroken status`: whether a job trains now, what happened last, who it was, what was done, what to do."""

import argparse
from collections.abc import Sequence
from typing import Any

from unbroken_cli.advice import next_steps
from unbroken_cli.commands.framework import as_json, make_parser, now, read_job, read_jobs, run
from unbroken_cli.text import UNWATCHED, list_lines, status_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    return make_parser("status", "Show one job, or list all.", is_job_optional=True)


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    if arguments.job is None and arguments.url is None:
        jobs = read_jobs(arguments)
        lines = list_lines(jobs) if jobs else ["there are no jobs here; see -n and -A"]
        lines += sorted({f"NOT UP TO DATE: {job.stale}" for job in jobs if job.stale})
        if any(job.unwatched for job in jobs):
            lines.append(f"PERHAPS NOT UP TO DATE: {UNWATCHED}; `unbroken status JOB` says how old it is")
        return lines, [as_json(job) for job in jobs]
    job = read_job(arguments)
    return status_lines(job, now()), as_json(job) | {"next": list(next_steps(job, now()))}
