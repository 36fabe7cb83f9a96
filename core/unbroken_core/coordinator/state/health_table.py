"""What the pods' watches have found, as the coordinator knows it, and whom it believes to be broken."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken_core.recovery.health import Blame, Strike, preflight_strike_of, strike_of
from unbroken_core.vocabulary.findings import IN_PART, NOT_TOLD, PAIRS, PREFLIGHT, STRAGGLERS, Finding, Health, Verdict


class Takers(NamedTuple):
    """On whom it rests that a pod may be blamed."""

    spares: tuple[str, ...]
    """Uids of those that nothing speaks against and that can get ranks now."""
    num_kept: int
    """How many pods with ranks keep them."""


@dataclass
class HealthTable:
    """One job's. Changed by verbs only; each costs O(findings of one pod)."""

    told: dict[str, Health] = field(default_factory=dict)
    """What watches say, by uid of a pod."""
    slow: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    """Stragglers, likewise."""
    preflights: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    """What pods have found of themselves before their first process, likewise."""
    pairs: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    """What tests of pods with each other have found, likewise."""
    by_uid: dict[str, Health] = field(default_factory=dict)
    """All four."""
    lines: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    """What lines of workers say is slow, by uid of a pod. They speak against nobody, and make no spare the last one."""
    strikes: dict[str, Strike] = field(default_factory=dict)
    """By uid of the pods that something speaks against."""
    links: dict[str, Strike] = field(default_factory=dict)
    """Those of them that may be a switch's."""
    failed: dict[str, Strike] = field(default_factory=dict)
    """By uid of the pods that their preflight speaks against, in a job that acts on it. No strikes: they are judged
    apart, so that a false alarm of all pods does not hold up what watches find."""
    since_s: dict[str, float] = field(default_factory=dict)
    """Since when, likewise."""
    unchecked: "Counter[str]" = field(default_factory=Counter)
    """How many pods tell nothing, by check."""
    blamed_s: dict[str, float] = field(default_factory=dict)
    """When each pod was blamed last."""
    blames_s: list[float] = field(default_factory=list)
    """When any was, lately, but for those in vain."""
    vain_s: list[float] = field(default_factory=list)
    """When blames were taken back, lately, since nobody could take the ranks any more."""
    failed_s: dict[str, float] = field(default_factory=dict)
    """When each pod was blamed last for its preflight."""
    unmovable_s: dict[str, float] = field(default_factory=dict)
    """When it was last seen that the ranks of a pod have no place to go."""
    takers: dict[str, Takers] = field(default_factory=dict)
    """On whom each blame rests, by uid of the pod that is blamed."""
    worn: dict[str, None] = field(default_factory=dict)
    """Pods with a finding that is worse than ok."""
    blame: Blame = field(default_factory=lambda: Blame({}))
    num_changes: int = 0
    basis: tuple[object, ...] | None = None
    """On what it was judged last; None: not yet."""
    judged_s: float = -math.inf
    """When."""
    due_s: float = math.inf
    """Until when that holds, if nothing of it changes."""

    def note(self, uid: str, health: Health | None, now_s: float) -> None:
        """Take what the watch of a pod says; None: there is none, or the pod is gone."""
        if self.told.get(uid) == health:
            return
        self.told.pop(uid, None)
        if health is not None:
            self.told[uid] = health
        self._merge(uid, now_s)

    def note_slow(self, uid: str, findings: tuple[Finding, ...], now_s: float) -> None:
        """Take which workers of a pod hold all others up; none: no one does, or the pod is gone."""
        if self.slow.get(uid, ()) == findings:
            return
        self.slow.pop(uid, None)
        if findings:
            self.slow[uid] = findings
        self._merge(uid, now_s)

    def note_preflight(self, uid: str, findings: tuple[Finding, ...], now_s: float, *, may_fail: bool) -> None:
        """Take what a pod has found of itself before its first process; none: nothing, or the pod is gone.

        `may_fail`: whether the job acts on it.
        """
        if self.preflights.get(uid, ()) == findings:
            return
        self.preflights.pop(uid, None)
        if findings:
            self.preflights[uid] = findings
        self._note_failed(uid, may_fail)
        self._merge(uid, now_s)

    def note_pairs(self, uid: str, findings: tuple[Finding, ...], now_s: float, *, may_fail: bool) -> None:
        """Take what tests with other pods have found of one; none: nothing, or the pod is gone."""
        if self.pairs.get(uid, ()) == findings:
            return
        self.pairs.pop(uid, None)
        if findings:
            self.pairs[uid] = findings
        self._note_failed(uid, may_fail)
        self._merge(uid, now_s)

    def _note_failed(self, uid: str, may_fail: bool) -> None:
        self.failed.pop(uid, None)
        found = (*self.preflights.get(uid, ()), *self.pairs.get(uid, ()))
        strike = preflight_strike_of(found) if may_fail else None
        if strike is not None:
            self.failed[uid] = strike

    def note_lines(self, uid: str, findings: tuple[Finding, ...]) -> None:
        """Take what lines of a pod's workers say is slow; none: nothing, or the pod is gone."""
        if self.lines.get(uid, ()) == findings:
            return
        self.num_changes += 1
        self.lines.pop(uid, None)
        if findings:
            self.lines[uid] = findings

    def _merge(self, uid: str, now_s: float) -> None:
        """Note what is known of a pod."""
        told, slow = self.told.get(uid), self.slow.get(uid, ())
        own = (*self.preflights.get(uid, ()), *self.pairs.get(uid, ()))
        if slow or (told is not None and any(each.check == STRAGGLERS for each in told.findings)):
            # No watch can know one.
            others = () if told is None else tuple(each for each in told.findings if each.check != STRAGGLERS)
            watched: Health | None = Health((*slow, *others))
        else:
            watched = told
        health = Health((*own, *(() if watched is None else watched.findings))) if own else watched
        self.num_changes += 1
        self.unchecked.subtract(_unchecked(self.by_uid.pop(uid, None)))
        self.unchecked += Counter()  # Drops what is at zero.
        self.strikes.pop(uid, None)
        self.links.pop(uid, None)
        self.worn.pop(uid, None)
        since_s = self.since_s.pop(uid, now_s)
        if health is None:
            return
        self.by_uid[uid] = health
        self.unchecked.update(_unchecked(health))
        strike = strike_of(watched)
        if strike is not None:
            self.strikes[uid], self.since_s[uid] = strike, since_s
            if strike.is_link:
                self.links[uid] = strike
        if health.worst.severity > Verdict.OK.severity:
            self.worn[uid] = None

    def give_back(self, uid: str, now_s: float) -> None:
        """Take the blame of a pod out of the budget, since nobody could take its ranks any more; it may come again."""
        at_s = max(self.blamed_s.get(uid, -math.inf), self.failed_s.pop(uid, -math.inf))
        if at_s in self.blames_s:
            self.blames_s.remove(at_s)
        self.vain_s.append(now_s)

    def is_worn(self, uid: str) -> bool:
        """Return whether a pod's watch, or the pace of its workers, tells of more than a preflight would."""
        found = self.by_uid[uid].findings
        own = (*PREFLIGHT, PAIRS)
        return any(each.check not in own and each.verdict.severity > Verdict.OK.severity for each in found)

    def is_doubted(self, uid: str) -> bool:
        """Return whether something speaks against a pod."""
        return uid in self.strikes or uid in self.failed

    def is_suspected(self, uid: str) -> bool:
        """Return whether no more than a suspicion speaks against a pod."""
        strike = None if uid in self.failed else self.strikes.get(uid)
        return strike is not None and not strike.is_fatal

    @property
    def doubts(self) -> bool:
        """Whether anything speaks against any pod."""
        return bool(self.strikes or self.failed)

    @property
    def num_telling(self) -> int:
        """How many pods have told anything of themselves."""
        return len(self.told.keys() | self.preflights.keys())

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Yield what is wrong, with the pod's uid."""
        for uid in self.worn:
            for finding in self.by_uid[uid].findings:
                if finding.verdict.severity > Verdict.OK.severity:
                    yield uid, finding
        for uid, lines in self.lines.items():
            for finding in lines:
                yield uid, finding


def _unchecked(health: Health | None) -> set[str]:
    """Return the checks of which nothing is known at all, and those that say themselves that they know a part."""
    findings = () if health is None else health.findings
    told = {each.check for each in findings if each.verdict is not Verdict.UNKNOWN}
    silent = {each.check for each in findings if each.verdict is Verdict.UNKNOWN and each.code == NOT_TOLD}
    return ({each.check for each in findings} - told) | {check + IN_PART for check in silent & told}
