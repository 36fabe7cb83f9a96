"""What GPUs tell, and what the watch makes of it: pure, on samples."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken.watch.checks.gpu import (
    APPLICATION_XIDS,
    FATAL_XIDS,
    HOLD_S,
    GpuSamples,
    XidSample,
    judge_gpus,
    judge_xids,
)
from unbroken.watch.counters import MAX_KEYS
from unbroken.watch.nvml import GpuSample
from unbroken_core.vocabulary.findings import MAX_FINDINGS, Finding, Verdict, bounded

WELL = GpuSample(
    "GPU-a",
    readings={"recovery-action": 0, "remap-failed": 0, "remap-pending": 0, "ecc-uncorrected": 7, "throttle": 0},
    links={0: True, 1: True},
)


def look(*samples: GpuSample | tuple[GpuSample, ...], step_s: float = 10.0) -> list[tuple[Finding, ...]]:
    """Judge samples, 10 s apart; return what was found each time."""
    history: Any = None
    found = []
    for number, sample in enumerate(samples):
        gpus = sample if isinstance(sample, tuple) else (sample,)
        judgement = judge_gpus(history, GpuSamples(gpus, number * step_s))
        history = judgement.history
        found.append(judgement.findings)
    return found


def brief(findings: tuple[Finding, ...]) -> list[tuple[str, Verdict, int]]:
    return [(each.code, each.verdict, each.seen) for each in findings]


def with_reading(**readings: int) -> GpuSample:
    return replace(
        WELL, readings={**WELL.readings, **{key.replace("_", "-"): value for key, value in readings.items()}}
    )


def test_a_gpu_that_tells_all_and_has_nothing_is_ok() -> None:
    assert brief(look(WELL)[0]) == [("", Verdict.OK, 1)]


@pytest.mark.parametrize("code", [15, 16])
def test_a_gpu_that_the_driver_has_lost_is_fatal_at_once(code: int) -> None:
    assert brief(look(GpuSample("GPU-a", code))[0]) == [("gpu-lost", Verdict.FATAL, 1)]


DEVICE_ACTIONS = dict.fromkeys((1, 2, 4, 6, 7), Verdict.FATAL)
DOMAIN_ACTIONS = dict.fromkeys((3, 5), Verdict.SUSPECT)


@pytest.mark.parametrize(("action", "verdict"), [*DEVICE_ACTIONS.items(), *DOMAIN_ACTIONS.items()])
def test_what_the_driver_wants_done_says_how_bad_it_is(action: int, verdict: Verdict) -> None:
    assert brief(look(with_reading(recovery_action=action))[0]) == [(f"recovery-action-{action}", verdict, 1)]


def test_rows_that_fail_to_be_remapped_while_it_trains_are_fatal_and_those_of_before_are_not() -> None:
    failed = with_reading(remap_failed=1)
    assert brief(look(WELL, failed)[1]) == [("remap-failed", Verdict.FATAL, 1)]
    assert brief(look(failed, failed)[1]) == [("remap-failed", Verdict.DEGRADED, 1)]
    assert brief(look(with_reading(remap_pending=1))[0]) == [("remap-pending", Verdict.DEGRADED, 1)]


def test_errors_of_before_say_nothing_and_a_counter_that_begins_anew_neither() -> None:
    found = look(
        WELL, with_reading(ecc_uncorrected=0), with_reading(ecc_uncorrected=1), with_reading(ecc_uncorrected=2)
    )
    codes = [brief(findings) for findings in found]
    assert codes[:2] == [[("", Verdict.OK, 1)]] * 2
    assert codes[2:] == [[("ecc-uncorrected", Verdict.SUSPECT, 1)], [("ecc-uncorrected", Verdict.SUSPECT, 2)]]


def test_a_rise_is_forgotten_after_a_while() -> None:
    risen = with_reading(ecc_uncorrected=8)
    found = look(WELL, risen, risen, step_s=HOLD_S)
    assert brief(found[1]) == [("ecc-uncorrected", Verdict.SUSPECT, 1)]
    assert brief(found[2]) == [("", Verdict.OK, 1)]


def test_a_link_that_was_never_active_is_none_that_went_down() -> None:
    never = replace(WELL, links={0: True, 1: False})
    assert brief(look(never, never)[1]) == [("", Verdict.OK, 1)]
    assert [brief(found) for found in look(WELL, never, never)[1:]] == [
        [("nvlink-down", Verdict.SUSPECT, 1)],
        [("nvlink-down", Verdict.SUSPECT, 2)],
    ]


def test_a_gpu_is_slow_only_when_three_samples_in_a_row_say_so() -> None:
    hot = with_reading(throttle=0x40)
    assert [brief(found) for found in look(hot, hot, hot)][2] == [("throttled", Verdict.DEGRADED, 3)]
    assert brief(look(hot, hot, WELL)[2]) == [("", Verdict.OK, 1)]
    power_cap = with_reading(throttle=0x4)
    assert brief(look(power_cap, power_cap, power_cap)[2]) == [("", Verdict.OK, 1)]


def test_recoveries_of_other_links_than_before_are_no_rise() -> None:
    """Seen before: a link whose counter could not be read once made the next look a sign of errors."""
    whole = replace(with_reading(nvlink_recoveries=1000), counted_links=frozenset({0, 1}))
    part = replace(with_reading(nvlink_recoveries=400), counted_links=frozenset({0}))
    assert [brief(found) for found in look(whole, part, whole)] == 3 * [[("", Verdict.OK, 1)]]
    more = replace(with_reading(nvlink_recoveries=1005), counted_links=frozenset({0, 1}))
    assert brief(look(whole, part, whole, more)[3]) == [("nvlink-errors", Verdict.DEGRADED, 1)]


def test_a_gpu_that_is_not_looked_at_is_said_and_counts_for_nothing() -> None:
    unread = GpuSample("GPU 32", not_told=("device",))
    (well, untold) = look((WELL, unread))[0]
    assert (well.verdict, well.message) == (Verdict.OK, "1 GPU")
    assert (untold.verdict, untold.code, untold.message) == (Verdict.UNKNOWN, "not-told", "1 of 2 GPUs not looked at")
    (only,) = look(unread)[0]
    assert only.verdict is Verdict.UNKNOWN


def test_what_no_gpu_tells_is_unknown_once_however_many_there_are() -> None:
    silent = tuple(GpuSample(f"GPU-{n}", not_told=("recovery-action", "nvlink")) for n in range(8))
    findings = look(silent)[0]
    assert brief(findings) == [
        ("", Verdict.OK, 1),
        ("recovery-action", Verdict.UNKNOWN, 1),
        ("nvlink", Verdict.UNKNOWN, 1),
    ]
    assert findings[1].message == "not reported by 8 of 8 GPUs"


def hear(*batches: list[tuple[str, int]], step_s: float = 1.0) -> list[tuple[Finding, ...]]:
    history: Any = None
    found = []
    for number, events in enumerate(batches):
        judgement = judge_xids(history, XidSample(events, number * step_s, 2))
        history = judgement.history
        found.append(judgement.findings)
    return found


@pytest.mark.parametrize("xid", sorted(FATAL_XIDS))
def test_an_xid_of_a_broken_device_is_fatal_for_good(xid: int) -> None:
    found = hear([("GPU-a", xid)], [], step_s=2 * HOLD_S)
    assert brief(found[1]) == [(f"xid-{xid}", Verdict.FATAL, 1)]


@pytest.mark.parametrize("xid", sorted(APPLICATION_XIDS))
def test_an_xid_of_the_application_never_speaks_against_the_device(xid: int) -> None:
    assert {each.verdict for each in hear([("GPU-a", xid)] * 1000)[0]} == {Verdict.OK}


def test_a_flood_of_events_is_one_finding_that_does_not_change() -> None:
    findings = hear([("GPU-a", 94)] * 10_000)[0]
    assert brief(findings) == [("xid-94", Verdict.SUSPECT, 3)]
    assert brief(hear([("GPU-a", 74)], [("GPU-a", 74)], [], step_s=10.0)[1]) == [("xid-74", Verdict.SUSPECT, 2)]
    numbers = hear([(f"GPU-{n}", 1000 + n) for n in range(10_000)])[0]
    assert len(numbers) <= MAX_KEYS
    assert len(bounded(numbers).findings) == MAX_FINDINGS
    assert bounded(numbers).num_dropped == len(numbers) - MAX_FINDINGS


def test_an_event_of_a_device_that_the_pod_does_not_have_is_said_and_blames_nobody() -> None:
    findings = hear([("", 79)])[0]
    assert brief(findings) == [("", Verdict.OK, 1), ("foreign", Verdict.UNKNOWN, 1)]


def test_an_xid_that_nobody_has_classified_is_a_note() -> None:
    assert brief(hear([("GPU-a", 200)])[0]) == [("xid-200", Verdict.DEGRADED, 1)]
