"""`python -m unbroken.faults ORDER [LOCAL_RANK]`, run in the trainer's container: carries out one order.

Prints what is done (exit code 0), or why nothing is (2).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.faults.disk import fill_disk
from unbroken.faults.findings import add_finding
from unbroken.faults.partition import part
from unbroken.faults.worker_socket import deliver
from unbroken_core.conventions.environment import needed
from unbroken_core.pod.fault_orders import ALLOW, FINDINGS, WORKER, is_allowed, read_order
from unbroken_core.vocabulary.errors import InputError


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit code."""
    try:
        print(obey(arguments, environment), flush=True)
    except InputError as error:
        print(f"unbroken.faults: {error}", file=sys.stderr)
        return 2
    return 0


def obey(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what is done. Raises InputError with why nothing is."""
    if not 1 <= len(arguments) <= 2:
        raise InputError(f"want ORDER [LOCAL_RANK], got {len(arguments)} arguments")
    order = read_order(arguments[0])
    if not is_allowed(environment):
        raise InputError(
            f"{order.kind}: this pod allows no faults; want {ALLOW}=1 in the env of spec.template's first container, "
            "or `unbroken run --allow-faults`"
        )
    folder = Path(needed(environment, "UNBROKEN_DIR"))
    if order.kind in WORKER:
        return deliver(folder, _local_rank(arguments), order)
    if order.kind in FINDINGS:
        if environment.get("UNBROKEN_WATCH") != "1":
            raise InputError(
                f"{order.kind}: this pod has no watch; want health.mode Observe or Act (unbroken run --health)"
            )
        return add_finding(folder, order)
    if order.kind == "partition":
        return part(folder, order, needed(environment, "UNBROKEN_POD_IP"))
    return fill_disk(folder, order)


def _local_rank(arguments: Sequence[str]) -> int:
    text = arguments[1] if len(arguments) > 1 else ""
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise InputError(f"local rank: want a number, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
