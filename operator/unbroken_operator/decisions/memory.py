"""What the operator remembers of a job between two plans. Pure: the time comes in as an argument."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken_core.messages import JobStatus, Observation, RungUse
from unbroken_core.reasons import Cause, Rung
from unbroken_operator.decisions.circles import Circles, next_circles, with_creation, with_deletion, with_new_spec
from unbroken_operator.decisions.retry import retry_delay_s
from unbroken_operator.decisions.snapshot import PlanMemory, PodView, WriteRefusal

MAX_RECOVERIES = 200
"""So many are remembered, more than any sensible budget allows in its window."""
REVERTS_S = 600.0
"""How long a revert is remembered: a change after that is no fight."""
MAX_POSTED = 500


@dataclass
class JobMemory:
    """One job's memory; all times are monotonic seconds of this process."""

    joined: set[str] = field(default_factory=set)
    """Uids of pods that were members at some time."""
    failed: set[str] = field(default_factory=set)
    """Uids of failed pods that were counted."""
    deleting_since: dict[str, float] = field(default_factory=dict)
    finished_at: float | None = None
    num_early_failures: int = 0
    failed_at: float = 0.0
    refusals: tuple[WriteRefusal, ...] = ()
    num_refused_rounds: int = 0
    refused_at: float = 0.0
    sent_to: str = ""
    sent_term: int = 0
    sent: Observation | None = None
    is_started: bool = False
    recovered: dict[tuple[int, int], tuple[Rung, float, Cause] | None] = field(default_factory=dict)
    """Rung, time and cause of each recovery that has ended, by term and number; None for what was over before."""
    has_report: bool = False
    reverted: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How often what was reverted, and when last, by key of the action."""
    posted: dict[str, None] = field(default_factory=dict)
    """Names of Events, oldest first."""
    circles: Circles = field(default_factory=Circles)
    sound_spec: Mapping[str, Any] | None = None

    def update(self, pods: Iterable[PodView], report: JobStatus | None, is_over: bool, now_s: float) -> None:
        """Take in what is seen now."""
        pods = list(pods)
        self._count_joins(report)
        self._count_recoveries(report, now_s)
        self._count_failures(pods, now_s)
        self.circles = next_circles(self.circles, pods, self.joined, now_s, is_first=not self.is_started)
        uids = {pod.uid for pod in pods}
        deleting = {pod.uid for pod in pods if pod.is_deleting}
        self.deleting_since = {uid: self.deleting_since.get(uid, now_s) for uid in deleting}
        self.joined &= uids
        self.failed &= uids
        if is_over and self.finished_at is None:
            self.finished_at = now_s
        self.is_started = True

    def refuse(self, refusals: tuple[WriteRefusal, ...], now_s: float) -> None:
        """Remember what the API server refused in the last round; nothing means that all went well."""
        self.num_refused_rounds = self.num_refused_rounds + 1 if refusals else 0
        self.refusals = refusals
        self.refused_at = now_s

    def note_created(self, uid: str, now_s: float) -> None:
        """Remember that the API server has made this pod."""
        self.circles = with_creation(self.circles, uid, now_s)

    def note_deleted(self, uid: str, why: str) -> None:
        """Remember that the operator wants this pod gone."""
        self.circles = with_deletion(self.circles, uid, why)

    def note_new_spec(self) -> None:
        """Remember that the job's spec is another one: it deserves a new attempt soon."""
        self.circles = with_new_spec(self.circles)

    def note_revert(self, key: str, now_s: float) -> None:
        """Remember that this was reverted, or that it was tried."""
        self.reverted = {name: found for name, found in self.reverted.items() if now_s - found[1] <= REVERTS_S}
        self.reverted[key] = (self.reverted.get(key, (0, 0.0))[0] + 1, now_s)

    def note_posted(self, event: str) -> None:
        """Remember that the API server has this Event, or does not take it."""
        self.posted[event] = None
        while len(self.posted) > MAX_POSTED:
            del self.posted[next(iter(self.posted))]

    def remember_sent(self, pod_uid: str, term: int, observation: Observation) -> None:
        """Remember the Observation that a rendezvous took."""
        self.sent_to, self.sent_term, self.sent = pod_uid, term, observation

    def view(self, now_s: float) -> PlanMemory:
        """Return the memory as plans see it."""
        return PlanMemory(
            sent_to=self.sent_to,
            sent_term=self.sent_term,
            sent=self.sent,
            deleting_for_s={uid: now_s - since for uid, since in self.deleting_since.items()},
            finished_for_s=0.0 if self.finished_at is None else now_s - self.finished_at,
            num_early_failures=self.num_early_failures,
            since_failure_s=now_s - self.failed_at,
            refusals=self.refusals,
            num_refused_rounds=self.num_refused_rounds,
            since_refusal_s=now_s - self.refused_at,
            uses=tuple((used[2], RungUse(used[0], now_s - used[1])) for used in self.recovered.values() if used),
            reverts={key: (num, now_s - at) for key, (num, at) in self.reverted.items() if now_s - at <= REVERTS_S},
            posted=frozenset(self.posted),
            num_circles=self.circles.num_rounds,
            since_circle_s=now_s - self.circles.last_at,
            last_circle=self.circles.last,
            sound_spec=self.sound_spec,
        )

    def _count_recoveries(self, report: JobStatus | None, now_s: float) -> None:
        if report is None:
            return
        for item in report.recoveries:
            if item.ended_at and item.rung is not None:
                self.recovered.setdefault(
                    (report.term, item.number), (item.rung, now_s, item.cause) if self.has_report else None
                )
        self.has_report = True
        while len(self.recovered) > MAX_RECOVERIES:
            del self.recovered[next(iter(self.recovered))]

    def _count_joins(self, report: JobStatus | None) -> None:
        members = {pod.uid for pod in report.pods if pod.is_connected} if report is not None else set()
        if members - self.joined:
            self.num_early_failures = 0
        self.joined |= members

    def _count_failures(self, pods: list[PodView], now_s: float) -> None:
        # A pod that is being deleted says nothing about the template either.
        fresh = {pod.uid for pod in pods if pod.phase == "Failed" and not pod.is_deleting} - self.failed
        self.failed |= fresh
        # What failed before this process looked may have trained for days: it says nothing about the template.
        early = fresh - self.joined if self.is_started else set()
        # Pods that fail together count once: the delay grows with the attempts, not with the size of the job.
        if early and now_s - self.failed_at >= retry_delay_s(self.num_early_failures):
            self.num_early_failures += 1
            self.failed_at = now_s
