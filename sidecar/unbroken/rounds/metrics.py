"""Metrics of rounds for torchrun. A run's name is no label: any client can invent another."""

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.network.refusals import Refusals
from unbroken.network.refused_metric import refused_metric
from unbroken.rounds.server import Rounds


class RoundsCollector(Collector):
    """All runs at the moment of the scrape."""

    def __init__(self, rounds: Rounds, refusals: Refusals) -> None:
        self._rounds = rounds
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by prometheus_client in the event loop."""
        rounds = self._rounds
        runs = GaugeMetricFamily("unbroken_torchrun_runs", "Known runs of torchrun.")
        runs.add_metric([], rounds.num_runs)
        yield runs
        nodes = GaugeMetricFamily(
            "unbroken_torchrun_nodes", "Nodes of all runs, including those whose connection has just broken."
        )
        nodes.add_metric([], rounds.num_nodes)
        yield nodes
        begun = CounterMetricFamily(
            "unbroken_torchrun_rounds", "Rounds that have begun: all of their nodes have reached the store."
        )
        begun.add_metric([], rounds.num_begun)
        yield begun
        yield refused_metric(self._refusals.counts)


def make_metrics(rounds: Rounds, refusals: Refusals) -> Callable[[], Awaitable[bytes]]:
    """Return what writes the text of /metrics."""
    registry = CollectorRegistry()
    registry.register(RoundsCollector(rounds, refusals))

    async def write() -> bytes:
        return generate_latest(registry)

    return write
