"""What the job's log rules make of the lines that workers print, as the launcher tells them. Pure.

    a line matched          of a rule without times: in the iteration that runs; of a rule that stops the job: ever
    none has matched        for `within_s` since the worker entered the iteration, by what the launcher looked at
    none has matched again  for `every_s`, likewise, once one of this iteration has

A launcher that gets no processor says nothing, and then no line is missed: only `Lines.looked_s` counts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unbroken.agent.decisions.place import LocalPlace
from unbroken_core.conventions.printable import printable
from unbroken_core.pod.pod_messages import LineMark, Lines
from unbroken_core.protocol.log_rules.rules import LogRanks, LogRule, LogVerdict
from unbroken_core.protocol.messages import Fault, WorkerState
from unbroken_core.vocabulary.findings import LOG_LINES, Finding, Verdict
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

SLOW_S = 600.0
"""So long a line that says that something is slow counts."""
_SLACK_S = 0.5
"""Marks are told a moment later than they are made."""
_ORDER = (LogVerdict.FATAL_STOP, LogVerdict.FATAL_RESTART, LogVerdict.HANG, LogVerdict.SLOW)
_INSIDE = (WorkerPhase.RUNNING,)

_Stay = tuple[int, int]
"""Incarnation and iteration of a worker."""


@dataclass(frozen=True)
class _Entry:
    """A worker's stay in one iteration, as this agent saw it."""

    stay: _Stay
    since_s: float
    """When it entered; -inf: before this agent was there."""
    expects_from_s: float
    """From when on lines are expected."""


