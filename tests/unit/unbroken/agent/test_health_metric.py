"""Results of health checks: from the worker's plug-ins to the agent's metric."""

import pytest
from prometheus_client import CollectorRegistry

from unbroken.agent.adapters.metrics import MAX_CHECKS, PodCollector, join_checks
from unbroken.agent.decisions.events import AgentMemory
from unbroken.agent.decisions.member import PodMember
from unbroken.agent.decisions.place import LocalPlace
from unbroken.inprocess.compose import Compose
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.interruption.gate import RankShouldRestart
from unbroken.inprocess.loop.health_record import HealthRecord
from unbroken.inprocess.state import FrozenState, State
from unbroken_core.pod.pod_messages import WorkerReport
from unbroken_core.protocol.messages import PROTOCOL, Hello
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import WorkerPhase

STATE = State(rank=0, world_size=1).freeze()


class Calm(HealthCheck):
    """Passes."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state."""
        return state


class Moody(HealthCheck):
    """Raises what it is given."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise, if there is anything to raise."""
        if self.error is not None:
            raise self.error
        return state


def test_each_part_of_a_composition_is_noted_by_its_class() -> None:
    record, moody = HealthRecord(), Moody()
    check = record.watch(Compose(Calm(), Compose(moody)))
    assert record.tell() == ()
    assert check(STATE) is STATE
    assert record.is_news
    assert record.tell() == (("Calm", True), ("Moody", True))
    moody.error = OSError("the device is gone")
    with pytest.raises(OSError, match="gone"):
        check(STATE)
    assert record.tell() == (("Calm", True), ("Moody", False))
    check_again = record.watch(Calm())
    assert check_again(STATE) is STATE
    assert not record.is_news


def test_interrupted_check_has_no_result() -> None:
    record, moody = HealthRecord(), Moody()
    moody.error = RankShouldRestart("another rank failed")
    with pytest.raises(RankShouldRestart):
        record.watch(moody)(STATE)
    assert record.tell() == ()


def test_failed_check_stays_until_another_process_of_the_place_passes() -> None:
    place = LocalPlace(0)
    failed = WorkerReport(WorkerPhase.STOPPING, 3, checks=(("CudaHealthCheck", False),))
    place.receive(failed)
    place.advance(1)
    place.receive(WorkerReport(WorkerPhase.READY, -1))
    assert place.checks == (("CudaHealthCheck", False),)
    place.receive(WorkerReport(WorkerPhase.RUNNING, 4, checks=(("CudaHealthCheck", True),)))
    assert place.checks == (("CudaHealthCheck", True),)


def test_pod_passes_a_check_where_all_of_its_workers_do() -> None:
    identity = Hello(PROTOCOL, "digits", "digits-0", "uid-0", "s", "node-0", 2)
    settings = JobSettings("digits", replicas=2, ranks_per_pod=2)
    member = PodMember(settings, identity, "127.0.0.9", AgentMemory(), now_s=0.0)
    member.places[0].checks = (("Calm", True), ("Moody", True))
    member.places[1].checks = (("Moody", False),)
    registry = CollectorRegistry()
    registry.register(PodCollector(member, lambda: 0, lambda: 0))
    seen = {name: registry.get_sample_value("unbroken_health_check", {"check": name}) for name in ("Calm", "Moody")}
    assert seen == {"Calm": 1.0, "Moody": 0.0}


def test_scripts_cannot_make_any_number_of_series() -> None:
    places = [[(f"Check{rank}-{number}", number != 99) for number in range(100)] for rank in range(8)]
    joined = join_checks([*places, [("C" * 1000, True)]], {})
    assert len(joined) == MAX_CHECKS + 1
    assert joined["other"] is False
    assert max(map(len, joined)) <= 64


def test_scripts_that_name_their_checks_anew_all_the_time_make_few_series() -> None:
    """Seen before: eight others with each iteration, which are kept for weeks where metrics are stored."""
    named: dict[str, None] = {}
    seen: set[str] = set()
    for iteration in range(1000):
        joined = join_checks([[("Calm", True), (f"Check of {iteration}", iteration % 2 == 0)]], named)
        assert joined["Calm"] is True
        seen |= joined.keys()
    assert len(seen) == MAX_CHECKS + 1


class Blind(Calm):
    """It may have nothing to look at."""

    has_checked = False


def test_check_that_had_nothing_to_look_at_is_no_result() -> None:
    """Not even where it has passed before: the metric would say what nobody knows."""
    record, blind = HealthRecord(), Blind()
    check = record.watch(blind)
    check(STATE)
    assert record.tell() == ()
    blind.has_checked = True
    check(STATE)
    assert record.tell() == (("Blind", True),)
    blind.has_checked = False
    check(STATE)
    assert record.tell() == ()
