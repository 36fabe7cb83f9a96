"""The metric of what was refused: of a job's rendezvous, and of the one for torchrun."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from unbroken.rendezvous.refusals import Refusal


def refused_metric(counts: Mapping[Refusal, int]) -> Metric:
    """Return the family."""
    refused = CounterMetricFamily("unbroken_refused", "Refused requests and messages.", labels=["reason"])
    for reason, count in counts.items():
        refused.add_metric([reason.value], count)
    return refused
