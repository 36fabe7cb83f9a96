"""One job's worker: its only writer. Wakes, observes, plans, acts, and plans again until there is nothing to do.

pod, node, service, job changed ──wake──>┐
rendezvous reported            ──wake──>─┤ observe -> plan -> apply ──actions done──> wake
time-out of the plan           ──────────┘           └──error──> back-off
"""

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from unbroken_operator.adapters.backoff import after_failure_s
from unbroken_operator.adapters.errors import KubeError, KubeNotFound, KubeUnavailable, NotLeading
from unbroken_operator.adapters.executor import Executor, Services
from unbroken_operator.adapters.job_secret import JobSecret
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.rendezvous_client import RendezvousTarget
from unbroken_operator.adapters.stores import HeldPods, JobKey, NodeStore, version_of
from unbroken_operator.api import layout
from unbroken_operator.api.recovery_models import Reaction
from unbroken_operator.decisions.actions import (
    COSTS,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateTokens,
    Decision,
    DeletePod,
    LetLead,
    PatchPod,
    PushObservation,
    RepairTokens,
    Revert,
    WriteStatus,
    within_budgets,
    without_lost_fields,
)
from unbroken_operator.decisions.admission import held
from unbroken_operator.decisions.circles import NUM_FREE
from unbroken_operator.decisions.lifecycle import job_outcome
from unbroken_operator.decisions.limits.budgets import PLANS, Budget, full, spend, wait_s
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.limits.report import ReportLimits, report_limits, wanted_pods
from unbroken_operator.decisions.limits.rollouts import RETRY_S
from unbroken_operator.decisions.limits.stored_status import STORED_STATUS, believed
from unbroken_operator.decisions.limits.weight import is_heavy
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import PodView, Snapshot, is_named_as

logger = logging.getLogger(__name__)

RESYNC_S = 300.0
SECRET_AGE_S = 300.0
TOKENS_AGE_S = 900.0
"""They change only by hand, or with the job's key."""
FRESH_SECRET_S = 5.0
STARTING_SECRET_S = 10.0
"""While a pod starts on its node: it waits there for the Secret, should that have been deleted."""
MIN_PAUSE_S = 0.05
"""Changes that come in a burst are planned together."""
BUG_PAUSE_S = 60.0
_CREATIONS = (CreateSecret, CreateTokens, CreateService, CreatePod)
MIN_HELD_S = 0.2
"""Shortest wait for a budget."""
NUM_QUICK = 256
"""Pods of a job whose plan takes 20 ms at most. All that grows with the pods of larger jobs is done in a thread, and
so is the plan of a heavy spec, whatever the number of its pods."""
HEAVY_PLANS = 5.0
"""So many others a plan of a heavy spec counts for: large jobs share the thread."""
NUM_MORE = 64
"""Training pods that a job may have for a moment beside those that it wants: more are not looked at for tokens."""
MAX_TOLD_FIELDS, MAX_FIELD = 32, 100
"""Most fields of a status that are reported, once each, and characters of the name of each."""
PEAK_S = 600.0
"""So long a job counts as having been as large as it was."""


Result = TypeVar("Result")


