"""The operator's own measures, and those of its jobs, which go when the job goes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken_operator.api.status_models import JobStateWord
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.quarantine import WithheldBecause

JobStatuses = Callable[[], Iterable[tuple[str, str, Mapping[str, Any]]]]
"""Returns namespace, name and status of every job."""


class OperatorMetrics:
    """One registry, not the process-wide one."""

    def __init__(self) -> None:
        # A second series for each counter, which nothing here reads.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconcile_seconds = Histogram(
            "unbroken_operator_reconcile_seconds",
            "Seconds from the start of a plan until its last action is done",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "unbroken_operator_reconcile_errors", "Plans that could not be carried out", registry=self.registry
        )
        self.actions = Counter("unbroken_operator_actions", "Actions carried out", ["action"], registry=self.registry)
        self.api_calls = Counter(
            "unbroken_operator_api_calls",
            "Calls to the API server by HTTP status, or error when there was none",
            ["verb", "resource", "outcome"],
            registry=self.registry,
        )
        self.reviews = Counter(
            "unbroken_operator_reviews",
            "Job reviews that the API server requested from the webhook",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("allowed", "refused", "unreadable", "too-large", "busy"):
            self.reviews.labels(outcome)
        self.refused_connections = Counter(
            "unbroken_operator_refused_connections",
            "Connections to the operator's ports that were closed without a whole answer, by reason",
            ["because"],
            registry=self.registry,
        )
        for closed_because in ("too-many", "handshake", "slow", "in-pieces"):
            self.refused_connections.labels(closed_because)
        self.quarantine_withheld = Counter(
            "unbroken_operator_quarantine_withheld",
            "Nodes with a high score that were not quarantined, by reason",
            ["because"],
            registry=self.registry,
        )
        for because in WithheldBecause:
            self.quarantine_withheld.labels(because.value)

        self.refusals = Counter(
            "unbroken_operator_refusals",
            "What the operator refused of jobs, or held back so that it costs other jobs nothing, by kind",
            ["what"],
            registry=self.registry,
        )
        for what in OperatorRefusal:
            self.refusals.labels(what.value)

    def count_refusal(self, what: OperatorRefusal, number: int = 1) -> None:
        """Count what was refused of a job, or held back."""
        self.refusals.labels(what.value).inc(number)

    def count_withheld(self, because: str) -> None:
        """Count a node that is not quarantined although its score is high enough."""
        self.quarantine_withheld.labels(because).inc()

    def count_review(self, outcome: str) -> None:
        """Count one review: allowed, refused, unreadable, too-large or busy."""
        self.reviews.labels(outcome).inc()

    def count_refused(self, because: str) -> None:
        """Count a connection that was closed without a whole answer."""
        self.refused_connections.labels(because).inc()

    def count_call(self, verb: str, resource: str, outcome: str) -> None:
        """Count one call to the API server."""
        self.api_calls.labels(verb, resource, outcome).inc()

    def show_lead(self, may_act: Callable[[], bool]) -> None:
        """Show from now on whether this process leads."""
        gauge = Gauge("unbroken_operator_leads", "1 while this operator holds the lease", registry=self.registry)
        gauge.set_function(may_act)

    def show_jobs(self, statuses: JobStatuses) -> None:
        """Show the jobs from now on."""
        self.registry.register(_JobCollector(statuses))


class _JobCollector(Collector):
    """Reads the jobs at each scrape, so that nothing is left of a job that went."""

    def __init__(self, statuses: JobStatuses) -> None:
        self._statuses = statuses

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["namespace", "training_job"]
        jobs = GaugeMetricFamily("unbroken_operator_jobs", "Jobs by state", labels=["state"])
        states = GaugeMetricFamily(
            "unbroken_job_state", "1 for the state that a job is in, also after its end", labels=[*labels, "state"]
        )
        ranks = GaugeMetricFamily("unbroken_job_ranks", "Ranks by role", labels=[*labels, "role"])
        iteration = GaugeMetricFamily("unbroken_job_iteration", "Current iteration", labels=labels)
        restarts = GaugeMetricFamily("unbroken_job_restarts", "Recoveries so far by rung", labels=[*labels, "rung"])
        ettr = GaugeMetricFamily("unbroken_job_ettr_ratio", "Share of time with first-time progress", labels=labels)
        counts = dict.fromkeys((state.value for state in JobStateWord), 0)
        for namespace, name, status in self._statuses():
            state = status.get("state") or JobStateWord.FORMING.value
            counts[state] = counts.get(state, 0) + 1
            states.add_metric([namespace, name, state], 1)
            for role, number in (status.get("ranks") or {}).items():
                ranks.add_metric([namespace, name, role], number)
            for rung, number in ((status.get("restarts") or {}).get("byRung") or {}).items():
                restarts.add_metric([namespace, name, rung], number)
            if "iteration" in status:
                iteration.add_metric([namespace, name], status["iteration"])
            if "ettr" in status:
                ettr.add_metric([namespace, name], status["ettr"])
        for state, number in counts.items():
            jobs.add_metric([state], number)
        yield from (jobs, states, ranks, iteration, restarts, ettr)
