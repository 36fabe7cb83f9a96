"""What an agent has said to the rendezvous on the connection that is open, and what is due to be said. Pure.

open ──Hello──> greeted ──Welcome──> welcome ──Report at news, Heartbeat without──> ...
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Union

from unbroken_core.messages import Fault, Heartbeat, Report, WorkerState
from unbroken_core.reasons import WorkerPhase

_GATHER_S = 0.05
"""So long news may wait. Workers that leave an iteration together, or halt, are told of together if it takes no longer;
and that workers were told to enter the next one is told when they form their groups no more, which takes all cores."""


class Speech:
    """All times are monotonic seconds of one clock."""

    def __init__(self, join_by_s: float) -> None:
        """`join_by_s` is when Hello is said at the latest, once there is a connection."""
        self.join_by_s = join_by_s
        self.is_connected = False
        self.is_welcome = False
        self._is_hello_sent = False
        self._seq = 0
        self._interval_s = 1.0
        self._said: tuple[WorkerState, ...] = ()
        self._is_leaving_said = False
        self._said_s = join_by_s
        self._unsaid_since_s: float | None = None
        """Since when something is not told that may wait."""
        self._num_entered = 0
        """Workers that were told to enter an iteration, which is not told yet."""
        self._entered_s = 0.0
        """When the last of them was."""
        self._fault_since_s: dict[tuple[int, Fault], float] = {}
        """When each fault that is there now was noted: it was as old then as it says."""

    def connect(self) -> None:
        """A connection is open: nothing was said on it yet."""
        self.is_connected, self.is_welcome, self._is_hello_sent, self._seq = True, False, False, 0

    def disconnect(self) -> None:
        """The connection is closed."""
        self.is_connected = self.is_welcome = self._is_hello_sent = False

    def hang_up(self) -> None:
        """The connection is being closed from here."""
        self.is_connected = self.is_welcome = False

    def welcome(self, interval_s: float) -> None:
        """The rendezvous has accepted this agent, and wants a sign of life so often."""
        self.is_welcome, self._interval_s = True, max(interval_s, 0.01)

    @property
    def is_hello_due(self) -> bool:
        """Whether the rendezvous waits for the first word."""
        return self.is_connected and not self._is_hello_sent

    @property
    def deadlines_s(self) -> list[float]:
        """When something is to be said, whatever happens until then."""
        due = []
        if self.is_welcome:
            due.append(self._said_s + self._interval_s)
            if self._unsaid_since_s is not None:
                due.append(self._unsaid_since_s + _GATHER_S)
        if self.is_hello_due:
            due.append(self.join_by_s)
        return due

    def note_faults(self, workers: Sequence[WorkerState], now_s: float) -> None:
        """Remember since when each fault is known."""
        faults = [(state.local_rank, state.fault) for state in workers if state.fault is not None]
        self._fault_since_s = {fault: self._fault_since_s.get(fault, now_s) for fault in faults}

    def greet(self, workers: tuple[WorkerState, ...], now_s: float) -> tuple[WorkerState, ...]:
        """Note that Hello is said now; return the workers as it tells of them."""
        self._is_hello_sent = True
        self._said, self._is_leaving_said, self._said_s, self._num_entered = workers, False, now_s, 0
        return tuple(self._aged(state, now_s) for state in workers)

    def next_word(
        self, workers: tuple[WorkerState, ...], is_leaving: bool, is_waited_for: bool, now_s: float
    ) -> Union[Report, Heartbeat, None]:
        """Return what is to be said now, and note it as said; None for nothing.

        `is_waited_for`: workers of this pod are about to leave their iteration.
        """
        if not self.is_welcome:
            return None
        num_entered = len(_entered(workers, self._said))
        if num_entered > self._num_entered:
            self._entered_s = now_s
        self._num_entered = num_entered
        has_news = bool(_changed(workers, self._said)) or is_leaving != self._is_leaving_said
        may_wait = has_news and is_leaving == self._is_leaving_said and self._may_wait(workers, is_waited_for)
        if may_wait and self._is_early(now_s):
            return None
        self._unsaid_since_s = None
        if not has_news and now_s < self._said_s + self._interval_s:
            return None
        self._seq += 1
        self._said_s = now_s
        if not has_news:
            return Heartbeat(self._seq, max(worker.step for worker in workers))
        self._said, self._is_leaving_said = workers, is_leaving
        self._num_entered = 0
        return Report(self._seq, workers, is_leaving, now_s - self._entered_s if num_entered else 0.0)

    def _may_wait(self, workers: tuple[WorkerState, ...], is_waited_for: bool) -> bool:
        """Return whether all news is that workers did what others of this pod are about to do as well.

        They left an iteration, and the next plan waits for all; or they halt after a step. That they were told to enter
        an iteration may wait, too: the rendezvous has ordered it.
        """
        changed = _changed(workers, self._said)
        entered = _entered(workers, self._said)
        if entered and len(entered) == len(changed):
            return not any(worker.fault or worker.has_progress or worker.halted for worker in entered)
        if is_waited_for and not self._is_leaving_said and all(map(_is_plainly_ready, changed)):
            return True
        return all(worker.halted is not None for worker in changed) and _are_halting(workers, self._said)

    def _is_early(self, now_s: float) -> bool:
        if self._unsaid_since_s is None:
            self._unsaid_since_s = now_s
        return now_s < self._unsaid_since_s + _GATHER_S

    def _aged(self, state: WorkerState, now_s: float) -> WorkerState:
        """Say how old a fault is that nobody could be told of when it was noted: the oldest names the culprit."""
        if state.fault is None:
            return state
        age_s = now_s - self._fault_since_s.get((state.local_rank, state.fault), now_s)
        return replace(state, fault=replace(state.fault, detect_s=state.fault.detect_s + age_s))


def _entered(workers: tuple[WorkerState, ...], said: tuple[WorkerState, ...]) -> list[WorkerState]:
    """Return the workers of which it is news that they are in their iteration."""
    return [
        worker
        for worker, former in zip(workers, said, strict=True)
        if worker.phase is WorkerPhase.RUNNING and worker.iteration > former.iteration
    ]


def _is_plainly_ready(worker: WorkerState) -> bool:
    return worker.phase is WorkerPhase.READY and worker.fault is None and worker.answer is None


def _are_halting(workers: tuple[WorkerState, ...], said: tuple[WorkerState, ...]) -> bool:
    """Return whether only answers to a Halt are new, and others of the pod have not given the same yet."""
    for worker, former in zip(workers, said, strict=True):
        if worker != replace(former, step=worker.step, halted=worker.halted):
            return False
    answers = (worker.halted for worker in workers if worker.phase is WorkerPhase.RUNNING)
    return len({answer and (answer.number, answer.is_held, answer.is_done) for answer in answers}) > 1


def _changed(workers: tuple[WorkerState, ...], said: tuple[WorkerState, ...]) -> list[WorkerState]:
    """Return the workers of which other things than the step are new."""
    return [worker for worker, former in zip(workers, said, strict=True) if not _is_same(worker, former)]


def _is_same(worker: WorkerState, former: WorkerState) -> bool:
    if worker is former:
        return True
    has_moved = worker.phase is not former.phase or worker.iteration != former.iteration
    return not has_moved and worker == replace(former, step=worker.step)
