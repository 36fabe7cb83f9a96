"""What an agent has reported to the rendezvous on the open connection, and what is due. Pure.

open ──Hello──> waiting ──Welcome──> accepted ──Report at news, Heartbeat without──> ...
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Union

from unbroken_core.protocol.bounds import MAX_SECONDS
from unbroken_core.protocol.messages import Fault, Heartbeat, Pace, PairState, Report, WorkerState
from unbroken_core.vocabulary.checkpoints import Held
from unbroken_core.vocabulary.findings import Health, is_news
from unbroken_core.vocabulary.reasons import WorkerPhase

_GATHER_S = 0.05
"""How long news may wait. Workers that leave an iteration together, or halt together, share one report; and the report
that workers were ordered to enter waits until they have formed their groups, which needs all cores."""


_HELD_GATHER_S = 0.01
"""The same for what the memory holds: workers of a pod save at the same time."""
_HELD_PAUSES_S = (0.05, 0.5)
"""At least so long passes between two reports for the memory alone, in a small and in a large job: a script may save
many times a second. Until a step is reported as copied, saves that would overwrite it are skipped."""
_HELD_REPORTS_PER_S = 2000
"""At most so many come to a rendezvous in between, from all pods together."""
_HEALTH_GATHER_S = 0.2
"""At least so long passes between two reports for findings alone: the first is told at once."""


def held_pause_s(num_pods: int) -> float:
    """Return how long passes at least between two reports of a pod for its memory alone."""
    least_s, most_s = _HELD_PAUSES_S
    return min(max(num_pods / _HELD_REPORTS_PER_S, least_s), most_s)


class Reporter:
    """All times are monotonic seconds of one clock."""

    def __init__(self, join_by_s: float, num_pods: int = 1) -> None:
        """`join_by_s` is when Hello is due at the latest, once there is a connection. `num_pods`: of the job."""
        self._held_pause_s = held_pause_s(num_pods)
        self.join_by_s = join_by_s
        self.is_connected = False
        self.is_accepted = False
        self._is_hello_sent = False
        self._seq = 0
        self._interval_s = 1.0
        self._sent: tuple[WorkerState, ...] = ()
        self._is_leaving_sent = False
        self._sent_s = join_by_s
        self._pending_since_s: float | None = None
        """Since when there is news that may wait."""
        self._num_entered = 0
        """Workers that were ordered to enter an iteration, which is not reported yet."""
        self._entered_s = 0.0
        """When the last of them was ordered."""
        self.held: Held | None = None
        """What the pod's memory holds; None without a keeper."""
        self._held_sent: Held | None = None
        self._held_since_s: float | None = None
        """Since when there is news of it, and nothing else to say."""
        self._held_sent_s = -self._held_pause_s
        """When it was told last."""
        self.checkpoint_s = self.checkpoint_after_s = self.step_ago_s = 0.0
        """As in Report."""
        self.paces: tuple[Pace, ...] = ()
        """How busy the workers were in the newest window that each has told."""
        self._paces_sent: dict[int, Pace] = {}
        self.health: Health | None = None
        """What the pod's watch has found; None without one."""
        self._health_sent: Health | None = None
        self._health_sent_s = -_HEALTH_GATHER_S
        self.pairs: PairState | None = None
        """What is told of tests with other pods; None where there are none."""
        self._pairs_sent: PairState | None = None
        self._fault_since_s: dict[tuple[int, Fault], float] = {}
        """When each present fault was noted; at that time its age was the one that it states."""

    def connect(self) -> None:
        """A connection is open, and nothing was sent on it yet."""
        self.is_connected, self.is_accepted, self._is_hello_sent, self._seq = True, False, False, 0

    def disconnect(self) -> None:
        """The connection is closed."""
        self.is_connected = self.is_accepted = self._is_hello_sent = False

    def hang_up(self) -> None:
        """This agent is closing the connection."""
        self.is_connected = self.is_accepted = False

    def welcome(self, interval_s: float) -> None:
        """The rendezvous has accepted this agent, and wants a heartbeat at this interval."""
        self.is_accepted, self._interval_s = True, max(interval_s, 0.01)

    @property
    def is_welcome_due(self) -> bool:
        """Whether Hello was sent on this connection: before it a Welcome accepts nobody."""
        return self._is_hello_sent

    @property
    def is_hello_due(self) -> bool:
        """Whether the rendezvous waits for Hello."""
        return self.is_connected and not self._is_hello_sent

    @property
    def deadlines_s(self) -> list[float]:
        """When a message is due, whatever happens until then."""
        due = []
        if self.is_accepted and self._pending_since_s is not None:
            # All else goes with it.
            due.append(self._pending_since_s + _GATHER_S)
        elif self.is_accepted:
            due.append(self._sent_s + self._interval_s)
            if self._held_since_s is not None:
                due.append(self._held_due_s(self._held_since_s))
            if self._has_health_news:
                due.append(self._health_sent_s + _HEALTH_GATHER_S)
        if self.is_hello_due:
            due.append(self.join_by_s)
        return due

    def note_faults(self, workers: Sequence[WorkerState], now_s: float) -> None:
        """Note since when each fault is known."""
        faults = [(state.local_rank, state.fault) for state in workers if state.fault is not None]
        self._fault_since_s = {fault: self._fault_since_s.get(fault, now_s) for fault in faults}

    def note_hello(self, workers: tuple[WorkerState, ...], now_s: float) -> tuple[WorkerState, ...]:
        """Note that Hello is sent now; return the workers that it reports."""
        self._is_hello_sent, self._held_sent, self._held_since_s = True, self.held, None
        self._health_sent, self._pairs_sent = self.health, self.pairs
        self._sent, self._is_leaving_sent, self._sent_s, self._num_entered = workers, False, now_s, 0
        return tuple(self._aged(state, now_s) for state in workers)

    def next_message(
        self, workers: tuple[WorkerState, ...], is_leaving: bool, is_waited_for: bool, now_s: float
    ) -> Union[Report, Heartbeat, None]:
        """Return the message that is due, and note it as sent; None for none.

        `is_waited_for`: workers of this pod are about to leave their iteration.
        """
        if not self.is_accepted:
            return None
        num_entered = len(_entered(workers, self._sent))
        if num_entered > self._num_entered:
            self._entered_s = now_s
        self._num_entered = num_entered
        has_news = bool(_changed(workers, self._sent)) or is_leaving != self._is_leaving_sent
        may_wait = has_news and is_leaving == self._is_leaving_sent and self._may_wait(workers, is_waited_for)
        if may_wait and self._is_early(now_s):
            return None
        self._pending_since_s = None
        has_held = self._is_held_due(now_s)
        has_health = self._has_health_news and now_s >= self._health_sent_s + _HEALTH_GATHER_S
        if not (has_news or has_held or has_health) and now_s < self._sent_s + self._interval_s:
            return None
        self._seq += 1
        self._sent_s = now_s
        if not (has_news or has_held or has_health):
            newest = max(worker.iteration for worker in workers)
            highest = max(worker.step for worker in workers if worker.iteration == newest)
            paces, after_s = self._new_paces(), self.checkpoint_after_s
            return Heartbeat(self._seq, highest, self.checkpoint_s, paces, self.step_ago_s, after_s)
        self._sent, self._is_leaving_sent = workers, is_leaving
        self._num_entered = 0
        held = self.held if self.held != self._held_sent else None
        if held is not None:
            self._held_sent_s = now_s
        self._held_sent, self._held_since_s = self.held, None
        has_found = self._has_health_news
        health, pairs = self._news_of_health(), self.pairs if self.pairs != self._pairs_sent else None
        if has_found:
            self._health_sent_s = now_s
        self._pairs_sent = self.pairs
        entered_ago_s = now_s - self._entered_s if num_entered else 0.0
        return Report(
            self._seq,
            workers,
            is_leaving,
            entered_ago_s,
            held,
            health,
            self.checkpoint_s,
            self._new_paces(),
            self.step_ago_s,
            self.checkpoint_after_s,
            pairs,
        )

    def _new_paces(self) -> tuple[Pace, ...]:
        """Return what was not sent yet, and note it as sent."""
        new = tuple(pace for pace in self.paces if pace != self._paces_sent.get(pace.local_rank))
        self._paces_sent.update({pace.local_rank: pace for pace in new})
        return new

    def _news_of_health(self) -> Health | None:
        """Return what was found and not told, and note it as told; None for nothing."""
        if self.health is None or not is_news(self._health_sent, self.health):
            return None
        self._health_sent = self.health
        return self.health

    @property
    def _has_health_news(self) -> bool:
        """Whether something was found, or a test of pairs has ended."""
        if self.pairs != self._pairs_sent:
            return True
        return self.health is not None and is_news(self._health_sent, self.health)

    def _is_held_due(self, now_s: float) -> bool:
        """Return whether news of the memory have waited long enough for other news to go with."""
        if self.held == self._held_sent:
            self._held_since_s = None
            return False
        if self._held_since_s is None:
            self._held_since_s = now_s
        return now_s >= self._held_due_s(self._held_since_s)

    def _held_due_s(self, since_s: float) -> float:
        return max(since_s + _HELD_GATHER_S, self._held_sent_s + self._held_pause_s)

    def _may_wait(self, workers: tuple[WorkerState, ...], is_waited_for: bool) -> bool:
        """Return whether workers only did what others of this pod are about to do as well.

        They left an iteration, and the next plan waits for all; or they halt after a step. Workers that were ordered to
        enter an iteration are no urgent news either: the rendezvous has ordered it.
        """
        changed = _changed(workers, self._sent)
        entered = _entered(workers, self._sent)
        if entered and len(entered) == len(changed):
            return not any(worker.fault or worker.has_progress or worker.halted for worker in entered)
        if is_waited_for and not self._is_leaving_sent and all(map(_is_plainly_ready, changed)):
            return True
        if all(map(_is_answer, workers, self._sent)):
            return True
        return all(worker.halted is not None for worker in changed) and _are_halting(workers, self._sent)

    def _is_early(self, now_s: float) -> bool:
        if self._pending_since_s is None:
            self._pending_since_s = now_s
        return now_s < self._pending_since_s + _GATHER_S

    def _aged(self, state: WorkerState, now_s: float) -> WorkerState:
        """Add to a fault's age the time for which it could not be reported: the oldest fault names the culprit."""
        if state.fault is None:
            return state
        age_s = now_s - self._fault_since_s.get((state.local_rank, state.fault), now_s)
        return replace(state, fault=replace(state.fault, detect_s=min(state.fault.detect_s + age_s, MAX_SECONDS)))


