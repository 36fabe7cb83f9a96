"""The command: reads options, runs the preflight in a child that is bounded by its time, prints what it found."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from unbroken.preflight.forked import EndedError, Forked
from unbroken.preflight.options import Options, read_options
from unbroken.preflight.report import NOT_ALL_TESTED, line_of_host, lines_of
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError

BAD_INPUT = 2
INTERRUPTED = 130


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line; return the exit code that the report names, 2 for bad input, 3 without a report."""
    try:
        options = read_options(arguments, os.environ)
    except InputError as error:
        _complain(str(error))
        return BAD_INPUT
    if options.is_idle:
        return 0
    try:
        answer = _answer(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    if "report" not in answer:
        _complain(str(answer["error"]))
        return BAD_INPUT if answer.get("isInput") else NOT_ALL_TESTED
    report = answer["report"]
    if options.rank not in (None, 0):
        _complain(line_of_host(report, options.rank or 0).removeprefix("preflight: "))
    elif options.output == "json":
        print(json.dumps(report, indent=2), flush=True)
    else:
        print("\n".join(printable(line) for line in lines_of(report)), flush=True)
    return int(report["exitCode"])


def _complain(text: str) -> None:
    print(printable(f"unbroken preflight: {text}"), file=sys.stderr, flush=True)


def _answer(options: Options) -> dict[str, Any]:
    child = Forked(lambda tell: tell(_preflight(options)))
    try:
        value = child.read(time.monotonic() + options.total_s)
        return value if isinstance(value, dict) else {"error": "the preflight's process says nothing"}
    except TimeoutError:
        return {"error": f"no report within {options.total_s:g} s"}
    except EndedError as error:
        return {"error": f"the preflight's process {error}"}
    finally:
        child.end()


def _preflight(options: Options) -> dict[str, Any]:
    """Return the report, or what went wrong. Runs in a child, which alone loads torch."""
    _be_quiet(options.is_verbose)
    try:
        from unbroken.preflight.flight import fly  # noqa: PLC0415 - whatever importing torch does is bounded here
    except ImportError as error:
        return {"error": f"the package {error.name} cannot be imported: {error}", "isInput": True}
    try:
        return fly(options)
    except InputError as error:
        return {"error": str(error), "isInput": True}


def _be_quiet(is_verbose: bool) -> None:
    """Keep what libraries print out of the report: standard output is the report's alone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    target = os.dup(2) if is_verbose else os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
