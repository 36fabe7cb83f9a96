"""How checks of a host have ended, and what that means for a pod of a job. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unbroken.preflight.versions import KNOWN_BAD
from unbroken_core.vocabulary.findings import DEVICES, LOOPBACK, MATMUL, PREFLIGHT, VERSIONS, Finding, Verdict
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Word

NO_ANSWER = "no-answer"
"""Code of a check that has not ended."""
_MOST_MESSAGE = 300
_OUT_OF_MEMORY = "out of memory"


class CheckEnding(Word):
    """How a check has ended."""

    WELL = "well"
    WRONG = "wrong"
    """Wrong numbers, or devices that are missing."""
    MORE = "more"
    """More devices than there should be."""
    ERROR = "error"
    """torch says that it failed."""
    DEAD = "dead"
    """Its process has ended by itself, without a word."""
    KILLED = "killed"
    """Somebody has killed its process: Linux does where memory is short."""
    SILENT = "silent"
    """Not in time."""
    STARVED = "starved"
    """Not in time, and its processes have waited for a core: the host is busy."""


@dataclass(frozen=True)
class CheckOutcome:
    """How one check of one thing has ended."""

    check: str
    """devices, matmul or loopback."""
    entity: str
    ending: CheckEnding
    message: str
    """"" when all is well."""


_CHECKS = {"devices": DEVICES, "matmul": MATMUL, "loopback": LOOPBACK}
_VERDICTS = {
    CheckEnding.WELL: Verdict.OK,
    # A privileged container sees all devices of its node.
    CheckEnding.MORE: Verdict.OK,
    CheckEnding.WRONG: Verdict.FATAL,
    CheckEnding.DEAD: Verdict.SUSPECT,
    CheckEnding.KILLED: Verdict.UNKNOWN,
    CheckEnding.SILENT: Verdict.UNKNOWN,
    CheckEnding.STARVED: Verdict.UNKNOWN,
}


def findings_of(outcomes: Iterable[CheckOutcome], versions: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return what the outcomes mean for the pod; one finding for all that is well of a check.

    `versions`: as far as they are known.
    """
    found: list[Finding] = []
    num_well: dict[str, int] = {}
    for outcome in outcomes:
        check, verdict = _CHECKS[outcome.check], _verdict(outcome)
        if verdict is Verdict.OK:
            num_well[check] = num_well.get(check, 0) + 1
            continue
        code = NO_ANSWER if outcome.ending in (CheckEnding.SILENT, CheckEnding.STARVED) else ""
        found.append(Finding(check, outcome.entity, verdict, code, message=outcome.message[:_MOST_MESSAGE]))
    well = [Finding(check, "", Verdict.OK, message=f"{counted(num, 'test')} passed") for check, num in num_well.items()]
    return (*found, *well, *_of_versions(versions))


def untold(findings: Iterable[Finding], why: str = "") -> tuple[Finding, ...]:
    """Return the findings, and that nothing is known of the checks of which they say nothing; `why`: what is said."""
    told = tuple(findings)
    checks = {finding.check for finding in told}
    missing = (check for check in PREFLIGHT if check not in checks)
    return (*told, *(Finding(check, "", Verdict.UNKNOWN, NO_ANSWER, message=why) for check in missing))


def _verdict(outcome: CheckOutcome) -> Verdict:
    if outcome.ending is not CheckEnding.ERROR:
        return _VERDICTS[outcome.ending]
    if _OUT_OF_MEMORY in outcome.message.lower():
        # Another process has it: that says nothing of the device.
        return Verdict.UNKNOWN
    # An error of a collective may be how the pod is set up, such as too small a /dev/shm.
    return Verdict.FATAL if outcome.entity.startswith("cuda") else Verdict.SUSPECT


def _of_versions(versions: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return what is known of them. No pod is better off than another one: the image brings them."""
    if not versions:
        return ()
    bad = tuple(
        Finding(
            VERSIONS, f"{each.name} {versions[each.name]}", Verdict.DEGRADED, "", "use another image", each.why[:300]
        )
        for each in KNOWN_BAD
        if each.matches(versions)
    )
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return bad or (Finding(VERSIONS, "", Verdict.OK, message=text[:_MOST_MESSAGE]),)