def _entered(workers: tuple[WorkerState, ...], sent: tuple[WorkerState, ...]) -> list[WorkerState]:
    """Return the workers that have newly entered their iteration."""
    return [
        worker
        for worker, earlier in zip(workers, sent, strict=True)
        if worker.phase is WorkerPhase.RUNNING and worker.iteration > earlier.iteration
    ]


def _is_answer(worker: WorkerState, earlier: WorkerState) -> bool:
    """Return whether nothing is new but what the worker did when its iteration was ended."""
    return worker == replace(earlier, step=worker.step, activity=worker.activity)


def _is_plainly_ready(worker: WorkerState) -> bool:
    return worker.phase is WorkerPhase.READY and worker.fault is None and worker.answer is None


def _are_halting(workers: tuple[WorkerState, ...], sent: tuple[WorkerState, ...]) -> bool:
    """Return whether only answers to a Halt are new, and other workers of the pod have not given the same yet."""
    for worker, earlier in zip(workers, sent, strict=True):
        if worker != replace(earlier, step=worker.step, halted=worker.halted):
            return False
    answers = (worker.halted for worker in workers if worker.phase is WorkerPhase.RUNNING)
    return len({answer and (answer.number, answer.is_held, answer.is_done) for answer in answers}) > 1


def _changed(workers: tuple[WorkerState, ...], sent: tuple[WorkerState, ...]) -> list[WorkerState]:
    """Return the workers of which more than the step has changed."""
    return [worker for worker, earlier in zip(workers, sent, strict=True) if not _is_same(worker, earlier)]


def _is_same(worker: WorkerState, earlier: WorkerState) -> bool:
    if worker is earlier:
        return True
    has_moved = worker.phase is not earlier.phase or worker.iteration != earlier.iteration
    return not has_moved and worker == replace(earlier, step=worker.step)
