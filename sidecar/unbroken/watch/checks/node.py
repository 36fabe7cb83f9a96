"""The node and its kernel: memory pressure, processes killed for want of memory, the clock."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from unbroken.watch.checks.check import Judgement, verdicts
from unbroken.watch.counters import Looks, Rises, look_again
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.files import Files, table_of
from unbroken_core.vocabulary.findings import Finding, Verdict

MEMORY, OOM, CLOCK = "memory", "oom", "clock"
HOLD_S: Final = 600.0
_PRESSURES: Final = {"node": "/proc/pressure/memory", "container": "/sys/fs/cgroup/memory.pressure"}
_FULL_PERCENT: Final = 20.0
"""Of the last minute, in which no process could go on for want of memory."""
_OOM_FILES: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_UNSYNCHRONISED: Final = 0x40
_MAX_ERROR_US: Final = 500_000


def read_pressure(files: Files) -> dict[str, float]:
    """Return, for node and container, the share of the last minute in percent. Raises NotCheckedError."""
    found = {}
    for entity, path in _PRESSURES.items():
        share = _full_avg60(files.read(path))
        if share is not None:
            found[entity] = share
    if not found:
        raise NotCheckedError("the kernel does not report memory pressure (PSI)")
    return found


def _full_avg60(text: str | None) -> float | None:
    for line in (text or "").splitlines()[:8]:
        kind, *fields = line.split()[:8] or [""]
        values = dict(field.partition("=")[::2] for field in fields)
        if kind == "full" and "avg60" in values:
            try:
                share = float(values["avg60"])
            except ValueError:
                return None
            return share if 0 <= share <= 100 else None
    return None


def judge_pressure(history: Looks | None, sample: dict[str, float]) -> Judgement:
    """Return what memory pressure means."""
    looks = look_again(history or {}, {(entity, "full") for entity, share in sample.items() if share >= _FULL_PERCENT})
    found = [
        Finding(
            MEMORY,
            entity,
            Verdict.DEGRADED,
            "memory-pressure",
            "look at who uses the memory",
            f"for {_FULL_PERCENT:.0f} % of a minute or more no process could go on for want of memory",
            sum(look),
        )
        for (entity, _code), look in sorted(looks.items())
    ]
    return Judgement(verdicts(MEMORY, found, ", ".join(sorted(sample))), looks)


@dataclass(frozen=True)
class OomSample:
    """How many processes of the container the kernel has killed for want of memory."""

    num_kills: int
    at_s: float


def read_oom(files: Files, clock: Callable[[], float]) -> OomSample:
    """Raises NotCheckedError where the kernel does not count them for this container."""
    for path in _OOM_FILES:
        num = table_of(files.read(path)).get("oom_kill")
        if num is not None:
            return OomSample(num, clock())
    raise NotCheckedError("the kernel does not count kills for want of memory here")


def judge_oom(history: Rises | None, sample: OomSample) -> Judgement:
    """Return what those kills mean: the limit of the pod, or the script; never a broken device."""
    rises = (history or Rises()).follow({("container", "oom_kill"): sample.num_kills}, {}, sample.at_s, HOLD_S)
    found = []
    if seen := rises.seen(("container", "oom_kill")):
        text = "the kernel has killed processes of the container for want of memory"
        found.append(
            Finding(OOM, "container", Verdict.DEGRADED, "oom-killed", "raise resources.limits.memory", text, seen)
        )
    return Judgement(verdicts(OOM, found, "container"), rises)


@dataclass(frozen=True)
class ClockSample:
    """What the kernel says of its clock."""

    is_synchronised: bool
    error_us: int
    """By how much it may be wrong at most, as the kernel reckons."""


@dataclass(frozen=True)
class ClockHistory:
    """What is remembered of the samples before."""

    was_synchronised: bool = False
    looks: Looks = field(default_factory=dict)


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error", ctypes.c_long),
        ("estimated_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock(library: ctypes.CDLL | None = None) -> ClockSample:
    """Ask the kernel; it changes nothing. Raises NotCheckedError where it does not tell."""
    asked = _Timex(modes=0)
    try:
        code = (library or ctypes.CDLL(None, use_errno=True)).adjtimex(ctypes.byref(asked))
    except (OSError, AttributeError) as error:
        raise NotCheckedError(f"adjtimex: {error}") from error
    if code < 0:
        raise NotCheckedError("adjtimex: the kernel does not tell")
    return ClockSample(not asked.status & _UNSYNCHRONISED, max(0, int(asked.max_error)))


def judge_clock(history: ClockHistory | None, sample: ClockSample) -> Judgement:
    """Return what the kernel's word means: many a node never tells its kernel that its clock is right."""
    before = history or ClockHistory()
    was = before.was_synchronised or sample.is_synchronised
    amiss = set()
    if was and not sample.is_synchronised:
        amiss.add(("node", "clock-unsynchronised"))
    elif sample.is_synchronised and sample.error_us > _MAX_ERROR_US:
        amiss.add(("node", "clock-wrong"))
    after = ClockHistory(was, look_again(before.looks, amiss))
    found = [
        Finding(
            CLOCK,
            "node",
            Verdict.DEGRADED,
            code,
            "look at the node's time service",
            "its clock may be wrong",
            sum(look),
        )
        for (_entity, code), look in sorted(after.looks.items())
    ]
    if not was:
        text = "nothing has synchronised the kernel's clock so far"
        return Judgement((Finding(CLOCK, "node", Verdict.UNKNOWN, "unsynchronised", message=text),), after)
    return Judgement(verdicts(CLOCK, found, "node"), after)
