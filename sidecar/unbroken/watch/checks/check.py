"""What a check is, and what it says when it could not look."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from unbroken_core.vocabulary.findings import NOT_TOLD, Finding, Verdict

History = Any
"""What a check remembers between two samples; None before the first."""
Sample = Any
_MOST_ENTITY, _MOST_MESSAGE = 128, 300


@dataclass(frozen=True)
class Judgement:
    """What one sample means."""

    findings: tuple[Finding, ...]
    history: History


@dataclass(frozen=True)
class Check:
    """One check. `sample` raises NotCheckedError where it cannot look; `judge` is pure."""

    name: str
    period_s: float
    sample: Callable[[], Sample]
    judge: Callable[[History, Sample], Judgement]


def verdicts(check: str, found: Iterable[Finding], what: str) -> tuple[Finding, ...]:
    """Return the findings; that all is well where there is none but what was not checked, and `what` says was."""
    findings = tuple(found)
    if what and all(finding.verdict is Verdict.UNKNOWN for finding in findings):
        return (Finding(check, "", Verdict.OK, message=what), *findings)
    return findings


def quantity(num: int, what: str) -> str:
    """Return "1 device", "2 devices"; "" for none: of nothing it is not said that all is well."""
    return f"{num} {what}{'' if num == 1 else 's'}" if num > 0 else ""


def not_checked(check: str, why: str, code: str = NOT_TOLD) -> Finding:
    """Return that nothing can be said."""
    return Finding(check, "", Verdict.UNKNOWN, code, message=why[:300])


def clipped(finding: Finding) -> Finding:
    """Return a finding that the agent takes, whatever names a driver or a folder has."""
    if len(finding.entity) <= _MOST_ENTITY and len(finding.message) <= _MOST_MESSAGE:
        return finding
    return replace(finding, entity=finding.entity[:_MOST_ENTITY], message=finding.message[:_MOST_MESSAGE])