class LogLines:
    """One pod's. All times are CLOCK_MONOTONIC of the host."""

    def __init__(self, rules: Sequence[LogRule], earlier_iteration: int) -> None:
        """`earlier_iteration`: workers may be in it since before this agent was started; -1: in none."""
        self._rules = sorted(rules, key=lambda rule: _ORDER.index(rule.verdict))
        self._stops = {rule.name for rule in rules if rule.verdict is LogVerdict.FATAL_STOP}
        self._earlier = earlier_iteration
        self._entries: dict[int, _Entry] = {}
        self._marks: dict[tuple[int, int, str], LineMark] = {}
        self._handled: dict[tuple[int, int, str], int] = {}
        """Up to which mark of a process a rule has spoken, or had nothing to say."""
        self._overdue: dict[tuple[int, str], tuple[_Stay, int]] = {}
        """Where a missing line was told already: the stay, and the mark before it."""
        self._slow: dict[tuple[int, str], tuple[float, Finding]] = {}
        """Until when each finding counts, by local rank and rule."""
        self.num_skipped = 0
        """Bytes of output that the launcher has passed over."""
        self.num_spoken = dict.fromkeys((rule.name for rule in rules), 0)
        """How often each rule has spoken."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is slow, by the rules: one for each, of the rank that it spoke of first."""
        by_rule: dict[str, Finding] = {}
        for _until_s, finding in self._slow.values():
            by_rule.setdefault(finding.entity, finding)
        return tuple(by_rule.values())

    def expire(self, now_s: float) -> bool:
        """Forget what was slow too long ago; return whether anything was."""
        if not self._slow:
            return False
        kept = {key: item for key, item in self._slow.items() if now_s < item[0]}
        has_changed = len(kept) < len(self._slow)
        self._slow = kept
        return has_changed

    def note_entries(self, places: Sequence[LocalPlace], workers: Sequence[WorkerState], now_s: float) -> bool:
        """Note which workers have entered an iteration; return whether the findings have changed by that."""
        for place, state in zip(places, workers, strict=True):
            stay = place.incarnation.number, state.iteration
            known = self._entries.get(place.local_rank)
            if state.phase not in _INSIDE or _rank(place) is None:
                continue
            if known is None or known.stay != stay:
                is_earlier = known is None and state.iteration == self._earlier
                self._entries[place.local_rank] = _Entry(stay, -math.inf if is_earlier else now_s, now_s)
            elif state.halted is not None and state.halted.is_held:
                # It waits after a step, as it was told to.
                self._entries[place.local_rank] = replace(known, expects_from_s=now_s)
        return bool(self._slow) and self._forget_missing(places, workers)

    def _forget_missing(self, places: Sequence[LocalPlace], workers: Sequence[WorkerState]) -> bool:
        """Forget the lines that workers owed in an iteration that they have left; return whether there were any."""
        is_over = False
        for key in [key for key, (until_s, _finding) in self._slow.items() if until_s == math.inf]:
            place, state = places[key[0]], workers[key[0]]
            stay, _count = self._overdue[key]
            if (
                _rank(place) is None
                or self._since_s(place, state) == math.inf
                or stay != (place.incarnation.number, state.iteration)
            ):
                del self._slow[key]
                is_over = True
        return is_over

    def take(self, message: Lines, places: Sequence[LocalPlace], workers: Sequence[WorkerState], now_s: float) -> None:
        """Take what was printed, and note the faults and findings that follow from it."""
        self.num_skipped = message.num_skipped
        self._keep(message.marks, places)
        for place, state in zip(places, workers, strict=True):
            if _rank(place) is None:
                continue
            for rule in self._rules:
                self._judge(rule, place, state, min(message.looked_s, now_s), now_s)

    def _keep(self, marks: Iterable[LineMark], places: Sequence[LocalPlace]) -> None:
        names = {rule.name for rule in self._rules}
        for mark in marks:
            if mark.rule not in names or not 0 <= mark.local_rank < len(places):
                continue
            key = mark.local_rank, mark.incarnation, mark.rule
            self._marks[key] = mark
            # The agent that was told what stops the job may have ended before it could pass it on.
            is_known = mark.is_told and mark.rule not in self._stops
            if is_known and mark.count > self._handled.get(key, 0):
                self._handled[key] = mark.count
        newest = {place.local_rank: place.incarnation.number for place in places}
        # Of a process that is gone only the last words count, and only until they were judged.
        for known in (self._marks, self._handled):
            for key in [key for key in known if not newest[key[0]] - 1 <= key[1] <= newest[key[0]]]:
                del known[key]

    def _judge(self, rule: LogRule, place: LocalPlace, state: WorkerState, looked_s: float, now_s: float) -> None:
        if not rule.is_on_match:
            self._judge_absence(rule, place, state, looked_s, now_s)
            return
        number = place.incarnation.number
        for incarnation in (number - 1, number):
            key = place.local_rank, incarnation, rule.name
            mark = self._marks.get(key)
            if mark is None or mark.count <= self._handled.get(key, 0):
                continue
            self._handled[key] = mark.count
            is_of_stay = incarnation == number and mark.at_s >= self._since_s(place, state)
            if is_of_stay or rule.verdict is LogVerdict.FATAL_STOP:
                line = printable(mark.line)
                self._speak(rule, place, state, f"a line matches: {line}", age_s=now_s - mark.at_s, now_s=now_s)

    def _since_s(self, place: LocalPlace, state: WorkerState) -> float:
        """Return when the worker entered the iteration in which it is; inf: it is in none."""
        entry = self._entries.get(place.local_rank)
        stay = place.incarnation.number, state.iteration
        if entry is None or entry.stay != stay or state.phase not in _INSIDE:
            return math.inf
        return entry.since_s

    def _judge_absence(
        self, rule: LogRule, place: LocalPlace, state: WorkerState, looked_s: float, now_s: float
    ) -> None:
        key, rank = (place.local_rank, rule.name), _rank(place)
        entry, since_s = self._entries.get(place.local_rank), self._since_s(place, state)
        if entry is None or since_s == math.inf or (rank != 0 and rule.ranks is LogRanks.FIRST):
            self._slow.pop(key, None)
            return
        mark = self._marks.get((place.local_rank, place.incarnation.number, rule.name))
        if mark is not None and mark.at_s < since_s:
            mark = None
        told = entry.stay, 0 if mark is None else mark.count
        if self._overdue.get(key) == told:
            return
        self._slow.pop(key, None)
        if rule.within_s is not None:
            if mark is None and looked_s - entry.expects_from_s >= rule.within_s + _SLACK_S:
                self._overdue[key] = told
                self._speak(
                    rule, place, state, f"no line has matched within {rule.within_s:g} s", age_s=0.0, now_s=now_s
                )
        elif rule.every_s is not None and mark is not None:
            waited_s = looked_s - max(mark.at_s, entry.expects_from_s)
            if waited_s >= rule.every_s + _SLACK_S:
                self._overdue[key] = told
                text = f"no line has matched for {rule.every_s:g} s"
                self._speak(rule, place, state, text, age_s=waited_s - rule.every_s, now_s=now_s)

    def _speak(
        self, rule: LogRule, place: LocalPlace, state: WorkerState, text: str, *, age_s: float, now_s: float
    ) -> None:
        incarnation = place.incarnation
        self.num_spoken[rule.name] += 1
        if rule.verdict is LogVerdict.SLOW:
            finding = Finding(LOG_LINES, rule.name, Verdict.DEGRADED, message=f"rank {_rank(place)}: {text}"[:300])
            until_s = now_s + SLOW_S if rule.is_on_match else math.inf
            self._slow[place.local_rank, rule.name] = until_s, finding
            return
        is_hang = rule.verdict is LogVerdict.HANG
        cause = Cause.SOFT_TIMEOUT if is_hang else Cause.LOG_RULE
        detail = f"log rule {rule.name}: {text}"
        fault = Fault(cause, state.iteration, detail, max(age_s, 0.0), is_hang=is_hang, rule=rule.name)
        if rule.verdict is LogVerdict.FATAL_STOP:
            # Of a process before this one: of the last iteration that is known of the place.
            entry = self._entries.get(place.local_rank)
            last = self._earlier if entry is None else entry.stay[1]
            fault = replace(fault, iteration=max(state.iteration, last))
            place.stop = place.stop or fault
            if incarnation.found is None or incarnation.found.rule not in self._stops:
                place.incarnation = replace(incarnation, found=fault)
        elif incarnation.found is None and state.fault is None:
            place.incarnation = replace(incarnation, found=fault)


def _rank(place: LocalPlace) -> int | None:
    part = place.incarnation.part
    return None if part is None else part.rank
