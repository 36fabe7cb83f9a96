"""Pure: the recoveries that a job has counted, as histograms of each phase, from the text of its metrics."""

import math
import re

from unbroken_cli.sizing.spreads import Distribution, histogram
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Phase

METRIC = "unbroken_recovery_seconds"
_LINE = re.compile(METRIC + r"_bucket\{([^}]{1,300})\}\s+(\S{1,40})(?:\s+\d+)?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
MAX_LINES = 200_000
_BEYOND = 2.0
"""Where the last bucket is open, it is taken to end at so many times the highest bound."""


def measured_spreads(text: str, where: str) -> tuple[dict[str, Distribution], list[str]]:
    """Return spreads by phase, and what to know of them. Raises InputError for a job without recoveries.

    Histograms of several series are added: those of all jobs and rendezvous that the text has.
    """
    counts: dict[str, dict[float, float]] = {}
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise InputError(f"{where}: want at most {MAX_LINES} lines, got {len(lines)}; take those of {METRIC} alone")
    for line in lines:
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        labels = dict(_LABEL.findall(found[1]))
        bound, count = _number(labels.get("le", "")), _number(found[2])
        phase = labels.get("phase", "")
        if phase not in {word.value for word in Phase} or math.isnan(bound) or not 0 <= count <= 1e12:
            raise InputError(f"{where}: want buckets of {METRIC} by phase and le, got {line[:120]!r}")
        buckets = counts.setdefault(phase, {})
        buckets[bound] = buckets.get(bound, 0.0) + count
    if not any(max(buckets.values()) for buckets in counts.values()):
        raise InputError(f"{where}: has no recovery in {METRIC}; want a job that has recovered at least once")
    notes: list[str] = []
    spreads: dict[str, Distribution] = {}
    for phase in Phase:
        spread = _spread(phase.value, counts.get(phase.value, {}), where, notes)
        if spread is not None:
            spreads[phase.value] = spread
    least = min(int(max(counts[phase].values())) for phase in spreads)
    if least < 30:
        notes.append(f"{where}: only {least} recoveries are counted; what is rare is not among them")
    notes.append(
        f"{where}: costs of all rungs together, with the loading of checkpoints: first-progress ends with a step"
    )
    return spreads, notes


def _spread(phase: str, cumulative: dict[float, float], where: str, notes: list[str]) -> Distribution | None:
    bounds = sorted(cumulative)
    if not bounds or not cumulative[bounds[-1]]:
        notes.append(f"{where}: phase {phase} was never measured, and counts as 0 s")
        return None
    finite = [bound for bound in bounds if math.isfinite(bound)]
    if not finite or any(bound <= 0 for bound in finite):
        raise InputError(f"{where}: {METRIC} of phase {phase}: want bounds above 0, got {bounds[:5]}")
    counts, before = [], 0.0
    for bound in bounds:
        if cumulative[bound] < before:
            raise InputError(
                f"{where}: {METRIC} of phase {phase}: want counts that rise with le, got a fall at {bound:g}"
            )
        counts.append(cumulative[bound] - before)
        before = cumulative[bound]
    if len(bounds) > len(finite):
        if counts[-1]:
            share = counts[-1] / before
            notes.append(
                f"{where}: {share:.0%} of phase {phase} took over {finite[-1]:g} s, and count as up to twice that"
            )
        finite.append(finite[-1] * _BEYOND)
    return histogram(finite, counts)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
