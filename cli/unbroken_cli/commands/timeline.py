"""`unbroken timeline`: what happened to a job, oldest first."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unbroken_cli.commands.framework import make_parser, now, read_job, run
from unbroken_cli.report import html_report
from unbroken_cli.text import timeline_lines
from unbroken_core.vocabulary.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = make_parser("timeline", "Show what happened to a job.")
    made.add_argument("--html", type=Path, metavar="FILE", help="write it as a page that needs nothing else")
    return made


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    job = read_job(arguments)
    if arguments.html is not None:
        _write(arguments.html, html_report(job, now()))
    faults, notes = [asdict(fault) for fault in job.faults], [asdict(note) for note in job.notes]
    lines = timeline_lines(job) if arguments.html is None else [f"wrote {arguments.html}"]
    return lines, {"job": job.name, "namespace": job.namespace, "faults": faults, "events": notes}


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {file}: {error.strerror}; choose a file that can be written") from error
