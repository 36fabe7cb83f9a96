"""spec.health: what is looked at in the pods, and what becomes of what is found."""

from collections.abc import Iterator
from enum import Enum
from typing import Annotated

from pydantic import ConfigDict, Field

from unbroken_core.protocol.log_rules.rules import (
    MAX_PATTERN,
    MAX_RULE_NAME,
    MAX_RULE_S,
    MAX_RULES,
    LogRanks,
    LogVerdict,
)
from unbroken_core.protocol.settings import (
    LEAST_PREFLIGHT_S,
    MAX_RANKS_PER_POD,
    MAX_WINDOW_S,
    MOST_PREFLIGHT_S,
    USUAL_PREFLIGHT_S,
    HealthMode,
    StragglerMode,
)
from unbroken_core.vocabulary.findings import LOG_LINES, PAIRS, PREFLIGHT, STRAGGLERS
from unbroken_operator.api.model_base import Model, rule, rules

MAX_PATHS = 8
MAX_PROBES = 8
MAX_COMMAND_BYTES = 16 << 10
"""Of the commands of all probes. As JSON they take six times as much at most, and the kernel starts no process with a
variable of 128 KiB."""
BUILT_IN = (
    *(
        "clock",
        "gpu",
        "gpu-events",
        LOG_LINES,
        "memory",
        "network",
        "oom",
        "pcie",
        "ports",
        "storage",
        "watch",
        "extensions",
    ),
    STRAGGLERS,
    *PREFLIGHT,
    PAIRS,
)
"""Names of checks that no probe may have."""
_IS_UNIQUE = "!has(self.probes) || self.probes.all(one, self.probes.exists_one(other, other.name == one.name))"
_ARE_RULES_UNIQUE = (
    "!has(self.logRules) || self.logRules.all(one, self.logRules.exists_one(other, other.name == one.name))"
)
_IS_SHORT = (
    "!has(self.probes) || "
    f"self.probes.map(one, one.command.map(word, size(bytes(word))).sum()).sum() <= {MAX_COMMAND_BYTES}"
)
_WANTS_SHORT = f"want at most {MAX_COMMAND_BYTES} bytes in the commands of all probes"
_IS_FREE = f"!(self.name in {list(BUILT_IN)})"


class ProbeVerdict(str, Enum):
    """What a probe that fails says of the pod."""

    DEGRADED = "degraded"
    SUSPECT = "suspect"
    FATAL = "fatal"


class ProbeSpec(Model):
    """A command that looks at more, with the contract of node-problem-detector: exit code 0: all is well; 1: it is not;
    any other: nothing is known. The first line that it prints is the message."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule(_IS_FREE, "name must not be that of a built-in check", ".name"))
    )

    name: Annotated[str, Field(pattern="^[a-z]([a-z0-9-]*[a-z0-9])?$", max_length=39)]
    """Of the check, in findings."""
    command: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(min_length=1, max_length=16)]
    """Command and arguments, in the trainer container, without a shell."""
    period_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Between two runs; at least 5,000 times the CPU time that the watch takes to start it."""
    timeout_seconds: Annotated[int, Field(ge=1, le=60)] = 5
    """After which it is killed, with all that it started."""
    verdict: ProbeVerdict = ProbeVerdict.SUSPECT
    """What exit code 1 means."""


class StragglerSpec(Model):
    """Ranks that are busy longer than the others in each step, and so hold up all of them."""

    mode: StragglerMode = StragglerMode.REPORT
    """Off: no worker measures. Report: the condition Straggling names them. Move: they move to a ready spare, once."""
    window_seconds: Annotated[int, Field(ge=5, le=MAX_WINDOW_S)] = 60
    """So long a worker measures before it is compared with others, and at least half of timeouts.heartbeatSeconds. Who
    is slow in two windows in a row is named."""
    pipeline_stages: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_POD * 1024)] = 1
    """Ranks are compared with those of their stage; stage 0 has the first ranks, and so on. Set it to the job's
    pipeline-parallel size: stages have different work."""


