"""The job's metrics: what users watch, with labels from closed sets."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.rendezvous.refusals import Refusals
from unbroken.rendezvous.service import Service
from unbroken_core.messages import JobStatus, Recovery
from unbroken_core.reasons import Role

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class RecoveryMeter:
    """Counts each finished recovery once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._restarts = Counter(
            "unbroken_restarts", "Recoveries by the rung that they needed.", ["rung", "cause"], registry=registry
        )
        self._seconds = Histogram(
            "unbroken_recovery_seconds",
            "Seconds of each phase of a recovery.",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._last_number = 0

    def look(self, recoveries: tuple[Recovery, ...]) -> None:
        """Count what has finished since the last look."""
        for recovery in recoveries:
            if recovery.number <= self._last_number or not recovery.ended_at or recovery.rung is None:
                continue
            self._last_number = recovery.number
            self._restarts.labels(recovery.rung.value, recovery.cause.value).inc()
            for phase, seconds in recovery.phase_s.items():
                self._seconds.labels(phase).observe(seconds)


class StatusCollector(Collector):
    """Shows the status at the moment of the scrape."""

    def __init__(self, service: Service, refusals: Refusals) -> None:
        self._service = service
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by prometheus_client in the service's event loop."""
        status = self._service.status()
        yield _ranks(status)
        yield _gauge("unbroken_iteration", "Iteration of the job; -1 before the first.", status.iteration)
        if status.ettr is not None:
            yield _gauge(
                "unbroken_ettr_ratio",
                "Seconds of first-time progress / wall seconds since the job first ran.",
                status.ettr,
            )
        yield _gauge(
            "unbroken_heartbeat_age_seconds",
            "Seconds since the connected agent that is silent for longest was heard.",
            self._service.max_heartbeat_age_s,
        )
        refused = CounterMetricFamily("unbroken_refused", "Requests and messages that were refused.", labels=["reason"])
        for reason, count in self._refusals.counts.items():
            refused.add_metric([reason.value], count)
        yield refused
        broken = CounterMetricFamily(
            "unbroken_broken_spares",
            "Wholly spare pods of which a plan took some workers only, because no spare in use was as near.",
        )
        broken.add_metric([], status.broken_spares)
        yield broken


def _ranks(status: JobStatus) -> Metric:
    ranks = GaugeMetricFamily("unbroken_ranks", "Workers of the job by role.", labels=["role"])
    ranks.add_metric([Role.ACTIVE.value], status.world_size)
    ranks.add_metric([Role.SPARE.value], status.spare_ranks)
    ranks.add_metric(["lost"], status.lost_ranks)
    return ranks


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def make_metrics(service: Service, refusals: Refusals) -> Callable[[], bytes]:
    """Return a function that makes the text of /metrics."""
    registry = CollectorRegistry()
    meter = RecoveryMeter(registry)
    registry.register(StatusCollector(service, refusals))
    service.on_change(lambda: meter.look(service.status().recoveries))
    return lambda: generate_latest(registry)
