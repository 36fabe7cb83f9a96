"""The agent's metrics, computed at each scrape: nothing is counted on the recovery path."""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from unbroken.agent.decisions.log_lines import LogLines
from unbroken.agent.decisions.member import PodMember
from unbroken_core.pod.memory_messages import LOAD_SOURCES, SAVE_BOUNDS_S, SKIP_REASONS, Counted
from unbroken_core.vocabulary.reasons import WorkerPhase

MAX_CHECKS = 8
"""Health checks with a series of their own; they are named by the script."""
_OTHER_CHECKS = "other"
_MAX_NAME = 64


class PodCollector(Collector):
    """Metrics of one pod."""

    def __init__(
        self,
        member: PodMember,
        num_refused: Callable[[], int],
        num_unauthorized: Callable[[], int],
        checkpoints: Callable[[], Counted | None] = lambda: None,
    ) -> None:
        self._member = member
        self._checkpoints = checkpoints
        self._num_refused = num_refused
        self._num_unauthorized = num_unauthorized
        self._checks: dict[str, None] = {}
        """Health checks that have a series of their own."""

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by prometheus_client in the agent's event loop."""
        phases = [worker.phase for worker in self._member.workers]
        workers = GaugeMetricFamily("unbroken_agent_workers", "Workers of this pod by phase.", labels=["phase"])
        for phase in WorkerPhase:
            workers.add_metric([phase.value], phases.count(phase))
        yield workers
        connected = GaugeMetricFamily("unbroken_agent_connected", "1 while the rendezvous has accepted this agent.")
        connected.add_metric([], int(self._member.is_accepted))
        yield connected
        iteration = GaugeMetricFamily("unbroken_agent_iteration", "Iteration of the newest plan; -1 before the first.")
        iteration.add_metric([], self._member.instructions.plan.iteration if self._member.instructions.plan else -1)
        yield iteration
        refused = CounterMetricFamily(
            "unbroken_agent_refused", "Refused connections to the pod's socket and to the port of its metrics."
        )
        refused.add_metric([], self._num_refused())
        yield refused
        unauthorized = CounterMetricFamily(
            "unbroken_agent_unauthorized", "Connections that the rendezvous refused because of this pod's token."
        )
        unauthorized.add_metric([], self._num_unauthorized())
        yield unauthorized
        checks = GaugeMetricFamily(
            "unbroken_health_check",
            "1 when the last run of a health check passed on all workers of this pod that ran it, 0 otherwise.",
            labels=["check"],
        )
        for name, is_passed in join_checks((place.checks for place in self._member.places), self._checks).items():
            checks.add_metric([name], int(is_passed))
        yield checks
        if self._member.settings.log_rules:
            yield from log_families(self._member.log_lines)
        counted = self._checkpoints()
        if counted is not None:
            yield from memory_families(counted, time.monotonic())


def log_families(lines: LogLines) -> Iterator[Metric]:
    """Yield the metrics of log rules, in the pods of a job that has some."""
    spoken = CounterMetricFamily(
        "unbroken_log_rule_spoken", "Times that a log rule has spoken about workers of this pod.", labels=["rule"]
    )
    for name, num in lines.num_spoken.items():
        spoken.add_metric([name], num)
    yield spoken
    skipped = CounterMetricFamily(
        "unbroken_log_rules_skipped_bytes",
        "Bytes of output of this pod's workers that log rules did not see, because there was too much.",
    )
    skipped.add_metric([], lines.num_skipped)
    yield skipped


def join_checks(found: Iterable[Iterable[tuple[str, bool]]], named: dict[str, None]) -> dict[str, bool]:
    """Return whether each check passed wherever it was run; all but the first MAX_CHECKS that were ever told in one.

    `named`: those, to be kept for the next time: a script may call its checks otherwise in each iteration.
    """
    joined: dict[str, bool] = {}
    for name, is_passed in sorted((name[:_MAX_NAME], is_passed) for place in found for name, is_passed in place):
        if len(named) < MAX_CHECKS:
            named[name] = None
        key = name if name in named else _OTHER_CHECKS
        joined[key] = joined.get(key, True) and is_passed
    return joined