class JobWorker:
    """Runs one job. `is_gone` tells that the API server has no such job any more."""

    def __init__(self, job: Mapping[str, Any], shared: Services) -> None:
        self.job = job = held(job)
        self.key: JobKey = (job["metadata"]["namespace"], job["metadata"]["name"])
        self.uid: str = job["metadata"]["uid"]
        self.is_gone = False
        self._shared = shared
        self._wake = asyncio.Event()
        self._wake.set()
        self._is_starting = False
        """Whether a pod was starting on its node at the last look."""
        self._memory = JobMemory()
        self._is_heavy = is_heavy(job.get("spec"))
        self._has_new_spec = False
        """Since the last look."""
        refused = partial(shared.metrics.count_refusal, OperatorRefusal.REPORT)
        self._poller = Poller(shared.client, self._wake.set, "/".join(self.key), refused)
        self._plans = full(PLANS, time.monotonic())
        self._peak = (0, 0.0)
        """Most training pods lately, and when that was."""
        self._told: set[str] = set()
        """Fields of the status that were not believed, and have been reported."""
        self._tell_of_status(job)
        self._counted_generation: int | None = None
        """Of the last spec whose refusal was counted."""
        count = shared.metrics.count_refusal
        self._secret = JobSecret(shared.kube, self.key, self.uid, shared.options.encrypts, count)
        self._executor = Executor(shared, self._secret, self._poller, self._memory)

    def wake(self) -> None:
        """Plan soon."""
        self._wake.set()

    @property
    def minds_devices(self) -> bool:
        """Whether the newest spec leaves it at pods leaving when a device of theirs is broken."""
        spec = self.job.get("spec")
        signals = spec.get("nodeSignals") if isinstance(spec, dict) else None
        return not isinstance(signals, dict) or signals.get("devices") != Reaction.IGNORE.value

    def update(self, job: Mapping[str, Any]) -> None:
        """Take a newer state of the job."""
        if version_of(job) > version_of(self.job):
            self.replace(job)

    def replace(self, job: Mapping[str, Any]) -> None:
        """Take the job as it is, though its version may be lower: etcd was restored from a backup."""
        if version_of(job) == version_of(self.job):
            return
        job = held(job)
        if job["metadata"].get("generation") != self.job["metadata"].get("generation"):
            # A new spec deserves a new attempt at once. The memory may be in use, in a thread.
            self._has_new_spec = True
            self._is_heavy = is_heavy(job.get("spec"))
        self.job = job
        self._tell_of_status(job)
        self._wake.set()

    def _tell_of_status(self, job: Mapping[str, Any]) -> None:
        """Count what somebody else must have written into the status, and tell once of each field."""
        faults = believed(job[STORED_STATUS])[1] if STORED_STATUS in job else ()
        self._shared.metrics.count_refusal(OperatorRefusal.STATUS, len(faults))
        for fault in faults:
            field = re.sub(r"[^A-Za-z.]", "", fault.field)[:MAX_FIELD]
            if field not in self._told and len(self._told) < MAX_TOLD_FIELDS:
                self._told.add(field)
                words = (fault.field[:MAX_FIELD], fault.seen, fault.wanted)
                logger.warning("status is not believed job=%s/%s field=%s seen=%s wanted=%s", *self.key, *words)

    async def run(self) -> None:
        """Run until cancelled, or until the job is gone."""
        wait_s: float | None = None
        num_errors = 0
        self._wake.set()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), RESYNC_S if wait_s is None else min(wait_s, RESYNC_S))
                self._wake.clear()
                if self.is_gone:
                    return
                num_done = self._executor.num_done
                try:
                    wait_s = await self._reconcile()
                    num_errors = 0
                except KubeError as error:
                    # With increasing back-off, unless some actions succeeded.
                    num_errors = num_errors + 1 if num_done == self._executor.num_done else 1
                    await self._back_off(error, num_errors)
                    self._wake.set()
                except Exception:
                    # The boundary of one job: a bug that this one meets must not reach the others.
                    logger.exception("plan failed by a bug, trying again job=%s/%s in_s=%.0f", *self.key, BUG_PAUSE_S)
                    self._shared.metrics.reconcile_errors.inc()
                    await asyncio.sleep(BUG_PAUSE_S)
                    self._wake.set()
                await self._pause()
        finally:
            self._shared.pods.drop(self.key)
            self._shared.rollouts.give_back(self.uid)
            await self._poller.stop()

    async def _pause(self) -> None:
        """Let others go first: longer when this job planned all the time."""
        now_s = time.monotonic()
        self._plans = spend(self._plans, PLANS, HEAVY_PLANS if self._is_heavy else 1.0, now_s)
        await asyncio.sleep(max(MIN_PAUSE_S, wait_s(self._plans, PLANS, now_s)))

    async def _reconcile(self) -> float | None:
        with self._shared.metrics.reconcile_seconds.time():
            snapshot = await self._observe(STARTING_SECRET_S if self._is_starting else SECRET_AGE_S)
            decision = await self._decide(snapshot)
            self._memory.sound_spec = decision.sound_spec or self._memory.sound_spec
            if any(isinstance(action, CreatePod) for action in decision.actions):
                # New pods mount the Secret: be sure that it is there, however long ago it was read.
                again = await self._observe(FRESH_SECRET_S)
                if again.secret != snapshot.secret:
                    snapshot, decision = again, await self._decide(again)
            decision = self._afford(decision)
            try:
                version = str(snapshot.job["metadata"].get("resourceVersion", ""))
                refusals = await self._executor.apply(decision.actions, version)
            finally:
                self._pay()
                for action in decision.actions:
                    if isinstance(action, Revert | RepairTokens | PatchPod):
                        self._memory.note_revert(action.key, time.monotonic())
                    if isinstance(action, DeletePod):
                        self._memory.note_deleted(action.uid, action.why)
                    if isinstance(action, WriteStatus) and "lease" in action.patch:
                        self._memory.has_led = True
                if self._executor.written_job is not None:
                    self.update(self._executor.written_job)
                    self._executor.written_job = None
            if refusals or self._is_made(decision):
                self._memory.refuse(refusals, time.monotonic())
        if _is_worth_another_look(decision):
            self._wake.set()
        waits = [decision.check_after_s, STARTING_SECRET_S if self._is_starting else None]
        return min((wait for wait in waits if wait is not None), default=None)

    def _is_made(self, decision: Decision) -> bool:
        """Whether it shows that the API server refuses no more: a pod was made, or what was refused.

        Anybody can delete what is not a pod, and have it made again.
        """
        refused = {item.name for item in self._memory.refusals}
        made = [item for item in decision.actions if isinstance(item, _CREATIONS)]
        return any(isinstance(item, CreatePod) or item.manifest["metadata"]["name"] in refused for item in made)

    async def _decide(self, snapshot: Snapshot) -> Decision:
        """Return the plan; a rendezvous that works is replaced when the job has a place among those that do so."""
        rollouts = self._shared.rollouts
        decision = await self._plan(dataclasses.replace(snapshot, may_replace_rendezvous=False))
        if not decision.wants_new_rendezvous:
            if snapshot.is_reachable:
                rollouts.give_back(self.uid)
        elif rollouts.take(self.key[0], self.uid, time.monotonic()):
            decision = await self._plan(snapshot)
        else:
            retry_s = RETRY_S if decision.check_after_s is None else min(RETRY_S, decision.check_after_s)
            decision = dataclasses.replace(decision, check_after_s=retry_s)
        return without_lost_fields(decision, self._executor.lost_fields)

    async def _plan(self, snapshot: Snapshot) -> Decision:
        """Plan; beside the loop where that takes long. What changes meanwhile wakes this worker, as during actions."""
        if not self._is_large():
            return plan(snapshot)
        # What the loop changes in place.
        still = dataclasses.replace(snapshot, nodes=dict(snapshot.nodes), tokens=dict(snapshot.tokens))
        return await self._aside(partial(plan, still))

    def _afford(self, decision: Decision) -> Decision:
        """Hold back what the job's budgets do not allow; see that it is said, and tried later."""
        now_s, metrics = time.monotonic(), self._shared.metrics
        found = within_budgets(decision, self._memory.left(now_s))
        for name in found.dropped:
            self._memory.note_posted(name)
        waits = [] if decision.check_after_s is None else [decision.check_after_s]
        for budget, number in found.held.items():
            metrics.count_refusal(OperatorRefusal[budget.name], number)
            if budget is not Budget.EVENTS:
                waits.append(max(MIN_HELD_S, self._memory.wait_s(budget, now_s)))
            if self._memory.note_held(budget, now_s):
                logger.warning("job is held back job=%s/%s of=%s", *self.key, budget.value)
                self._wake.set()
        generation = self.job["metadata"].get("generation")
        if decision.counted and self._counted_generation != generation:
            self._counted_generation = generation
            for refusal in decision.counted:
                metrics.count_refusal(refusal)
        return dataclasses.replace(found.decision, check_after_s=min(waits, default=None))

    def _pay(self) -> None:
        """Spend what was tried."""
        attempts, self._executor.attempts = self._executor.attempts, Counter()
        for kind, number in attempts.items():
            if kind in COSTS:
                self._memory.spend(COSTS[kind], number, time.monotonic())

    async def _observe(self, secret_age_s: float) -> Snapshot:
        shared = self._shared
        if not self.job["metadata"].get("deletionTimestamp"):
            await self._refresh_secrets(secret_age_s)
            await self._executor.refresh_foreign_service()
            await self._executor.look_for_unsure_pods()
            await self._executor.look_for_released_pods()
        secret = self._secret
        found = await self._aside(partial(_look, shared.pods.held(self.key, self.uid), self.key[1], shared.nodes))
        now_s = time.monotonic()
        self._poller.limits = self._report_limits(found, now_s)
        self._poller.follow(self._target(found.rendezvous))
        snapshot = Snapshot(
            job=self.job,
            pods=found.pods,
            nodes=shared.nodes.nodes,
            secret=secret.view,
            service=shared.services.of_job(self.key) or self._executor.foreign_service,
            now=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            options=shared.options,
            num_ended=shared.pods.num_ended(self.key, self.uid),
            report=self._poller.report,
            report_from=self._poller.report_from,
            is_reachable=self._poller.is_reachable,
            unreachable_because=self._poller.unreachable_because,
            is_report_refused=self._poller.is_refused,
            unheard_for_s=self._poller.unheard_for_s,
            heard_at=self._poller.heard_at,
            released=tuple(self._executor.released.values()),
            has_job_key=secret.has_job_key,
            tokens=secret.tokens,
            hosts=found.hosts,
            tainted_devices=shared.pods.tainted,
            unseen_nodes=found.unseen_nodes,
        )
        self._is_starting = found.is_starting
        if self._has_new_spec:
            self._has_new_spec = False
            self._memory.note_new_spec()
        num_circles = self._memory.circles.num_rounds
        snapshot = await self._aside(partial(self._remember, snapshot, now_s))
        if self._memory.circles.num_rounds > max(num_circles, NUM_FREE):
            shared.metrics.count_refusal(OperatorRefusal.CIRCLE)
        return snapshot

    def _remember(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """Take what is seen into the memory, which is this worker's alone; return the snapshot with what it says."""
        owned = (*snapshot.trainers(), *snapshot.rendezvous_pods())
        self._memory.note_ordinals(snapshot.status)
        self._memory.note_lease(snapshot.options.lease, str(snapshot.status.get("lease") or ""), now_s)
        self._memory.update(owned, snapshot.report, job_outcome(snapshot) is not None, now_s)
        unseen = self._memory.note_unseen(snapshot.unseen_nodes, now_s)
        return dataclasses.replace(snapshot, memory=self._memory.view(now_s), unseen_nodes=unseen)

    async def _aside(self, work: Callable[[], Result]) -> Result:
        """Do this at once for a small job; for a large one, where it takes long, in a thread."""
        if not self._is_large():
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._shared.planner, work)

    def _is_large(self) -> bool:
        return (
            self._is_heavy or max(wanted_pods(self.job.get("spec")), self._shared.pods.num_of_job(self.key)) > NUM_QUICK
        )

    async def _refresh_secrets(self, secret_age_s: float) -> None:
        """Read the job's Secret again, and those that hold its pods' tokens, as far as they may have changed."""
        if self._secret.is_foreign:
            secret_age_s = min(secret_age_s, FRESH_SECRET_S)
        elif self._shared.client.is_token_old(self._poller.target):
            secret_age_s = min(secret_age_s, STARTING_SECRET_S)
        await self._secret.refresh(secret_age_s)
        held, num_most = self._shared.pods.held(self.key, self.uid), wanted_pods(self.job.get("spec")) + NUM_MORE
        blocks, starting = await self._aside(partial(_token_blocks, held, self.key[1], num_most))
        await self._secret.refresh_tokens(blocks, FRESH_SECRET_S if self._secret.is_foreign else TOKENS_AGE_S)
        await self._secret.refresh_tokens(starting, STARTING_SECRET_S)

    def _report_limits(self, found: "_Look", now_s: float) -> ReportLimits:
        """Return what the rendezvous may report; it learns a moment later than we that a job is smaller."""
        spec = self.job.get("spec")
        self._memory.resize(max(wanted_pods(spec), found.num_trainers))
        told = (self.job.get("status") or {}).get("nextPodOrdinal") or 0
        num_ordinals = max(told, self._memory.next_pod_ordinal)
        num = max(min(wanted_pods(spec), num_ordinals), found.num_trainers)
        if num >= self._peak[0] or now_s - self._peak[1] > PEAK_S:
            self._peak = (num, now_s)
        return report_limits(spec, self._peak[0], num_ordinals, found.uids)

    def _target(self, candidates: tuple[PodView, ...]) -> RendezvousTarget | None:
        if not candidates or not self._secret.token:
            return None
        pod = max(candidates, key=lambda pod: pod.ordinal)
        host = layout.rendezvous_host(self.key[1], self.key[0])
        return RendezvousTarget(pod.uid, pod.name, pod.ip, self._secret.token, self._secret.authority, host)

    async def _back_off(self, error: KubeError, num_errors: int) -> None:
        self._shared.metrics.reconcile_errors.inc()
        if not isinstance(error, KubeUnavailable):
            await self.check_existence()
        if self.is_gone:
            return
        delay_s = after_failure_s(error, num_errors, random.random())
        # Of the lease one line tells, for all jobs.
        level = logging.DEBUG if isinstance(error, NotLeading) else logging.WARNING
        logger.log(level, "plan failed, trying again job=%s/%s in_s=%.1f error=%s", *self.key, delay_s, error)
        await asyncio.sleep(delay_s)

    async def check_existence(self) -> None:
        """Notice a job that went without the watch telling of it."""
        try:
            job = await self._shared.kube.get(self._executor.job_path())
        except KubeNotFound:
            self.is_gone = True
        except KubeError:
            return
        else:
            self.is_gone = job["metadata"]["uid"] != self.uid
            if not self.is_gone:
                self.update(job)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What one look at the job's pods tells."""

    pods: tuple[PodView, ...]
    hosts: frozenset[str]
    num_trainers: int
    uids: frozenset[str]
    """Of the job's own training pods."""
    rendezvous: tuple[PodView, ...]
    """Those that may be asked."""
    is_starting: bool
    """Whether a pod is starting on its node."""
    unseen_nodes: frozenset[str]
    """Nodes of the job's own pods of which nobody has told."""


