"""The job's metrics: what users watch. Labels are from closed sets, or have a limited number of values at a time."""

import asyncio
import itertools
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.refused_metric import refused_metric
from unbroken.rendezvous.service import Service
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.messages import JobStatus, PodStatus, TimeSpent
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.recovery.account import ratios
from unbroken_core.recovery.history import History
from unbroken_core.vocabulary.findings import STRAGGLERS, WAS_SLOW, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Phase, Role, Rung, Spent, WorkerPhase

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
MAX_DOMAINS = 64
"""Spares are shown by the innermost layer that has no more domains than this."""


class RecoveryMeter(Collector):
    """Counts each finished recovery once. All series are there from the start: the first count is seen as a rise."""

    def __init__(self) -> None:
        # A second series for each of them, which nothing here reads.
        disable_created_metrics()
        self._restarts = Counter(
            "unbroken_restarts", "Recoveries by the rung that they needed.", ["rung", "cause"], registry=None
        )
        self._seconds = Histogram(
            "unbroken_recovery_seconds",
            "Seconds of each phase of a recovery.",
            ["phase"],
            buckets=BUCKETS_S,
            registry=None,
        )
        for rung, cause in itertools.product(Rung, Cause):
            self._restarts.labels(rung.value, cause.value)
        for phase in Phase:
            self._seconds.labels(phase.value)
        self._last_number = 0
        self._last_progress = 0

    def look(self, history: History) -> None:
        """Count what has finished since the last look. The first progress is known some time after the rest."""
        for incident in history.finished:
            if incident.ended_s is None or incident.rung is None:
                continue
            if incident.number > self._last_number:
                self._last_number = incident.number
                self._restarts.labels(incident.rung.value, incident.culprit.cause.value).inc()
                for phase in Phase:
                    if phase is not Phase.FIRST_PROGRESS and phase.value in incident.phase_s:
                        self._observe(phase, incident.phase_s[phase.value])
            progress_s = incident.phase_s.get(Phase.FIRST_PROGRESS.value)
            if progress_s is not None and incident.number > self._last_progress:
                self._last_progress = incident.number
                self._observe(Phase.FIRST_PROGRESS, progress_s)

    def _observe(self, phase: Phase, seconds: float) -> None:
        self._seconds.labels(phase.value).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        yield from self._restarts.collect()
        yield from self._seconds.collect()


@dataclass(frozen=True)
class View:
    """The job at the moment of a scrape."""

    status: JobStatus
    settings: JobSettings
    wanted_ranks: int
    gained_s: float
    lost_rank_s: float
    heartbeat_age_s: float
    refused: Mapping[Refusal, int]


class ViewCollector(Collector):
    """Shows the view that was taken last."""

    def __init__(self) -> None:
        self.view: View | None = None

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are known at the first scrape only, when there is a status to read."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by prometheus_client in a thread."""
        view = self.view
        if view is not None:
            yield from _state(view.status)
            yield from _workers(view)
            yield from _time(view)
            yield from _contact(view)
            yield _culprits(view.status)
            yield from _health(view.status)
            yield from _memory(view.status, view.settings)
            yield from _disk(view.status)


def _state(status: JobStatus) -> Iterator[Metric]:
    phases = GaugeMetricFamily("unbroken_phase", "1 for the job's current state, 0 for the others.", labels=["phase"])
    for phase in JobPhase:
        phases.add_metric([phase.value], int(phase is status.phase))
    yield phases
    yield _gauge("unbroken_iteration", "Iteration of the job; -1 before the first.", status.iteration)
    yield _gauge("unbroken_step", "Highest step that a worker has reported; -1 before the first.", status.max_step)
    yield _gauge("unbroken_term", "Term of the rendezvous, which rises with each new one.", status.term)


