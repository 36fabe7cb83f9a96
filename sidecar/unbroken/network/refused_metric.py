"""The metric of refusals, for a job's rendezvous and for the one that serves torchrun."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from unbroken.network.refusals import Refusal


def refused_metric(counts: Mapping[Refusal, int]) -> Metric:
    """Return the family."""
    refused = CounterMetricFamily("unbroken_refused", "Refused requests and messages.", labels=["reason"])
    for reason, count in counts.items():
        refused.add_metric([reason.value], count)
    return refused
