"""Looks for what log rules ask for in the output of workers, on its way through the launcher. See docs/design/0027.

    pipe ──> Stream ──> Tap ──whole lines──> LineRules ──Lines──> agent
                                               └─ at most a tenth of a core: what is more is passed over, and counted

Nothing waits for it, and no output is kept or held up by it. Only jobs with rules load this module.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unbroken_core.conventions.printable import printable
from unbroken_core.pod.pod_messages import LineMark, Lines
from unbroken_core.protocol.log_rules.matcher import Matcher
from unbroken_core.protocol.log_rules.rules import MAX_SHOWN, LogRule, LogVerdict

MAX_LINE_BYTES = 2048
"""So much of a line is looked at."""
_CPU_SHARE = 0.1
_CPU_BURST_S = 0.1
_TELL_EVERY_S = 0.25
_LOOK_EVERY_S = 1.0
"""How often it is told that an expected line has not come."""
_MAX_MARKS_TOLD = 256
"""In one message."""
_COMPLAIN_EVERY_S = 60.0

_Key = tuple[int, int, str]


class _SpentError(Exception):
    """The CPU time is used up."""


@dataclass
class _Output:
    """The output of one process."""

    local_rank: int
    incarnation: int
    marks: dict[str, LineMark] = field(default_factory=dict)
    """By rule."""


class LineRules:
    """All rules of one launcher. `clock` is monotonic seconds, `cpu` the seconds of CPU time of this thread."""

    def __init__(
        self,
        rules: Sequence[LogRule],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """Raises PatternError, which the job's settings have ruled out."""
        self.rules = tuple(rules)
        self._matchers = [(rule, Matcher(rule.pattern)) for rule in rules]
        self._stops = {rule.name for rule in rules if rule.verdict is LogVerdict.FATAL_STOP}
        self._expects = any(not rule.is_on_match for rule in rules)
        self._clock, self._cpu = clock, cpu
        self._left_s, self._refilled_s = _CPU_BURST_S, clock()
        self._outputs: dict[int, _Output] = {}
        """By local rank, of the newest process."""
        self._last_words: dict[int, dict[_Key, LineMark]] = {}
        """By local rank, what the process before has printed that stops the job."""
        self._untold: dict[_Key, LineMark] = {}
        self._looked_s = self._told_s = 0.0
        self._looked_told_s = 0.0
        self.num_skipped = 0
        self._complained_s = -_COMPLAIN_EVERY_S
        self.complaint = ""
        """What a person should know, until somebody has said so."""

    def tap(self, local_rank: int, incarnation: int) -> Callable[[], "Tap"]:
        """Return what makes a tap for each stream of a new process."""
        before = self._outputs.get(local_rank)
        if before is not None and (marks := {name: before.marks[name] for name in self._stops & before.marks.keys()}):
            self._last_words[local_rank] = {(local_rank, before.incarnation, name): marks[name] for name in marks}
        output = self._outputs[local_rank] = _Output(local_rank, incarnation)
        return lambda: Tap(self, output)

    def note_look(self, now_s: float, *, is_complete: bool) -> None:
        """Note that all streams were read at this time, unless output waits in the pipes of workers."""
        if is_complete:
            self._looked_s = now_s

    def reconnect(self) -> None:
        """Tell everything again: another agent may listen."""
        for words in self._last_words.values():
            for key, mark in words.items():
                self._untold.setdefault(key, replace(mark, is_told=True))
        for output in self._outputs.values():
            for name, mark in output.marks.items():
                key = (output.local_rank, output.incarnation, name)
                self._untold.setdefault(key, replace(mark, is_told=True))
        self._told_s = self._looked_told_s = 0.0

    @property
    def due_s(self) -> float | None:
        """When `take` has something to say; None: not before something is printed."""
        due = [self._told_s + _TELL_EVERY_S] if self._untold else []
        due += [self._looked_told_s + _LOOK_EVERY_S] if self._expects and self._outputs else []
        return min(due, default=None)

    def take(self, now_s: float) -> Lines | None:
        """Return what is to be told now, and note it as told; call it until it returns None.

        All marks that wait are told at once, in as many messages as that takes, and only the last one says until when
        all was looked at.
        """
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return None
        told = list(self._untold.items())[:_MAX_MARKS_TOLD]
        for key, _mark in told:
            del self._untold[key]
        marks = tuple(mark for _key, mark in told)
        if self._untold:
            # Marks first: what was looked at later than they is no news without them.
            return Lines(0.0, marks, self.num_skipped)
        self._told_s = self._looked_told_s = now_s
        return Lines(self._looked_s, marks, self.num_skipped)

    # ----------------------------------------------------------------------------------------------------------- lines

    def look(self, output: _Output, text: bytes) -> None:
        """Look at whole lines of a process; \\n is between them."""
        now_s = self._clock()
        self._left_s = min(_CPU_BURST_S, self._left_s + _CPU_SHARE * (now_s - self._refilled_s))
        self._refilled_s = now_s
        if self._left_s <= 0.0:
            self._skip(output, len(text), now_s)
            return
        began_s = self._cpu()
        until_s = began_s + self._left_s
        small = text.lower()
        try:
            for rule, matcher in self._matchers:
                if self._is_known(output, rule, now_s):
                    continue
                # One line, which may match, takes some hundredths of a second; and there are more rules.
                if self._cpu() > until_s:
                    raise _SpentError
                line = self._first(matcher, text, small, until_s)
                if line is not None:
                    self._mark(output, rule, now_s, _shown(line) if rule.is_on_match else "")
        except _SpentError:
            self._skip(output, len(text), now_s)
        self._left_s -= self._cpu() - began_s

    def _is_known(self, output: _Output, rule: LogRule, now_s: float) -> bool:
        """Whether another match would say nothing new for now."""
        if rule.is_on_match:
            return False  # The worker may have entered another iteration since.
        mark = output.marks.get(rule.name)
        return mark is not None and now_s < mark.at_s + min(_TELL_EVERY_S, (rule.every_s or rule.within_s or 60.0) / 10)

    def _first(self, matcher: Matcher, text: bytes, small: bytes, until_s: float) -> bytes | None:
        """Return the first line that matches. Raises _SpentError."""
        at = 0
        while (at := small.find(matcher.required, at)) >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end
            if matcher.matches(text[begin : min(end, begin + MAX_LINE_BYTES)]):
                return text[begin : min(end, begin + MAX_LINE_BYTES)]
            if self._cpu() > until_s:
                raise _SpentError
            at = end + 1
        return None

    def _mark(self, output: _Output, rule: LogRule, now_s: float, line: str) -> None:
        key = (output.local_rank, output.incarnation, rule.name)
        before, untold = output.marks.get(rule.name), self._untold.get(key)
        count = 1 if before is None else before.count + 1
        if rule.is_on_match and untold is not None and not untold.is_told:
            count = untold.count  # One line is told at a time: the newest.
        output.marks[rule.name] = self._untold[key] = LineMark(*key, now_s, count, line)

    def _skip(self, output: _Output, num_bytes: int, now_s: float) -> None:
        """Pass over output. What was not looked at may have been the line that is expected."""
        self.num_skipped += num_bytes
        for rule in self.rules:
            if not rule.is_on_match:
                self._mark(output, rule, now_s, "")
        if now_s >= self._complained_s + _COMPLAIN_EVERY_S:
            self._complained_s = now_s
            self.complaint = (
                f"log rules: worker {output.local_rank} prints more than can be looked at with {_CPU_SHARE:.0%} of a "
                f"core; {self.num_skipped} bytes were passed over so far"
            )