def _workers(view: View) -> Iterator[Metric]:
    status, settings = view.status, view.settings
    ranks = GaugeMetricFamily("unbroken_ranks", "Workers of the job by role.", labels=["role"])
    ranks.add_metric([Role.ACTIVE.value], status.world_size)
    ranks.add_metric([Role.SPARE.value], status.spare_ranks)
    ranks.add_metric(["lost"], status.lost_ranks)
    yield ranks
    wanted = GaugeMetricFamily("unbroken_wanted_ranks", "Workers that the job wants, by role.", labels=["role"])
    wanted.add_metric([Role.ACTIVE.value], view.wanted_ranks)
    wanted.add_metric([Role.SPARE.value], settings.spares * settings.ranks_per_pod)
    yield wanted
    spares = GaugeMetricFamily(
        "unbroken_spares",
        "Workers of wholly spare pods that are ready, by domain of the innermost layer that has at most 64 of them.",
        labels=["layer", "domain"],
    )
    layer, count_by_domain = count_spares(status.pods, [layer.name for layer in settings.layers])
    for domain, count in sorted(count_by_domain.items()):
        spares.add_metric([layer, domain], count)
    yield spares
    broken = CounterMetricFamily(
        "unbroken_broken_spares",
        "Whole spare pods that a plan had to break, because no partly used spare was as near.",
    )
    broken.add_metric([], status.broken_spares)
    yield broken


def _time(view: View) -> Iterator[Metric]:
    if view.status.ettr is not None:
        yield _gauge(
            "unbroken_ettr_ratio",
            "Seconds of first-time progress / wall seconds since the job first ran.",
            view.status.ettr,
        )
    progress = CounterMetricFamily(
        "unbroken_progress_seconds", "Seconds of first-time progress: its rate is the goodput, 0 to 1."
    )
    progress.add_metric([], view.gained_s)
    yield progress
    if view.status.time is not None:
        yield from _spent(view.status.time)
    lost = CounterMetricFamily(
        "unbroken_lost_gpu_seconds",
        "Seconds without first-time progress since the job first ran, times active ranks; one rank counts as one GPU.",
    )
    lost.add_metric([], view.lost_rank_s)
    yield lost


def _spent(time: TimeSpent) -> Iterator[Metric]:
    """Yield the terms and the ratios of them. No counters: they go on from what earlier rendezvous have counted."""
    seconds = GaugeMetricFamily(
        "unbroken_time_seconds",
        "Seconds since the job first ran, under earlier rendezvous too, by what they were for.",
        labels=["spent"],
    )
    for word in Spent:
        seconds.add_metric([word.value], getattr(time, f"{word.value}_s"))
    yield seconds
    shares = ratios(time)
    yield _gauge(
        "unbroken_ettr_capacity_ratio",
        "Progress times active ranks / time times wanted ranks, since the job first ran.",
        shares["ettr_capacity"],
    )
    yield _gauge(
        "unbroken_goodput_allocated_ratio",
        "Progress times active ranks / time times the ranks of all pods that were there, since the job first ran.",
        shares["goodput_allocated"],
    )


def _contact(view: View) -> Iterator[Metric]:
    yield _gauge(
        "unbroken_heartbeat_age_seconds",
        "Longest silence of a connected agent, in seconds.",
        view.heartbeat_age_s,
    )
    yield _gauge(
        "unbroken_heartbeat_timeout_seconds",
        "Age at which a pod counts as lost: timeouts.heartbeatSeconds.",
        view.settings.timeouts.heartbeat_s,
    )
    yield refused_metric(view.refused)


def _culprits(status: JobStatus) -> Metric:
    culprits = GaugeMetricFamily(
        "unbroken_recent_culprits",
        "The last 20 recoveries by node and innermost domain of the culprit, and by cause.",
        labels=["node", "domain", "cause"],
    )
    ended = (recovery for recovery in status.recoveries if recovery.ended_at and recovery.rung is not None)
    tally = Tally((recovery.node, recovery.domain, recovery.cause.value) for recovery in ended)
    for labels, count in sorted(tally.items()):
        culprits.add_metric(labels, count)
    return culprits


