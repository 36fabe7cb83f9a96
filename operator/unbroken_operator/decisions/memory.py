"""What the operator remembers of a job between two plans. Pure: the time comes in as an argument."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken_core.protocol.messages import JobStatus, Observation, RungUse
from unbroken_core.vocabulary.reasons import Cause, Rung
from unbroken_operator.decisions.circles import Circles, next_circles, with_creation, with_deletion, with_new_spec
from unbroken_operator.decisions.limits.budgets import (
    ROUNDING,
    Allowance,
    Bucket,
    Budget,
    allowances,
    full,
    left,
    spend,
    wait_s,
)
from unbroken_operator.decisions.limits.retry import retry_delay_s
from unbroken_operator.decisions.predecessor import Predecessor, earlier_run, follow, gone_pods
from unbroken_operator.decisions.snapshot import PlanMemory, PodView, WriteRefusal

MAX_RECOVERIES = 200
"""So many are remembered, more than any sensible budget allows in its window."""
REVERTS_S = 600.0
"""How long a revert is remembered: a change after that is no fight."""
MAX_POSTED = 500
STAND_BACK_S = 600.0
"""So long an operator leaves a job alone that another one leads as well; then it looks whether that is still so."""
UNSEEN_S = 180.0
"""So long a node that a pod names may be one of which the watch has yet to tell: a watch that has died in silence is
noticed sooner."""
THROTTLED_S = 600.0
"""So long a job that was held back is said to be."""


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
    is_spec_new: bool = False
    """Whether the job's spec has changed since the last refusal."""
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
    buckets: dict[Budget, Bucket] = field(default_factory=dict)
    """What is left of the job's budgets, where anything was spent."""
    allowances: dict[Budget, Allowance] = field(default_factory=lambda: allowances(1))
    held_at: dict[Budget, float] = field(default_factory=dict)
    """When something was held back last."""
    next_pod_ordinal: int = 0
    unused_ordinals: frozenset[int] = frozenset()
    next_rendezvous_ordinal: int = 0
    sound_spec: Mapping[str, Any] | None = None
    unseen_since: dict[str, float] = field(default_factory=dict)
    """When pods of the job were first known to be on a node that was not, by its name."""
    predecessor: Predecessor = field(default_factory=Predecessor)
    has_led: bool = False
    """Whether the job's status has named this operator's Lease."""
    rival: str = ""
    """The Lease of another operator that has written over it."""
    rival_at: float = 0.0

    def update(self, pods: Iterable[PodView], report: JobStatus | None, is_over: bool, now_s: float) -> None:
        """Take in what is seen now."""
        pods = list(pods)
        self.predecessor = follow(self.predecessor, report, pods, now_s)
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
        self.is_spec_new = False

    def note_created(self, uid: str, now_s: float) -> None:
        """Remember that the API server has made this pod."""
        self.circles = with_creation(self.circles, uid, now_s)

    def note_deleted(self, uid: str, why: str) -> None:
        """Remember that the operator wants this pod gone."""
        self.circles = with_deletion(self.circles, uid, why)

    def note_new_spec(self) -> None:
        """Remember that the job's spec is another one: it deserves a new attempt soon.

        With one pod, and no sooner after a refusal than the second attempt of all: a spec may change each second.
        """
        self.circles = with_new_spec(self.circles)
        self.refusals, self.is_spec_new = (), True

    def resize(self, num_pods: int) -> None:
        """Let the job's budgets be those of a job of so many pods."""
        self.allowances = allowances(num_pods)

    def left(self, now_s: float) -> dict[Budget, float]:
        """Return how much of each budget may be spent now."""
        return {budget: left(self._bucket(budget, now_s), self.allowances[budget], now_s) for budget in Budget}

    def wait_s(self, budget: Budget, now_s: float) -> float:
        """Return the seconds until something of a budget may be spent."""
        return wait_s(self._bucket(budget, now_s), self.allowances[budget], now_s)

    def spend(self, budget: Budget, number: int, now_s: float) -> None:
        """Remember what was tried, whether or not it succeeded: the API server had to answer."""
        self.buckets[budget] = spend(self._bucket(budget, now_s), self.allowances[budget], number, now_s)

    def note_held(self, budget: Budget, now_s: float) -> bool:
        """Remember that something was held back; return whether that is news."""
        is_news = budget not in self._throttled(now_s)
        self.held_at[budget] = now_s
        return is_news

    def note_revert(self, key: str, now_s: float) -> None:
        """Remember that this was reverted, or that it was tried."""
        self.reverted = {name: found for name, found in self.reverted.items() if now_s - found[1] <= REVERTS_S}
        self.reverted[key] = (self.reverted.get(key, (0, 0.0))[0] + 1, now_s)

    def note_ordinals(self, status: Mapping[str, Any]) -> None:
        """Remember which ordinals were used: a status that is restored from a backup does not know the last ones."""
        self.next_pod_ordinal = max(self.next_pod_ordinal, status.get("nextPodOrdinal") or 0)
        self.next_rendezvous_ordinal = max(self.next_rendezvous_ordinal, status.get("nextRendezvousOrdinal") or 0)

    def note_tried(self, planned: Iterable[int], tried: Iterable[int]) -> None:
        """Remember which of the training pods of a plan were certainly not made: others get their ordinals."""
        self.unused_ordinals = (self.unused_ordinals | frozenset(planned)) - frozenset(tried)

    def note_lease(self, own: str, named: str, now_s: float) -> None:
        """Remember which Lease the job's status names: another one after this operator's own is that of a rival."""
        if own and named == own:
            self.has_led = True
        elif own and named and self.has_led:
            self.has_led, self.rival, self.rival_at = False, named, now_s

    def note_unseen(self, nodes: frozenset[str], now_s: float) -> frozenset[str]:
        """Remember which nodes of the job's pods were not seen; return those that are still waited for."""
        self.unseen_since = {name: self.unseen_since.get(name, now_s) for name in nodes}
        return frozenset(name for name, since in self.unseen_since.items() if now_s - since < UNSEEN_S)

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
            since_refusal_s=now_s - self.refused_at + self._remitted_s(),
            uses=tuple((used[2], RungUse(used[0], now_s - used[1])) for used in self.recovered.values() if used),
            reverts={key: (num, now_s - at) for key, (num, at) in self.reverted.items() if now_s - at <= REVERTS_S},
            posted=frozenset(self.posted),
            num_circles=self.circles.num_rounds,
            since_circle_s=now_s - self.circles.last_at,
            last_circle=self.circles.last,
            creations_left=max(0, int(self.left(now_s)[Budget.POD_CREATIONS] + ROUNDING)),
            creation_wait_s=self.wait_s(Budget.POD_CREATIONS, now_s),
            throttled=self._throttled(now_s),
            next_pod_ordinal=self.next_pod_ordinal,
            unused_ordinals=self.unused_ordinals,
            next_rendezvous_ordinal=self.next_rendezvous_ordinal,
            sound_spec=self.sound_spec,
            rival=self.rival if now_s - self.rival_at < STAND_BACK_S else "",
            rival_for_s=now_s - self.rival_at,
            gone=gone_pods(self.predecessor, now_s),
            earlier=earlier_run(self.predecessor, now_s),
            earlier_term=0 if self.predecessor.before is None else self.predecessor.before.term,
        )

    def _remitted_s(self) -> float:
        """Return the part of the wait after a refusal that a new spec does without."""
        return retry_delay_s(self.num_refused_rounds) - retry_delay_s(1) if self.is_spec_new else 0.0

    def _bucket(self, budget: Budget, now_s: float) -> Bucket:
        return self.buckets.get(budget) or full(self.allowances[budget], now_s)

    def _throttled(self, now_s: float) -> tuple[Budget, ...]:
        return tuple(item for item in Budget if now_s - self.held_at.get(item, -THROTTLED_S) < THROTTLED_S)

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
