"""The agent's metrics, computed at each scrape: nothing is counted on the recovery path."""

from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.agent.decisions.member import PodMember
from unbroken_core.reasons import WorkerPhase

MAX_CHECKS = 8
"""Health checks with a series of their own; they are named by the script."""
_OTHER_CHECKS = "other"
_MAX_NAME = 64


class PodCollector(Collector):
    """Metrics of one pod."""

    def __init__(self, member: PodMember, num_refused: Callable[[], int], num_unauthorized: Callable[[], int]) -> None:
        self._member = member
        self._num_refused = num_refused
        self._num_unauthorized = num_unauthorized

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
        for name, is_passed in join_checks(place.checks for place in self._member.places).items():
            checks.add_metric([name], int(is_passed))
        yield checks


def join_checks(found: Iterable[Iterable[tuple[str, bool]]]) -> dict[str, bool]:
    """Return whether each check passed wherever it was run; all but the first MAX_CHECKS in one, by name."""
    joined: dict[str, bool] = {}
    for name, is_passed in sorted((name[:_MAX_NAME], is_passed) for place in found for name, is_passed in place):
        key = name if name in joined or len(joined) < MAX_CHECKS else _OTHER_CHECKS
        joined[key] = joined.get(key, True) and is_passed
    return joined


def make_metrics(
    member: PodMember, num_refused: Callable[[], int], num_unauthorized: Callable[[], int]
) -> Callable[[], Awaitable[bytes]]:
    """Return what writes the text of /metrics; the numbers are those of the pod's servers and of the uplink."""
    registry = CollectorRegistry()
    registry.register(PodCollector(member, num_refused, num_unauthorized))

    async def write() -> bytes:
        return generate_latest(registry)

    return write
