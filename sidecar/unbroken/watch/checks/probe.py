"""Probes of others: commands with the contract of node-problem-detector's custom plug-ins.

    exit code 0    all is well
    exit code 1    what the probe looks at is broken, as bad as the job says
    any other      it does not know; likewise a probe that does not end in time, or cannot be started

What it prints is the message, its first line.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from unbroken.watch.checks.check import Check, Judgement
from unbroken.watch.child import CommandResult, CommandRunner
from unbroken.watch.counters import Looks, look_again
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import LOG_LINES, PAIRS, PREFLIGHT, STRAGGLERS, Finding, Verdict

MAX_PROBES: Final = 8
VARIABLE: Final = "UNBROKEN_WATCH_PROBES"
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,37}[a-z0-9])?", re.ASCII)
BUILT_IN: Final = frozenset(
    (
        *("gpu", "gpu-events", "ports", "network", "pcie", "storage", "memory", "oom", "clock", "watch", "extensions"),
        *(STRAGGLERS, LOG_LINES, *PREFLIGHT, PAIRS),
    )
)
_VERDICTS: Final = {verdict.value: verdict for verdict in (Verdict.DEGRADED, Verdict.SUSPECT, Verdict.FATAL)}
_FIELDS: Final = frozenset(("name", "command", "periodSeconds", "timeoutSeconds", "verdict"))


@dataclass(frozen=True)
class Probe:
    """One command."""

    name: str
    command: tuple[str, ...]
    period_s: float = 30.0
    timeout_s: float = 5.0
    verdict: Verdict = Verdict.SUSPECT
    """What exit code 1 means."""


def is_free(name: str) -> bool:
    """Return whether a check of others may have this name."""
    return _NAME.fullmatch(name) is not None and name not in BUILT_IN


def read_probes(text: str) -> tuple[Probe, ...]:
    """Read UNBROKEN_WATCH_PROBES. Raises InputError that names what is wrong."""
    try:
        data = json.loads(text) if text else []
    except (ValueError, RecursionError) as error:
        raise InputError(f"{VARIABLE}: want JSON, got {text[:80]!r}") from error
    if not isinstance(data, list) or len(data) > MAX_PROBES:
        raise InputError(f"{VARIABLE}: want a list of at most {MAX_PROBES} probes, got {text[:80]!r}")
    return probes_of(data, VARIABLE)


def probes_of(data: Sequence[Any], where: str) -> tuple[Probe, ...]:
    """Return the probes that a list in JSON describes. Raises InputError that names what is wrong, and `where`."""
    probes = tuple(_probe(item, f"{where}[{index}]") for index, item in enumerate(data))
    if len({probe.name for probe in probes}) < len(probes):
        raise InputError(f"{where}: want each name once, got {[probe.name for probe in probes]}")
    return probes


def _probe(item: Any, where: str) -> Probe:
    if not isinstance(item, dict) or not item.keys() <= _FIELDS:
        raise InputError(f"{where}: want an object with some of {sorted(_FIELDS)}, got {str(item)[:80]!r}")
    name, command = item.get("name"), item.get("command")
    if not isinstance(name, str) or not is_free(name):
        raise InputError(
            f"{where}.name: want small letters, digits and dashes, and no built-in check, got {str(name)[:80]!r}"
        )
    if not isinstance(command, list) or not command or not all(map(_is_word, command)):
        raise InputError(f"{where}.command: want a list of words, got {str(command)[:80]!r}")
    period_s, timeout_s = item.get("periodSeconds", 30), item.get("timeoutSeconds", 5)
    for what, value, most in (("periodSeconds", period_s, 3600), ("timeoutSeconds", timeout_s, 60)):
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(f"{where}.{what}: want 1 to {most}, got {str(value)[:80]}")
    word = item.get("verdict", Verdict.SUSPECT.value)
    # A list, for one, could not be looked up.
    if not isinstance(word, str) or word not in _VERDICTS:
        raise InputError(f"{where}.verdict: want one of {sorted(_VERDICTS)}, got {str(word)[:80]!r}")
    return Probe(name, tuple(command), float(period_s), float(timeout_s), _VERDICTS[word])


def _is_word(value: Any) -> bool:
    """Return whether a process can be started with it: JSON has lone surrogates, which have no bytes."""
    return isinstance(value, str) and "\0" not in value and value == value.encode(errors="replace").decode()


@dataclass(frozen=True)
class ProbeHistory:
    """What is remembered between two runs of a probe."""

    looks: Looks = field(default_factory=dict)
    """Of runs that knew anything."""
    failure: str = ""
    """What it said when it failed last."""


def judge_probe(probe: Probe, history: ProbeHistory | None, answer: CommandResult) -> Judgement:
    """Return what the end of a probe means. One that knows nothing takes nothing back: what failed is not well for it,
    nor has it failed again."""
    before, text = history or ProbeHistory(), _message(answer)
    has_failed, is_known = answer.exit_code == 1, answer.exit_code in (0, 1)
    looks = look_again(before.looks, {(probe.name, "failed")} if has_failed else set()) if is_known else before.looks
    failure = (text or "the probe says no more") if has_failed else before.failure
    seen = sum(looks.get((probe.name, "failed"), ()))
    findings = []
    if seen:
        since = "" if has_failed else "; its last look passed" if is_known else "; its last look knows nothing"
        action = "see what the probe looks at"
        findings.append(Finding(probe.name, "", probe.verdict, "probe-failed", action, f"{failure}{since}", seen))
    elif is_known:
        findings.append(Finding(probe.name, "", Verdict.OK, message=text))
    if not is_known:
        how = "it did not end in time" if answer.exit_code is None else f"exit code {answer.exit_code}"
        findings.append(Finding(probe.name, "", Verdict.UNKNOWN, "probe-unknown", message=f"{how}: {text}"))
    return Judgement(tuple(findings), ProbeHistory(looks, failure))


def _message(answer: CommandResult) -> str:
    """Return the first line of the output; where it has none, the last one of what it says went wrong."""
    said, complaint = answer.output.strip().splitlines(), answer.complaint.strip().splitlines()
    line = next(iter(said), "")[:200]
    if line or not complaint or answer.exit_code == 0:
        return line
    return f"{complaint[-1][:180]} (standard error)"


def make_checks(probes: Sequence[Probe]) -> list[Check]:
    """Return a check for each probe; each wants a lane of its own."""
    return [_check(probe) for probe in probes]


def _check(probe: Probe) -> Check:
    child = CommandRunner()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNBROKEN_")}

    def sample() -> CommandResult:
        try:
            return child.run(probe.command, probe.timeout_s, environment)
        except OSError as error:
            return CommandResult(127, f"cannot be started: {error.strerror}", 0.0)

    return Check(probe.name, probe.period_s, sample, lambda history, answer: judge_probe(probe, history, answer))
