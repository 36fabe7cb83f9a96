"""What checks of devices, links and the node say: one finding for each thing that is looked at."""

from dataclasses import dataclass

from unbroken_core.vocabulary.reasons import Word

MAX_FINDINGS = 64
"""Of one pod."""
STRAGGLERS = "stragglers"
"""The check that no watch makes: it needs all ranks."""
WAS_SLOW = "was-slow"
"""Its code of a worker that has no rank any more: it holds nobody up now."""
LOG_LINES = "log-lines"
"""What the agent makes of workers' lines, by the log rules of the job; the entity is the rule. No watch makes it."""
VERSIONS, DEVICES, MATMUL, LOOPBACK = (f"preflight-{name}" for name in ("versions", "devices", "matmul", "loopback"))
PREFLIGHT = (VERSIONS, DEVICES, MATMUL, LOOPBACK)
"""What a pod's preflight has found before its first process: told once, by its launcher. No watch makes them."""
PAIRS = "preflight-pairs"
"""What the coordinator makes of tests of pods with each other: of a pod, or of the link to the pod that is the entity.
No pod makes it."""

NOT_TOLD = "not-told"
"""The code of what a check cannot say."""
IN_PART = ".in-part"
"""Follows the name of a check of which a part is known. A name as a status has them, and none that a check may have."""
WATCH = "watch"
"""Of the watch itself: whether it runs."""


class Verdict(Word):
    """What a finding means; listed from the best to the worst. What was not looked at is neither."""

    UNKNOWN = "unknown"
    """Not checked: no library, field, path or answer. Never healthy, and never a fault."""
    OK = "ok"
    DEGRADED = "degraded"
    """Slower, or worn: it goes on."""
    SUSPECT = "suspect"
    """May be broken: ranks move if a second sign, or a second source, says so."""
    FATAL = "fatal"
    """Broken: no process can train on it."""

    @property
    def severity(self) -> int:
        """Rank among verdicts."""
        return _SEVERITY[self]


_SEVERITY: dict["Verdict", int] = {verdict: number for number, verdict in enumerate(Verdict)}


@dataclass(frozen=True)
class Finding:
    """What one check says of one thing."""

    check: str
    """Of a closed list where it is built in: gpu, gpu-events, ports, network, pcie, storage, memory, oom, clock; the
    coordinator's own: stragglers, PAIRS; the agent's: log-lines; of the preflight: PREFLIGHT."""
    entity: str
    """What was looked at: a GPU's UUID, an adapter's port, a path; "" for all that the check looks at."""
    verdict: Verdict
    code: str = ""
    """What was found, in one word: xid-79, link-down."""
    action: str = ""
    """What a person should do about it, in a few words."""
    message: str = ""
    """One line for people."""
    seen: int = 1
    """In how many of the last three samples it was seen; of events, how many there were lately; at most 3."""


STARTING = Finding(
    WATCH, "", Verdict.UNKNOWN, "starting", message="the watch on devices and links has said nothing yet"
)
"""What a watch sends alone, before it runs code of others: where it stays that, nothing is known."""


@dataclass(frozen=True)
class Health:
    """All that the checks of one pod say now; the newest counts. Of a check with nothing to say, one that is ok."""

    findings: tuple[Finding, ...]
    num_dropped: int = 0
    """Findings that were too many."""

    @property
    def worst(self) -> Verdict:
        """The worst verdict; unknown without any finding."""
        return max((finding.verdict for finding in self.findings), key=_SEVERITY.__getitem__, default=Verdict.UNKNOWN)


def bounded(findings: tuple[Finding, ...]) -> Health:
    """Return as many findings as are told, the worst of them, in a fixed order.

    Of each check the worst is told, and what it does not know: else one that says much would hide what others found,
    and that they could not look.
    """
    order = sorted(set(findings), key=lambda each: (-each.verdict.severity, each.check, each.entity, each.code))
    if len(order) <= MAX_FINDINGS:
        return Health(tuple(order))
    worst = {each.check: each for each in reversed(order)}
    silent = {each.check: each for each in reversed(order) if each.verdict is Verdict.UNKNOWN}
    kept = set(list(dict.fromkeys((*worst.values(), *silent.values(), *order)))[:MAX_FINDINGS])
    return Health(tuple(each for each in order if each in kept), len(order) - len(kept))


def is_news(before: Health | None, now: Health) -> bool:
    """Return whether anything but the words for people has changed."""
    return before is None or _essence(before) != _essence(now)


def _essence(health: Health) -> tuple[tuple[str, str, Verdict, str, int], ...]:
    return tuple((each.check, each.entity, each.verdict, each.code, each.seen) for each in health.findings)