def _disk_families(counted: Counted, now_s: float) -> Iterator[Metric]:
    """Yield the metrics of checkpoints on the disk, in the pod with rank 0."""
    failures = CounterMetricFamily(
        "unbroken_memory_disk_failures", "Parts of checkpoints that workers of this pod did not write to the disk."
    )
    failures.add_metric([], counted.disk_failures)
    yield failures
    if counted.disk_step >= 0:
        step = GaugeMetricFamily(
            "unbroken_memory_disk_step", "Newest step on the disk that this pod knew of while it had rank 0."
        )
        step.add_metric([], counted.disk_step)
        yield step
    if counted.disk_whole_at_s >= 0:
        age = GaugeMetricFamily(
            "unbroken_memory_disk_age_seconds",
            "Seconds since that step was whole on the disk; absent if this pod did not see it.",
        )
        age.add_metric([], max(now_s - counted.disk_whole_at_s, 0.0))
        yield age


def memory_families(counted: Counted, now_s: float) -> Iterator[Metric]:
    """Yield the metrics of checkpoints in memory, in the pods of a job that has some. `now_s`: monotonic."""
    yield from _disk_families(counted, now_s)
    used = GaugeMetricFamily("unbroken_memory_used_bytes", "Memory of this pod's slots for checkpoints.")
    used.add_metric([], counted.used_bytes)
    yield used
    limit = GaugeMetricFamily("unbroken_memory_limit_bytes", "Memory that the slots of this pod may take.")
    limit.add_metric([], counted.limit_bytes)
    yield limit
    saves = HistogramMetricFamily(
        "unbroken_memory_save_seconds", "Seconds that workers of this pod spent in a save of a checkpoint in memory."
    )
    upper = [*map(str, SAVE_BOUNDS_S), "+Inf"]
    saves.add_metric([], list(zip(upper, accumulate(counted.saves), strict=True)), counted.save_seconds)
    yield saves
    skips = CounterMetricFamily(
        "unbroken_memory_skipped", "Saves of workers of this pod that were due and not made.", labels=["reason"]
    )
    for reason, num in zip(SKIP_REASONS, counted.skips, strict=True):
        skips.add_metric([reason], num)
    yield skips
    loads = SummaryMetricFamily(
        "unbroken_memory_restore_seconds",
        "Seconds that workers of this pod took to restore a state, by where it came from.",
        labels=["source"],
    )
    for source, num, seconds in zip(LOAD_SOURCES, counted.loads, counted.load_seconds, strict=True):
        loads.add_metric([source], num, seconds)
    yield loads
    redone = GaugeMetricFamily(
        "unbroken_memory_steps_redone",
        "Steps that were trained again after the last restore; -1: no worker of this pod remembers.",
    )
    redone.add_metric([], counted.steps_redone)
    yield redone
    failures = CounterMetricFamily(
        "unbroken_memory_digest_failures",
        "Checkpoints that this pod made, read or received whose content is not what was saved.",
    )
    failures.add_metric([], counted.digest_failures)
    yield failures
    refused = CounterMetricFamily(
        "unbroken_memory_refused",
        "Connections and messages that this pod's keeper refused, of its workers and on the port for other pods.",
    )
    refused.add_metric([], counted.num_refused)
    yield refused
    between = CounterMetricFamily(
        "unbroken_memory_peer_bytes",
        "Bytes of checkpoints that this pod's keeper copied to other pods, which keep them, or fetched for a restore.",
        labels=["direction"],
    )
    between.add_metric(["copied"], counted.copied_bytes)
    between.add_metric(["fetched"], counted.fetched_bytes)
    yield between


def make_metrics(
    member: PodMember,
    num_refused: Callable[[], int],
    num_unauthorized: Callable[[], int],
    checkpoints: Callable[[], Counted | None] = lambda: None,
) -> Callable[[], Awaitable[bytes]]:
    """Return what writes the text of /metrics; the numbers are those of the pod's servers, uplink and keeper."""
    registry = CollectorRegistry()
    registry.register(PodCollector(member, num_refused, num_unauthorized, checkpoints))

    async def write() -> bytes:
        return generate_latest(registry)

    return write
