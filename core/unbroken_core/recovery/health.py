"""Whom findings speak against, and whether ranks should move because of it. Pure.

a fatal finding                                    a strike
a suspect one, seen in two of three samples        a strike
a straggler, where the job moves them              a strike
two suspect ones of different checks               a strike
degraded, unknown, what the script causes          none

links of two pods in one domain                    the domain is blamed, and no pod of it
strikes against two pods within BREAKER_S          the breaker opens: they may all be false, so none is believed
MAX_BLAMED within BUDGET_S                         nobody is blamed any more: a trainer can forge findings in each pod
a blame in vain: the spare is lost meanwhile, or
a fault ends the iteration that was to be left for
a suspicion                                        does not count there; after MAX_BLAMED of them within BREAKER_S
                                                   nobody is blamed: each makes all ranks wait for a common step

a fatal finding of the preflight                   a strike of its own kind, which opens and holds nothing above
such strikes against more than half of the pods     none is believed: pods share an image, which may be at fault
one that was believed within BUDGET_S              no other one is
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from unbroken_core.vocabulary.findings import LOG_LINES, PAIRS, PREFLIGHT, STRAGGLERS, Finding, Health, Verdict
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause

BREAKER_S = 300.0
MAX_BLAMED = 4
BUDGET_S = 3600.0
"""So many pods of one job are blamed in this time. In a fleet of 16,384 GPUs five a day break."""
SWITCH_S = 5.0
"""For so long a link that is down waits for others of its domain, before its own pod is blamed."""
LINK_CHECKS = frozenset(("ports", "network"))
"""Whose findings may be those of a switch."""
_CONFIRMED = 2


@dataclass(frozen=True)
class Strike:
    """What speaks against one pod."""

    finding: Finding
    is_fatal: bool
    is_link: bool
    """Whether only links do: what is wrong may be a switch."""
    is_slow: bool = False
    """Whether it is a straggler, with no device that is known to be broken."""

    @property
    def cause(self) -> Cause:
        """Why its ranks move, if they do."""
        return Cause.STRAGGLER if self.is_slow else Cause.DEVICE_FAULT

    @property
    def text(self) -> str:
        """The finding, for people."""
        return finding_text(self.finding)


@dataclass(frozen=True)
class Blame:
    """Who is blamed."""

    blamed: Mapping[str, Strike]
    """By uid of a pod."""
    domains: tuple[str, ...] = ()
    """Domains that are blamed in place of their pods."""
    held: str = ""
    """Why nobody is blamed although something speaks against them, for people; "" when nothing does."""


def finding_text(finding: Finding) -> str:
    """Return a finding in one line: what, where, how bad, and what was said."""
    if finding.check == LOG_LINES:
        return f"log rule {finding.entity}: {finding.message}"
    where = f" on {finding.entity}" if finding.entity else ""
    what = finding.code or finding.check
    if finding.code.startswith("probe-"):
        what = f"{finding.code} of check {finding.check}"  # Such a code is the same for all of them.
    return f"{what}{where} is {finding.verdict}" + (f": {finding.message}" if finding.message else "")


def strike_of(health: Health | None) -> Strike | None:
    """Return what speaks against a pod by its own findings; None: nothing, or not enough."""
    findings = () if health is None else health.findings
    fatal = [each for each in findings if each.verdict is Verdict.FATAL]
    suspect = [each for each in findings if each.verdict is Verdict.SUSPECT]
    if fatal:
        # An event says more than what follows from it.
        return Strike(min(fatal, key=lambda each: (not each.code.startswith("xid-"), each.entity)), True, False)
    confirmed = [each for each in suspect if each.seen >= _CONFIRMED]
    if not confirmed and len({each.check for each in suspect}) < _CONFIRMED:
        return None
    slow = [each for each in confirmed if each.check == STRAGGLERS]
    if slow:
        return Strike(slow[0], False, False, True)
    is_link = all(each.check in LINK_CHECKS for each in suspect)
    return Strike((confirmed or suspect)[0], False, is_link)


def preflight_strike_of(findings: Iterable[Finding]) -> Strike | None:
    """Return what the preflight of a pod says against it; None: nothing, or not for sure."""
    fatal = [each for each in findings if each.check in (*PREFLIGHT, PAIRS) and each.verdict is Verdict.FATAL]
    return Strike(min(fatal, key=lambda each: (each.check, each.entity)), True, False) if fatal else None


def why_spent(num_lately: int, num_vain: int) -> str:
    """Return why nobody may be blamed for now, for people; "" when somebody may.

    `num_lately`: how often a pod was blamed within BUDGET_S, but for those in vain. `num_vain`: how often one was
    within BREAKER_S, and kept its ranks: nobody could take them any more, or something else ended the iteration.
    """
    if num_lately >= MAX_BLAMED:
        return f"pods were blamed for findings {num_lately} times within {BUDGET_S / 60:.0f} min: no more for now"
    if num_vain >= MAX_BLAMED:
        text = f"ranks were to leave a pod {num_vain} times within {BREAKER_S / 60:.0f} min"
        return f"{text}, and did not: no more for now"
    return ""


def assess_preflights(
    failed: Mapping[str, Strike],
    num_told: int,
    believed: Collection[str],
    recent: Collection[str],
    spent: str = "",
) -> Blame:
    """Return who of the pods whose preflight has failed may be blamed: one of them, and no other one within BUDGET_S.

    `num_told`: how many pods have said how their preflight went. `believed` and `spent` as in `assess`. `recent`: pods
    that were blamed for it within BUDGET_S.
    """
    kept = {uid: failed[uid] for uid in believed if uid in failed}
    num_fresh = len(failed) - len(kept)
    minutes = f"{BUDGET_S / 60:.0f} min"
    if num_fresh and len(failed) > 1 and 2 * len(failed) > num_told:
        text = f"the preflight of {len(failed)} of {counted(num_told, 'pod')} has failed"
        return Blame(kept, held=f"{text}, which may be a false alarm: no ranks move for it, and no pod is replaced")
    if num_fresh and recent:
        more = f"the preflight of {counted(num_fresh, 'more pod')} has failed"
        return Blame(kept, held=f"{more} within {minutes} after one had to move: no other one does for it")
    if num_fresh and spent:
        return Blame(kept, held=spent)
    return Blame({**kept, **failed})


def assess(
    strikes: Mapping[str, Strike],
    domains: Mapping[str, str],
    believed: Collection[str],
    recent: Collection[str],
    spent: str = "",
) -> Blame:
    """Return who is blamed. Costs O(links): a false alarm of a whole fleet is judged anew with each that joins in.

    `domains`: the innermost domain of each pod whose links only speak against it, "" where there is none or it is not
    known. `believed`: pods that are blamed already, and stay so while something speaks against them. `recent`: pods
    that were blamed not long ago. `spent`: why nobody else may be blamed for now; "" when somebody may.
    """
    shared: dict[str, list[str]] = {}
    for uid, domain in domains.items():
        if domain and uid in strikes and strikes[uid].is_link:
            shared.setdefault(domain, []).append(uid)
    of_domain = {domain: uids for domain, uids in shared.items() if len(uids) >= _CONFIRMED}
    excused = {uid for uids in of_domain.values() for uid in uids}
    kept = {uid: strikes[uid] for uid in believed if uid in strikes}
    known = kept.keys() | excused
    num_fresh = len(strikes) - len(known)
    num = num_fresh + sum(uid in known or uid not in strikes for uid in recent)
    held = ""
    if of_domain:
        named = ", ".join(f"{domain} ({counted(len(uids), 'pod')})" for domain, uids in sorted(of_domain.items())[:4])
        held = f"links of several pods are down or lossy, look at what they share: {named}"
    if num_fresh and num > 1:
        text = (
            f"findings speak against {counted(num, 'pod')} within {BREAKER_S / 60:.0f} min, which may be a false alarm"
        )
        return Blame(kept, tuple(sorted(of_domain)), "; ".join(filter(None, (held, f"{text}: no ranks move for it"))))
    if num_fresh and spent:
        return Blame(kept, tuple(sorted(of_domain)), "; ".join(filter(None, (held, spent))))
    if num_fresh:
        kept.update((uid, strike) for uid, strike in strikes.items() if uid not in known)
    return Blame(kept, tuple(sorted(of_domain)), held)
