"""What `unbroken inject` lets the watch find: as the check itself would say it, and said to be on purpose. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from unbroken.faults.findings import OrderedFinding
from unbroken.watch.checks.check import Judgement
from unbroken.watch.checks.gpu import XidSample, judge_xids
from unbroken.watch.checks.ports import NETWORK
from unbroken_core.pod.fault_orders import FaultOrder
from unbroken_core.vocabulary.findings import Finding, Verdict

INJECTED = "on_purpose"
"""No probe can have this name: it has an underscore."""
PERIOD_S = 1.0
_MOST = 3
_ENTITY = "injected"


def judge_injected(history: Mapping[str, int] | None, sample: Sequence[OrderedFinding]) -> Judgement:
    """Return the findings of all orders; they have been seen once more."""
    before = history or {}
    looks = {each.order.id: min(before.get(each.order.id, 0) + 1, _MOST) for each in sample}
    found = [
        replace(finding, message=f"{finding.message} (on purpose, by `unbroken inject`)")
        for each in sample
        for finding in _findings(each.order, looks[each.order.id])
    ]
    return Judgement(tuple(found), looks)


def _findings(order: FaultOrder, seen: int) -> Iterator[Finding]:
    if order.kind == "xid":
        yield from judge_xids(None, XidSample([(_ENTITY, order.code)], 0.0)).findings
    elif order.kind == "link-down":
        text = "its link is down"
        yield Finding(NETWORK, _ENTITY, Verdict.SUSPECT, "link-down", "look at cable, switch and adapter", text, seen)
    else:
        text = "the probe says no more"
        yield Finding(
            order.check, "", Verdict(order.verdict), "probe-failed", "see what the probe looks at", text, seen
        )