def _look(held: HeldPods, job: str, nodes: NodeStore) -> _Look:
    pods = held.by_name()
    owned = [pod for pod in pods if pod.owner_uid == held.owner_uid and is_named_as(pod, pod.component, job)]
    return _Look(
        pods,
        held.hosts(),
        sum(pod.component == layout.TRAINER for pod in pods),
        frozenset(pod.uid for pod in owned if pod.component == layout.TRAINER),
        tuple(
            pod
            for pod in owned
            if pod.component == layout.RENDEZVOUS
            and pod.ip
            and not pod.is_terminal
            and not pod.is_deleting
            and not pod.is_standby
        ),
        any(pod.node and pod.phase == "Pending" and not pod.is_deleting for pod in owned),
        nodes.unseen({pod.node for pod in owned if pod.node}),
    )


def _token_blocks(held: HeldPods, job: str, num_most: int) -> tuple[set[int], set[int]]:
    """Return the blocks of tokens of all training pods, and those of pods that are starting on their nodes.

    Each costs a request. More pods than the job may have are not all its own, and the plan deletes what is too much.
    """
    pods = (known.view for known in held.known if known.view.owner_uid == held.owner_uid)
    trainers = [pod for pod in pods if not pod.is_terminal and is_named_as(pod, layout.TRAINER, job)]
    if len(trainers) > num_most:
        trainers = sorted(trainers, key=lambda pod: pod.ordinal)[:num_most]
    blocks = {layout.token_block(pod.ordinal) for pod in trainers}
    return blocks, {layout.token_block(pod.ordinal) for pod in trainers if pod.node and pod.phase == "Pending"}


def _is_worth_another_look(decision: Decision) -> bool:
    return any(not isinstance(action, PushObservation | LetLead) for action in decision.actions)