class Tap:
    """Cuts one stream of a process into lines. Keeps at most MAX_LINE_BYTES."""

    def __init__(self, rules: LineRules, output: _Output) -> None:
        self._rules, self._output = rules, output
        self._begun = b""
        """The unfinished line, as much of it as is looked at."""

    def feed(self, data: bytes) -> None:
        """Take output as it was read."""
        text = data.replace(b"\r", b"\n") if b"\r" in data else data
        end = text.rfind(b"\n")
        if end < 0:
            self._begun += text[: MAX_LINE_BYTES - len(self._begun)]
            return
        whole = self._begun + text[:end] if self._begun else text[:end]
        # A line that was begun is cut off where it has become too long; what follows it is not a line of its own.
        if len(self._begun) >= MAX_LINE_BYTES:
            whole = self._begun + text[text.find(b"\n") : end]
        self._begun = text[end + 1 :][:MAX_LINE_BYTES]
        self._rules.look(self._output, whole)

    def end(self) -> None:
        """Take the unfinished line as one: there is no more."""
        if self._begun:
            self._rules.look(self._output, self._begun)
            self._begun = b""


def _shown(line: bytes) -> str:
    return printable(line[: 4 * MAX_SHOWN].decode(errors="replace").strip())[:MAX_SHOWN]
