"""Add up JUnit files and steps; the exit code is 1 when something failed or nothing passed.

    python tools/sum_results.py [--step NAME=EXIT_CODE ...] FILE.xml ...

Each step counts as one test of its own; a file that is missing or broken counts as failed. What failed is said again,
since the words of a test are far from the end of a long output.
"""

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_LINES, _LINE = 40, 300
"""Of what failed: lines at most, and characters of each."""


def count_file(path: Path) -> Counter[str]:
    """Return the number of tests by outcome in one JUnit file."""
    try:
        suites = list(ET.parse(path).getroot().iter("testsuite"))
        total = {
            key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
        }
    except (OSError, ET.ParseError, ValueError) as error:
        print(f"sum_results: {path}: want a JUnit file, got {error}", file=sys.stderr)
        return Counter(failed=1)
    failed = total["failures"] + total["errors"]
    return Counter(passed=total["tests"] - failed - total["skipped"], failed=failed, skipped=total["skipped"])


def failures(path: Path) -> Iterator[str]:
    """Return a line for each test of one JUnit file that failed, with the beginning of its message."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return
    for case in cases:
        for outcome in (*case.findall("failure"), *case.findall("error")):
            words = " ".join(outcome.get("message", "").split())
            yield f"{path.stem}: {case.get('classname')}::{case.get('name')}: {words}"[:_LINE]


def count_steps(steps: Iterable[str]) -> Counter[str]:
    """Return the number of steps by outcome; each is NAME=EXIT_CODE, or NAME=skipped."""
    outcomes = {"0": "passed", "skipped": "skipped"}
    return Counter(outcomes.get(step.rpartition("=")[2], "failed") for step in steps)


def main() -> int:
    """Print the sum and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="append", default=[], metavar="NAME=EXIT_CODE")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    lines = [line for path in options.files for line in failures(path)]
    print(*lines[:_LINES], sep="\n", end="\n" if lines else "")
    if len(lines) > _LINES:
        print(f"and {len(lines) - _LINES} more")
    total = sum((count_file(path) for path in options.files), count_steps(options.step))
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 0 if total["passed"] and not total["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