class LogRuleSpec(Model):
    """What lines that workers print say of the job. It speaks when a line matches, or, with one of the times, when none
    does."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.expectedWithinSeconds) || !has(self.recurringSeconds)",
                "want one of expectedWithinSeconds and recurringSeconds",
                ".recurringSeconds",
            )
        )
    )

    name: Annotated[str, Field(pattern="^[a-z]([a-z0-9-]*[a-z0-9])?$", max_length=MAX_RULE_NAME)]
    """How messages name it."""
    pattern: Annotated[str, Field(pattern=r"^[^\x00-\x1f]+$", max_length=MAX_PATTERN)]
    """What is in the line: a regular expression without backreferences, lookaround and \\b (docs/health.md)."""
    verdict: LogVerdict
    """What it means: hang: as after timeouts.softSeconds. slow: the condition Straggling says so. fatal-restart: a
    fault of the worker. fatal-stop: the job fails."""
    expected_within_seconds: Annotated[int | None, Field(ge=1, le=MAX_RULE_S)] = None
    """It speaks when no line has matched so long after the worker entered the training function."""
    recurring_seconds: Annotated[int | None, Field(ge=1, le=MAX_RULE_S)] = None
    """It speaks when a line has matched, and none for so long since."""
    ranks: LogRanks = LogRanks.FIRST
    """From whom lines are expected: rank 0, or every rank."""


class PreflightSpec(Model):
    """What each pod finds of itself before its first process: versions, devices, products of small numbers on each of
    them, and a collective of them all."""

    mode: HealthMode = HealthMode.OFF
    """Off: pods do not test themselves. Observe: what is found is told, and changes nothing. Act: who is broken gets no
    rank while others are there, as far as spares go."""
    timeout_seconds: Annotated[int, Field(ge=LEAST_PREFLIGHT_S, le=MOST_PREFLIGHT_S)] = USUAL_PREFLIGHT_S
    """So long it may take; of what has not ended by then nothing is known. It must be less than
    timeouts.startupSeconds, which it is a part of."""
    pairs: bool = False
    """Whether pods without ranks test with each other as well: all that are ready before the first plan, which waits
    for it so long again at most, and later each pod that joins, with others that have no ranks."""


class HealthSpec(Model):
    """The watch on devices, links and nodes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(_IS_UNIQUE, "probes must have different names", ".probes"),
            rule(_IS_SHORT, f"{_WANTS_SHORT}: call a script of the image", ".probes"),
            rule(_ARE_RULES_UNIQUE, "logRules must have different names", ".logRules"),
        )
    )

    mode: HealthMode = HealthMode.OBSERVE
    """Off: nothing is looked at. Observe: what is found is told, and changes nothing. Act: ranks move from what is
    broken to a ready spare."""
    storage: Annotated[
        tuple[Annotated[str, Field(pattern="^/[^:]*$", max_length=120)], ...], Field(max_length=MAX_PATHS)
    ] = ()
    """Absolute paths in the trainer container that are looked at as well: whether they answer, can be written and have
    room. Nothing is written there."""
    probes: Annotated[tuple[ProbeSpec, ...], Field(max_length=MAX_PROBES)] = ()
    """Commands that look at more, each on a schedule of its own; 16 KiB of commands in all."""
    stragglers: StragglerSpec = StragglerSpec()
    """Which ranks hold all others up."""
    preflight: PreflightSpec = PreflightSpec()
    """What pods test before their first process, whatever `mode` is."""
    log_rules: Annotated[tuple[LogRuleSpec, ...], Field(max_length=MAX_RULES)] = ()
    """What lines that workers print mean, whatever `mode` is."""


def refusals(health: HealthSpec) -> Iterator[str]:
    """Yield `where: what is wrong with it`, below spec.health, as the API server's rules say it as well."""
    names = [probe.name for probe in health.probes]
    for index, name in enumerate(names):
        if name in BUILT_IN:
            yield f"probes[{index}].name: want a name other than those of built-in checks, got {name}"
    if len(set(names)) < len(names):
        yield f"probes: want different names, got {names}"
    num_bytes = sum(len(word.encode(errors="replace")) for probe in health.probes for word in probe.command)
    if num_bytes > MAX_COMMAND_BYTES:
        yield f"probes: {_WANTS_SHORT}, got {num_bytes}: call a script of the image"