def _health(status: JobStatus) -> Iterator[Metric]:
    if status.health is None:
        return
    found = GaugeMetricFamily(
        "unbroken_health_findings",
        "Findings of the pods' watches and preflights by verdict, the worst 64.",
        labels=["verdict"],
    )
    verdicts = [item.finding.verdict for item in status.health.findings]
    for verdict in (Verdict.DEGRADED, Verdict.SUSPECT, Verdict.FATAL):
        found.add_metric([verdict.value], verdicts.count(verdict))
    yield found
    if status.health.num_paced:
        findings = (item.finding for item in status.health.findings)
        slow = sum(finding.check == STRAGGLERS and finding.code != WAS_SLOW for finding in findings)
        yield _gauge("unbroken_stragglers", "Ranks that hold all others up, at most 64.", slow)
        yield _gauge(
            "unbroken_compared_ranks",
            "Ranks whose busy time was compared in the last window; whether others are slow is not known.",
            status.health.num_paced,
        )
    yield _gauge("unbroken_health_pods", "Pods whose watch or preflight has said something.", status.health.num_pods)
    yield _gauge(
        "unbroken_health_unchecked",
        "Checks that could not look in some pod: no library, field or path.",
        sum(num_pods > 0 for _check, num_pods in status.health.unchecked),
    )
    yield _gauge(
        "unbroken_health_held",
        "1 while findings move no ranks, since so many at once point to a false alarm or to a switch.",
        int(bool(status.health.held)),
    )


def _memory(status: JobStatus, settings: JobSettings) -> Iterator[Metric]:
    """Yield what is safe in memory, in a job that saves there; what is protected only if it asked for copies."""
    memory = status.memory
    if memory is None:
        return
    yield _gauge(
        "unbroken_memory_complete_step",
        "Newest step whose checkpoint is in the memory of every rank's pod, verified; -1: none.",
        memory.complete_step,
    )
    if settings.copies:
        yield _gauge(
            "unbroken_memory_protected_step",
            "Newest step whose checkpoint also survives the loss of any one pod; -1: none.",
            memory.protected_step,
        )


def _disk(status: JobStatus) -> Iterator[Metric]:
    """Yield what is on the disk, in a job that writes checkpoints there in the background."""
    memory = status.memory
    if memory is None or not memory.disk_every:
        return
    yield _gauge("unbroken_disk_step", "Newest step that is whole on the disk; -1: none.", memory.disk_step)
    yield _gauge(
        "unbroken_disk_every_steps",
        "Most steps between two checkpoints that are written to the disk.",
        memory.disk_every,
    )
    newest = max(status.max_step, memory.complete_step)
    yield _gauge(
        "unbroken_disk_behind_steps",
        "Steps from the newest checkpoint on the disk (from step 0 without one) to the newest step of the job.",
        max(newest - max(memory.disk_step, 0), 0),
    )


def count_spares(pods: Sequence[PodStatus], layers: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Return the layer that was chosen and, for each of its domains in which a pod is, the ready workers of spare pods.

    A domain is named with the ones around it, outermost first; "job" and "all" stand for no layer.
    """
    for depth in range(len(layers), 0, -1):
        places = [pod for pod in pods if len(pod.domains) >= depth]
        domains = {"/".join(pod.domains[:depth]): 0 for pod in places}
        if len(domains) <= MAX_DOMAINS:
            for pod in places:
                domains["/".join(pod.domains[:depth])] += _num_spares(pod)
            return layers[depth - 1], domains
    return "job", {"all": sum(map(_num_spares, pods))}


def _num_spares(pod: PodStatus) -> int:
    return 0 if pod.ranks else pod.workers.count(WorkerPhase.READY)


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def make_metrics(service: Service, coordinator: Coordinator, refusals: Refusals) -> Callable[[], Awaitable[bytes]]:
    """Return what writes the text of /metrics: it looks at the job in the event loop, and writes in a thread."""

    def look() -> View:
        status, progress = service.status(), coordinator.progress
        now_s = service.now_s
        return View(
            status=status,
            settings=coordinator.settings,
            wanted_ranks=coordinator.wanted_ranks,
            gained_s=progress.gained_s(now_s),
            lost_rank_s=progress.lost_rank_s(now_s),
            heartbeat_age_s=service.max_heartbeat_age_s,
            refused=dict(refusals.counts),
        )

    registry = CollectorRegistry()
    meter, shown = RecoveryMeter(), ViewCollector()
    registry.register(meter)
    registry.register(shown)
    # At each change of a job of a thousand pods: the whole status would cost too much.
    service.on_change(lambda: meter.look(coordinator.history))

    async def write() -> bytes:
        shown.view = look()
        return await asyncio.to_thread(generate_latest, registry)

    return write
