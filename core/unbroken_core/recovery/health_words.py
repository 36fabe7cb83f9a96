"""What the watches of all pods say, as sentences: the operator writes them into conditions, and the command line says
the same of a job whose rendezvous it asks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken_core.protocol.messages import HealthStatus, PodFinding
from unbroken_core.recovery.health import finding_text
from unbroken_core.vocabulary.findings import IN_PART, LOG_LINES, STRAGGLERS, WAS_SLOW, Verdict
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Reason

_SHOWN = 3
_MAX_CHECKS = 5
_SLOW = (STRAGGLERS, LOG_LINES)
_FAULTS = (Verdict.SUSPECT, Verdict.FATAL)


@dataclass(frozen=True)
class Saying:
    """What a condition says."""

    is_true: bool | None
    """None: nobody has told."""
    reason: Reason
    message: str


def nodes_healthy(health: HealthStatus | None) -> Saying:
    """Say what was found, once a watch has said anything. What was not checked is never part of what is well."""
    if health is None or not health.num_pods:
        text = (
            "GPUs, links and nodes are not looked at, as health.mode is Off (`unbroken run` without --health); "
            "or no pod's watch has said anything so far"
        )
        return Saying(None, Reason.HEALTH_NOT_CHECKED, text)
    found = [item for item in health.findings if item.finding.check not in _SLOW]
    num_untold = health.num_findings - len(health.findings)
    faults = [item for item in found if item.finding.verdict in _FAULTS]
    worn = [item for item in found if item.finding.verdict is Verdict.DEGRADED]
    unchecked = _unchecked(health)
    if faults:
        return Saying(False, Reason.DEVICES_FAULTY, _joined(_shown(faults, num_untold), health.held, unchecked))
    worn_text = f"worn: {_shown(worn, num_untold)}" if worn else ""
    return Saying(True, Reason.NODES_HEALTHY, _joined("nothing broken was found", worn_text, unchecked))


def straggling(health: HealthStatus | None) -> Saying:
    """Say which ranks hold all others up, once workers have said how busy they are, or log rules what is slow."""
    told = [] if health is None else [item for item in health.findings if item.finding.check in _SLOW]
    slow = [item for item in told if item.finding.code != WAS_SLOW]
    spared = [item for item in told if item.finding.code == WAS_SLOW]
    last_choice = f"the last choice for ranks: {_shown(spared)}" if spared else ""
    if health is not None and slow:
        is_held = any(item.finding.verdict in _FAULTS for item in slow)
        return Saying(True, Reason.RANKS_SLOW, _joined(_shown(slow), health.held if is_held else "", last_choice))
    if health is not None and health.num_paced:
        text = f"no rank was busy longer than usual in its stage, of {counted(health.num_paced, 'rank')} in a window"
        return Saying(False, Reason.PACE_EVEN, _joined(text, last_choice))
    text = (
        "no worker says how busy it is: health.stragglers.mode is Off, the iteration is young, or the script cannot be "
        "measured (docs/health.md)"
    )
    return Saying(None, Reason.PACE_NOT_MEASURED, _joined(text, last_choice))


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _shown(found: Sequence[PodFinding], num_untold: int = 0) -> str:
    texts = [f"{item.pod} on node {item.node}: {finding_text(item.finding)}" for item in found[:_SHOWN]]
    rest = len(found) - _SHOWN + max(num_untold, 0)
    return "; ".join(texts) + (f"; and {counted(rest, 'more finding')}" if rest > 0 else "")


def _unchecked(health: HealthStatus) -> str:
    silent = dict.fromkeys(check for check, num_pods in health.unchecked if num_pods > 0)
    # Not everywhere is said of one that knows a part in one pod, and nothing in another.
    names = [
        f"{check.removesuffix(IN_PART)} (in part)" if check.endswith(IN_PART) else check
        for check in silent
        if check.removesuffix(IN_PART) not in silent or not check.endswith(IN_PART)
    ]
    rest = len(names) - _MAX_CHECKS
    shown = ", ".join(names[:_MAX_CHECKS]) + (f" and {rest} more" if rest > 0 else "")
    return f"not checked everywhere: {shown}" if names else ""
