"""Who is alive: pure decisions on ages. Stamps of one pod are read by its agent, silence of pods by the coordinator.

What the stamps of a worker inside of the training function say:

    ALIVE   MAIN    PING (armed)    the worker                                          evidence
    fresh   fresh   fresh           makes progress                                      none
    stale   any     any             its process is stopped, or holds the GIL for ever   CERTAIN
    fresh   fresh   stale           runs Python code, but makes no steps                CERTAIN
    fresh   stale   any             is blocked outside of Python: it hangs itself, or   POSSIBLE
                                    it waits in a collective for another that hangs

A worker that waits for another looks like one that hangs in C code. So POSSIBLE evidence is reported later than CERTAIN
evidence, by `possible_delay_s`: a worker that certainly hangs, in any pod, is named first, and the interruption that
it causes frees those who only wait.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, FLAG_PING_ARMED, FLAG_PROTECTION_OFF, WorkerStamps
from unbroken_core.protocol.settings import Timeouts

RECOVERY_RECONNECT_S = 1.0
"""Longest absence of an agent while an interruption is under way: everybody waits for it."""

_NS = 1_000_000_000


class Evidence(IntEnum):
    """How sure it is that a worker hangs itself."""

    POSSIBLE = 1
    CERTAIN = 2


@dataclass(frozen=True)
class Hang:
    """A worker that made no progress for the soft timeout."""

    local_rank: int
    incarnation: int
    iteration: int
    age_s: float
    """Age of the oldest stamp that counts."""
    evidence: Evidence
    detail: str
    """One line for people."""


@dataclass(frozen=True)
class Ages:
    """Seconds since each stamp of a worker; None where the stamp does not count."""

    alive_s: float | None
    main_s: float | None
    ping_s: float | None

    @property
    def oldest_s(self) -> float:
        """Age of the worker."""
        return max((age for age in (self.alive_s, self.main_s, self.ping_s) if age is not None), default=0.0)


def possible_delay_s(timeouts: Timeouts) -> float:
    """Return how much later than CERTAIN evidence POSSIBLE evidence is reported; under a quarter of hard - soft."""
    return min(2.0, (timeouts.hard_s - timeouts.soft_s) / 4)


def ages(slot: WorkerStamps, now_ns: int) -> Ages:
    """Return the ages of a worker's stamps; none counts outside of the function or without hang protection.

    A stamp of the future (written after `now_ns` was read) has age 0.
    """
    if not slot.flags & FLAG_IN_FUNCTION or slot.flags & FLAG_PROTECTION_OFF:
        return Ages(None, None, None)

    def age(stamp_ns: int) -> float | None:
        return max(now_ns - stamp_ns, 0) / _NS if stamp_ns > 0 else None

    return Ages(age(slot.alive_ns), age(slot.main_ns), age(slot.ping_ns) if slot.flags & FLAG_PING_ARMED else None)


def find_hangs(slots: Mapping[int, WorkerStamps], now_ns: int, timeouts: Timeouts) -> list[Hang]:
    """Return the workers to report as soft-timeout, those who are certain to hang first, then the oldest.

    `slots` by local rank; `now_ns` is CLOCK_MONOTONIC of the same host.
    """
    found = [
        hang
        for local_rank, slot in slots.items()
        if (hang := _find_hang(local_rank, slot, now_ns, timeouts)) is not None
    ]
    if any(hang.evidence is Evidence.CERTAIN for hang in found):
        # The others wait for the one that is certain: they are not culprits.
        found = [hang for hang in found if hang.evidence is Evidence.CERTAIN]
    return sorted(found, key=lambda hang: (-hang.evidence, -hang.age_s, hang.local_rank))


def next_check_s(slots: Iterable[WorkerStamps], now_ns: int, timeouts: Timeouts) -> float:
    """Return the seconds until a worker could become stale, if no stamp moves; at most the soft timeout."""
    waits = [timeouts.soft_s]
    for slot in slots:
        worker = ages(slot, now_ns)
        limits = (timeouts.soft_s, timeouts.soft_s + possible_delay_s(timeouts))
        waits += [limit - worker.oldest_s for limit in limits if worker.oldest_s < limit]
    return max(min(waits), 0.0)


def reconnect_grace_s(timeouts: Timeouts, is_interrupted: bool) -> float:
    """Return how long an agent may be away before its pod is lost."""
    return min(timeouts.reconnect_s, RECOVERY_RECONNECT_S) if is_interrupted else timeouts.reconnect_s


def ending_limit_s(timeouts: Timeouts) -> float:
    """Return how long a process may go on once the training function has returned on all ranks.

    What follows it (an evaluation, the last save) is the user's, and may take its time.
    """
    return max(timeouts.completion_s, timeouts.startup_s)


def heartbeat_interval_s(timeouts: Timeouts) -> float:
    """Return how often an agent that has nothing to say says so: four may be lost before the pod is."""
    return timeouts.heartbeat_s / 5


def _find_hang(local_rank: int, slot: WorkerStamps, now_ns: int, timeouts: Timeouts) -> Hang | None:
    worker = ages(slot, now_ns)
    soft_s = timeouts.soft_s

    def is_stale(age_s: float | None) -> bool:
        return age_s is not None and age_s >= soft_s

    if is_stale(worker.alive_s):
        detail = f"no thread ran for {worker.alive_s:.1f} s: the process is stopped or a thread holds the GIL"
        return _hang(local_rank, slot, worker, Evidence.CERTAIN, detail)
    if is_stale(worker.ping_s) and not is_stale(worker.main_s) and not _is_blocked(worker, soft_s):
        detail = f"no ping for {worker.ping_s:.1f} s while the main thread runs Python code"
        return _hang(local_rank, slot, worker, Evidence.CERTAIN, detail)
    if worker.oldest_s >= soft_s + possible_delay_s(timeouts):
        where = "the main thread is blocked outside of Python, or waits for another rank"
        detail = f"no progress for {worker.oldest_s:.1f} s: {where}"
        return _hang(local_rank, slot, worker, Evidence.POSSIBLE, detail)
    return None


def _is_blocked(worker: Ages, soft_s: float) -> bool:
    # The main thread stamps many times in half a soft timeout while it runs Python code.
    return worker.main_s is not None and worker.main_s >= soft_s / 2


def _hang(local_rank: int, slot: WorkerStamps, worker: Ages, evidence: Evidence, detail: str) -> Hang:
    return Hang(local_rank, slot.incarnation, slot.iteration, worker.oldest_s, evidence, detail)
