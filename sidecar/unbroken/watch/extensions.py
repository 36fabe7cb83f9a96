"""Checks of other packages: entry points of the group `unbroken.health`.

Each names a `unbroken.watch.checks.check.Check`, or a function without arguments that returns one. It runs in the
watch's process, in a lane of its own: one that raises or hangs is unknown. What must not be trusted so far is a probe.
"""

from importlib.metadata import EntryPoint, entry_points

from unbroken.watch.checks.check import Check, not_checked
from unbroken.watch.checks.probe import is_free
from unbroken_core.vocabulary.findings import Finding

GROUP = "unbroken.health"
MAX_EXTENSIONS = 8
_LEAST_PERIOD_S = 1.0


def load_extensions() -> tuple[list[Check], list[Finding]]:
    """Return the checks, and a finding for each that cannot be loaded."""
    checks: list[Check] = []
    refused: list[Finding] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)[:MAX_EXTENSIONS]:
        try:
            checks.append(_load(point))
        except (Exception, SystemExit) as error:  # Whatever its code does, the other checks go on.
            refused.append(not_checked("extensions", f"{point.name[:60]}: {error!r}", "not-loaded"))
    return checks, refused


def _load(point: EntryPoint) -> Check:
    found = point.load()
    check = found if isinstance(found, Check) else found()
    if not isinstance(check, Check):
        raise TypeError(f"want a Check, got {type(check).__name__}")
    if not is_free(check.name) or check.period_s < _LEAST_PERIOD_S:
        raise ValueError(f"want a free name and a period of {_LEAST_PERIOD_S:g} s or more, got {check.name[:40]!r}")
    return check
