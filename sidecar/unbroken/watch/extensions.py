"""Checks of other packages: entry points of the group `unbroken.health`.

Each names a `unbroken.watch.checks.check.Check`, or a function without arguments that returns one. It runs in the
watch's process, in a lane of its own: one that raises or hangs is unknown, and likewise one that says what no agent
takes. They are loaded in a lane as well, as an import may hang. What must not be trusted so far is a probe.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Final

from unbroken.watch.checks.check import Check, History, Judgement, Sample, clipped, not_checked
from unbroken.watch.checks.probe import is_free
from unbroken.watch.errors import words_of
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.findings import MAX_FINDINGS, Finding, Health

GROUP: Final = "unbroken.health"
EXTENSIONS: Final = "extensions"
MAX_EXTENSIONS: Final = 8
_LEAST_PERIOD_S = 1.0
_PERIOD_S = 3600.0


class Extensions:
    """Loads them, once: a check like others, which says of each that cannot be loaded why."""

    def __init__(self, taken: Collection[str], add: Callable[[Check], None]) -> None:
        """`taken`: names of the job's probes. `add`: begins with a check."""
        self._taken, self._add = set(taken), add
        self._refused: tuple[Finding, ...] | None = None

    def check(self) -> Check:
        """Return what loads them when it is sampled for the first time."""
        return Check(EXTENSIONS, _PERIOD_S, self._sample, lambda _history, sample: Judgement(sample, None))

    def _sample(self) -> tuple[Finding, ...]:
        if self._refused is None:
            self._refused = tuple(self._load())
        return self._refused

    def _load(self) -> list[Finding]:
        refused: list[Finding] = []
        points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
        for point in points[:MAX_EXTENSIONS]:
            try:
                check = _load(point, self._taken)
            except BaseException as error:  # Whatever its code does, the other checks go on.
                refused.append(_not_loaded(f"{point.name[:60]}: {words_of(error)}"))
            else:
                self._taken.add(check.name)
                self._add(check)
        if len(points) > MAX_EXTENSIONS:
            names = ", ".join(point.name[:30] for point in points[MAX_EXTENSIONS : 2 * MAX_EXTENSIONS])
            refused.append(_not_loaded(f"want at most {MAX_EXTENSIONS}, got {len(points)}, among them {names}"))
        return refused


def _not_loaded(why: str) -> Finding:
    return not_checked(EXTENSIONS, why, "not-loaded")


def _load(point: EntryPoint, taken: Collection[str]) -> Check:
    found = point.load()
    check = found if isinstance(found, Check) else found()
    if not isinstance(check, Check):
        raise TypeError(f"want a Check, got {type(check).__name__}")
    # Not a number is no period, either.
    if not is_free(check.name) or check.name in taken or not check.period_s >= _LEAST_PERIOD_S:
        raise ValueError(f"want a free name and a period of {_LEAST_PERIOD_S:g} s or more, got {check.name[:40]!r}")
    return replace(check, judge=lambda history, sample: _judge(check, history, sample))


def _judge(check: Check, history: History, sample: Sample) -> Judgement:
    """Return what a check of others says, as the agent reads it. Raises ValueError for what an agent does not take: it
    would take nothing else of this watch, either."""
    judgement = check.judge(history, sample)
    findings = tuple(map(clipped, islice(judgement.findings, MAX_FINDINGS + 1)))
    if len(findings) > MAX_FINDINGS or any(each.check != check.name for each in findings):
        raise ValueError(f"want at most {MAX_FINDINGS} findings, all of the check {check.name}")
    return Judgement(wire.decode(wire.encode(Health(findings)), Health).findings, judgement.history)
