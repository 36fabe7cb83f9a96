"""`python -m unbroken.preflight.in_pod`: the checks of one pod of a job, before its first process.

The pod's launcher starts it, reads what it says, one Health a line, each with all that is known by then, and kills it
when its time is over. So what it has found so far counts, whatever hangs. With --pairs it goes on with tests with other
pods (`pairs_in_pod`), as the launcher orders on its standard input.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence

from unbroken.preflight.outcomes import CheckOutcome, findings_of, untold
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PairState
from unbroken_core.vocabulary.findings import Finding, Health, bounded

_PARTS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit code says nothing."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.preflight.in_pod", description=__doc__)
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS", help="for all checks together")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs that the pod should have")
    parser.add_argument("--pairs", metavar="ADDRESS", help="test with other pods after that, which reach this one here")
    parser.add_argument("--backend", choices=("auto", "gloo"), default="auto", help="NCCL where both pods have GPUs")
    options = parser.parse_args(arguments)
    until_s = time.monotonic() + options.limit
    descriptor = _take_output()
    _tell(descriptor, untold(()))
    try:
        from unbroken.preflight.own_checks import parts  # noqa: PLC0415 - whatever importing torch does is bounded here
    except Exception as error:  # Whatever a broken image makes of it.
        first = str(error).strip().partition("\n")[0]
        _tell(descriptor, untold((), f"torch cannot be imported: {type(error).__name__}: {first}"[:300]))
        return 0
    outcomes: list[CheckOutcome] = []
    gpus = 0
    for part in parts(options.devices, lambda num_left: max(until_s - time.monotonic(), 0.0) / min(num_left, _PARTS)):
        outcomes += part.outcomes
        gpus = max(gpus, part.gpus)
        _tell(descriptor, untold(findings_of(outcomes, part.versions)))
    if options.pairs:
        from unbroken.preflight.pairs_in_pod import take_orders  # noqa: PLC0415 - as above

        take_orders(0, options.pairs, gpus if options.backend == "auto" else 0, functools.partial(_say, descriptor))
    return 0


def _take_output() -> int:
    """Return where findings go, and keep what libraries print out of it."""
    descriptor = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    return descriptor


def _tell(descriptor: int, findings: tuple[Finding, ...]) -> None:
    _say(descriptor, bounded(findings))


def _say(descriptor: int, word: Health | PairState) -> None:
    data = memoryview(wire.encode(word).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main())
