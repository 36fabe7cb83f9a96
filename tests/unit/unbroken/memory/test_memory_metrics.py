"""What workers measure reaches the pod's metrics in bounded sums."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unbroken.agent.adapters.keeper_process import is_sound
from unbroken.agent.adapters.metrics import memory_families
from unbroken.keeper.counting import Counting
from unbroken_core import wire
from unbroken_core.errors import WireError
from unbroken_core.pod.memory_messages import Counted, Measure, Measured, ToKeeper


def text_of(counted: Counted) -> list[str]:
    """Return the lines that a scrape gets, without help."""

    class Families(Collector):
        def collect(self) -> list[Metric]:
            return list(memory_families(counted))

    registry = CollectorRegistry()
    registry.register(Families())
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_saves_skips_and_loads_are_counted_by_bucket_reason_and_source() -> None:
    counting = Counting(limit_bytes=1000)
    for seconds in (0.0005, 0.02, 0.02, 100.0):
        counting.take(Measured(Measure.SAVED, seconds=seconds))
    counting.take(Measured(Measure.SKIPPED, "no room"))
    counting.take(Measured(Measure.LOADED, "memory", 0.5, 3))
    counting.take(Measured(Measure.LOADED, "disk", 2.0, 8))
    counting.bad_digest()
    counting.refused()
    counting.copied(300)
    counting.fetched(20)
    counting.uses(400)
    lines = text_of(counting.counted())
    for line in (
        "unbroken_memory_used_bytes 400.0",
        "unbroken_memory_limit_bytes 1000.0",
        'unbroken_memory_save_seconds_bucket{le="0.001"} 1.0',
        'unbroken_memory_save_seconds_bucket{le="0.03"} 3.0',
        'unbroken_memory_save_seconds_bucket{le="30.0"} 3.0',
        'unbroken_memory_save_seconds_bucket{le="+Inf"} 4.0',
        "unbroken_memory_save_seconds_count 4.0",
        'unbroken_memory_skipped_total{reason="no room"} 1.0',
        'unbroken_memory_skipped_total{reason="tensors changed"} 0.0',
        'unbroken_memory_restore_seconds_count{source="memory"} 1.0',
        'unbroken_memory_restore_seconds_sum{source="disk"} 2.0',
        "unbroken_memory_steps_redone 8.0",
        "unbroken_memory_digest_failures_total 1.0",
        "unbroken_memory_refused_total 1.0",
        'unbroken_memory_peer_bytes_total{direction="copied"} 300.0',
        'unbroken_memory_peer_bytes_total{direction="fetched"} 20.0',
    ):
        assert line in lines


def test_a_worker_makes_no_series_of_its_own() -> None:
    counting = Counting(limit_bytes=1000)
    before = [line.split()[0] for line in text_of(counting.counted())]
    for number in range(100):
        for what in Measure:
            counting.take(Measured(what, f"word {number}", 1.0, -(10**9)))
    counted = counting.counted()
    assert [line.split()[0] for line in text_of(counted)] == before
    assert len(before) <= 30
    assert (counted.skips[-1], counted.loads[-1], counted.steps_redone) == (100, 100, -1)
    assert len(wire.encode(counted)) < 4096


@pytest.mark.parametrize(
    "counted",
    [
        pytest.param(Counted(), id="no buckets"),
        pytest.param(Counted(saves=(1,) * 11, skips=(0,) * 5, loads=(0,) * 3, load_seconds=(0.0,) * 3), id="too many"),
        pytest.param(Counted(saves=(1,) * 10, skips=(0,) * 5, loads=(0,) * 3), id="no seconds"),
    ],
)
def test_sums_of_another_shape_are_not_shown(counted: Counted) -> None:
    assert not is_sound(counted)
    assert is_sound(Counting(1).counted())


@pytest.mark.parametrize(
    "line",
    ['{"type":"Measured","what":"made up"}', '{"type":"Measured","what":"saved","seconds":"1"}', '{"type":"Measured"}'],
)
def test_what_is_no_measure_is_refused(line: str) -> None:
    with pytest.raises(WireError):
        wire.decode(line, ToKeeper)
