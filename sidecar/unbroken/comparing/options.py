"""Options of `unbroken compare`: its own, and those of `unbroken run`."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.checkpoint_records import FOLDER, KINDS, STRIKE, FaultAtStep
from unbroken.run.options import STDIN, RunOptions, make_parser, options_of
from unbroken_core.vocabulary.errors import InputError

RUN = "{run}"
"""In the script's arguments: the folder of the run."""
_MEMORY = "4Gi"
_MAX_FAULTS = 5
"""Of one run, of which one is meant: a script that is killed each time would go on for ever."""
_USUAL = ("exception", "kill")
_DESCRIPTION = (
    "Run a training script twice without a fault and once with each, and compare what it saves in memory, bit for bit."
)
_EPILOG = """
examples:
  unbroken compare --pods 2 train.py --epochs 1
  unbroken compare --pods 2 --ranks-per-pod 2 --fault kill --at-step 50 train.py --output {run}/checkpoints

Each run begins in an empty folder of its own. exit codes: 0 equal, 1 different, 2 bad input or nothing to compare.
"""


@dataclass(frozen=True)
class CompareOptions:
    """What to run, and how to break it."""

    run: RunOptions
    faults: tuple[str, ...]
    at_step: int | None
    """None: after the middle one that was saved."""
    at_rank: int | None
    """None: the last one."""
    is_here: bool
    """Whether all runs begin in the present folder."""
    is_json: bool


def make_compare_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = make_parser("unbroken compare", _DESCRIPTION, _EPILOG)
    group = parser.add_argument_group("comparing")
    group.add_argument(
        "--fault",
        action="append",
        choices=KINDS,
        help=f"a run with this fault: {', '.join(KINDS)}; may be given several times ({' and '.join(_USUAL)})",
    )
    group.add_argument(
        "--at-step", type=int, metavar="N", help="the first save from step N on is the one before which it happens"
    )
    group.add_argument("--at-rank", type=int, metavar="N", help="whom it hits (the last rank)")
    group.add_argument(
        "--here", action="store_true", help="begin all runs in this folder; what one leaves, the next one finds"
    )
    group.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    parser.set_defaults(memory=_MEMORY)
    return parser


def read_compare_options(arguments: Sequence[str] | None) -> CompareOptions:
    """Read the command line. Raises InputError; SystemExit for --help."""
    parsed = make_compare_parser().parse_args(arguments)
    for option, value in (("--at-step", parsed.at_step), ("--at-rank", parsed.at_rank)):
        if value is not None and not 0 <= value < 1 << 60:
            raise InputError(f"{option}: want a number from 0 on, got {value}")
    options = options_of(parsed)
    if STDIN in options.command[1:2]:
        raise InputError("script: want a file, which each run can read, got standard input")
    faults = tuple(dict.fromkeys(parsed.fault or _USUAL))
    return CompareOptions(
        replace(options, is_quiet=True, max_faults=_MAX_FAULTS),
        faults,
        parsed.at_step,
        parsed.at_rank,
        parsed.here,
        parsed.output == "json",
    )


def of_run(options: CompareOptions, name: str, work: Path, record: Path, strike: FaultAtStep | None) -> RunOptions:
    """Return what one of the runs is: its script in a folder of its own."""
    here, python = Path.cwd(), os.environ.get("PYTHONPATH")
    words = [word.replace(RUN, str(work)) for word in options.run.command]
    for at, word in enumerate(words[:2]):
        if (word.endswith(".py") or os.sep in word) and (here / word).is_file():
            words[at] = str(here / word)
    variables = {FOLDER: str(record)}
    if strike is not None:
        variables[STRIKE] = strike.text()
    if not options.is_here and words[1:2] == ["-m"]:
        # Where a module is looked for: the folder that it would begin in.
        variables["PYTHONPATH"] = os.pathsep.join([str(here), *([python] if python else [])])
    return replace(
        options.run,
        command=tuple(words),
        log_dir=None if options.run.log_dir is None else options.run.log_dir / name,
        variables=tuple(variables.items()),
        work_folder=None if options.is_here else work,
    )
