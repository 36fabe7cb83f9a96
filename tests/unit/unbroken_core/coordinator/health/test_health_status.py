"""What a status tells of findings where there are many, and of pods that tell nothing."""

from dataclasses import replace

import pytest

from unbroken_core.protocol.messages import HealthStatus
from unbroken_core.recovery.health_words import nodes_healthy, straggling
from unbroken_core.vocabulary.findings import MAX_FINDINGS, STRAGGLERS, Finding, Health, Verdict

from .test_health import DOWN, LOST, OBSERVE, OWN, WatchedBench

LAG = Finding(STRAGGLERS, "rank 0", Verdict.DEGRADED, "slow-rank")


def health_of(bench: WatchedBench) -> HealthStatus:
    health = bench.status().health
    assert health is not None
    return health


def test_no_pod_hides_what_others_have_found() -> None:
    """Seen before: a pod with 64 findings, as a trainer may forge them, left those of other pods out of the status."""
    bench = WatchedBench(OBSERVE)
    bench.find("p0", *(replace(LOST, entity=f"GPU-{number:02}") for number in range(MAX_FINDINGS)))
    bench.find("p1", replace(LOST, entity="GPU-b"))
    health = health_of(bench)
    pods = [item.pod for item in health.findings]
    assert (len(pods), pods[-1], health.num_findings) == (MAX_FINDINGS, "p1", MAX_FINDINGS + 1)
    assert "; and 62 more findings" in nodes_healthy(health).message


@pytest.mark.parametrize("is_slow", [False, True])
def test_neither_condition_is_well_because_the_other_has_much_to_tell(is_slow: bool) -> None:
    bench = WatchedBench(OBSERVE)
    table = bench.coordinator._job.health
    many = tuple(replace(LAG if is_slow else LOST, verdict=Verdict.SUSPECT, entity=f"{n:02}") for n in range(70))
    if is_slow:
        table.note_slow("uid-p0", many, 0.0)
        table.note("uid-p1", Health((DOWN,)), 0.0)
    else:
        table.note("uid-p0", Health(many), 0.0)
        table.note_slow("uid-p1", (LAG,), 0.0)
    health = health_of(bench)
    assert len(health.findings) == MAX_FINDINGS
    assert (nodes_healthy(health).is_true, straggling(health).is_true) == (False, True)


def test_pods_without_a_watch_are_not_checked() -> None:
    """Seen before: of pods that were made with health.mode Off nothing was said once another pod had a watch."""
    bench = WatchedBench(OBSERVE)
    bench.find("p0", OWN)
    bench.live(50.0)
    assert health_of(bench).unchecked == ()
    bench.live(20.0)
    assert health_of(bench).unchecked == (("watch", 1),)
    assert nodes_healthy(health_of(bench)).message == "nothing broken was found; not checked everywhere: watch"
    bench.find("p1", replace(OWN, check="watch", verdict=Verdict.UNKNOWN, code="ended"))
    assert health_of(bench).unchecked == (("watch", 1),)
    bench.find("p1", OWN)
    assert health_of(bench).unchecked == ()
