"""The metric of refusals, for a job's rendezvous and for the one that serves torchrun."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from unbroken.network.refusals import Refusal


def refused_metric(counts: Mapping[Refusal, int]) -> Metric:
    """Return the metric family."""
    refused = CounterMetricFamily("unbroken_refused", "Requests and messages that were refused.", labels=["reason"])
    for reason, count in counts.items():
        refused.add_metric([reason.value], count)
    return refused
