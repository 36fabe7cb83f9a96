"""What workers measure reaches the pod's metrics in bounded sums."""

from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unbroken.agent.adapters.keeper_process import is_sound
from unbroken.agent.adapters.metrics import memory_families
from unbroken.keeper.arena import Arena, SealedSlot
from unbroken.keeper.counting import Counting
from unbroken.keeper.server import Keeper
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import Counted, Measure, Measured, ToKeeper, Written
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Load, LoadSource, OnDisk
from unbroken_core.vocabulary.errors import WireError

NOW_S = 5000.0


def text_of(counted: Counted) -> list[str]:
    """Return the lines that a scrape gets, without help."""

    class Families(Collector):
        def collect(self) -> list[Metric]:
            return list(memory_families(counted, NOW_S))

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


def test_what_is_on_the_disk_is_shown_with_its_age_where_it_is_known() -> None:
    counting = Counting(limit_bytes=1000)
    assert [line for line in text_of(counting.counted()) if "disk_" in line] == [
        "unbroken_memory_disk_failures_total 0.0"
    ]
    counting.take(Measured(Measure.UNWRITTEN))
    counting.on_disk(1000, -1.0)
    lines = text_of(counting.counted())
    assert "unbroken_memory_disk_failures_total 1.0" in lines
    assert "unbroken_memory_disk_step 1000.0" in lines
    assert not any("disk_age" in line for line in lines), "it became whole before this pod looked"
    counting.on_disk(2000, 4970.0)
    counting.on_disk(2000, -1.0)
    assert "unbroken_memory_disk_age_seconds 30.0" in text_of(counting.counted())
    assert len(text_of(counting.counted())) <= 33
    counting.on_disk(1000, -1.0)
    assert not any("disk_age" in line for line in text_of(counting.counted())), "that is another step's"


class NoSlots:
    """The memory of a pod in which nothing was saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reached(self, path: Path) -> Path:
        return path

    def sealed(self) -> list[SealedSlot]:
        return []

    def names_in(self, folder: str) -> list[str]:
        return []


def test_a_keeper_tells_its_agent_what_the_newest_iteration_has_on_the_disk(tmp_path: Path) -> None:
    keeper = Keeper.__new__(Keeper)
    keeper._counting = Counting(limit_bytes=1000)
    keeper._telling = Telling(cast(Arena, NoSlots(tmp_path)), tmp_path)
    assert keeper._telling.held().disk is None
    told = OnDisk(1, 2, 10, 100)
    for message in (Written(told, 3.0), Written(OnDisk(1, 1, 10, 200), 1.0), Written(told)):
        assert keeper._answer(message) is None
        assert keeper._telling.held().disk == told
        assert keeper._counting.counted().disk_step == 100
    assert keeper._counting.counted().disk_whole_at_s >= 0
    for age_s in (-2.0, -0.5, 1e300, float("nan")):
        with pytest.raises(WireError):
            keeper._answer(Written(told, age_s))
    version = keeper._telling.wait(0, 0.0)
    keeper._answer(Written(told))
    assert keeper._telling.wait(0, 0.0) == version, "nothing new for the agent"
    keeper._answer(Written(OnDisk(1, 2, 10, 110), 0.0))
    assert keeper._telling.wait(0, 0.0) > version


def test_a_keeper_tells_the_highest_step_that_any_of_its_workers_remembers(tmp_path: Path) -> None:
    telling = Telling(cast(Arena, NoSlots(tmp_path)), tmp_path)
    for reached in (-1, 9, 7):
        telling.loaded(Load(1, 1, LoadSource.NOTHING, reached=reached))
    assert telling.held().loads == (Load(1, 1, LoadSource.NOTHING, reached=9),)


def test_a_worker_makes_no_series_of_its_own() -> None:
    counting = Counting(limit_bytes=1000)
    before = [line.split()[0] for line in text_of(counting.counted())]
    for number in range(100):
        for what in Measure:
            counting.take(Measured(what, f"word {number}", 1.0, -(10**9)))
    counted = counting.counted()
    assert [line.split()[0] for line in text_of(counted)] == before
    assert len(before) <= 31
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
    [
        '{"type":"Written","disk":{"term":1,"iteration":0,"every":0}}',
        '{"type":"Written","disk":{"term":1,"iteration":0,"every":1,"step":-2}}',
        '{"type":"Written"}',
        '{"type":"Measured","what":"made up"}',
        '{"type":"Measured","what":"saved","seconds":"1"}',
        '{"type":"Measured"}',
    ],
)
def test_what_is_no_measure_is_refused(line: str) -> None:
    with pytest.raises(WireError):
        wire.decode(line, ToKeeper)
