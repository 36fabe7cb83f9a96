"""Whom findings speak against: one strike for what is fatal, two signs for what is suspect, nobody in a false alarm."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from unbroken_core.recovery.health import Blame, Strike, assess, assess_preflights, strike_of
from unbroken_core.vocabulary.findings import Finding, Health, Verdict

LOST = Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79", message="XID 79: the GPU has fallen off the bus")
GONE = Finding("gpu", "GPU-a", Verdict.FATAL, "gpu-lost")
DOWN = Finding("ports", "mlx5_0/1", Verdict.SUSPECT, "link-down")
ERRORS = Finding("gpu", "GPU-a", Verdict.SUSPECT, "ecc-uncorrected")
SLOW = Finding("gpu", "GPU-a", Verdict.DEGRADED, "throttled", seen=3)
OWN = Finding("gpu-events", "GPU-a", Verdict.OK, "xid-31", seen=3)
SILENT = Finding("pcie", "", Verdict.UNKNOWN, "not-told", seen=3)
FATAL, SUSPECT = Strike(LOST, True, False), Strike(replace(DOWN, seen=2), False, True)


@pytest.mark.parametrize(
    ("findings", "wanted"),
    [
        pytest.param((LOST,), FATAL, id="fatal once"),
        pytest.param((GONE, LOST), FATAL, id="the event says more than what follows"),
        pytest.param((DOWN,), None, id="suspect once"),
        pytest.param((replace(DOWN, seen=2),), SUSPECT, id="suspect twice"),
        pytest.param((DOWN, ERRORS), Strike(DOWN, False, False), id="two sources"),
        pytest.param((DOWN, replace(DOWN, entity="mlx5_1/1")), None, id="two of one source, once each"),
        pytest.param((SLOW, OWN, SILENT), None, id="degraded, the script's own, unknown"),
        pytest.param((), None, id="nothing"),
    ],
)
def test_a_strike_needs_one_fatal_finding_or_two_signs(findings: tuple[Finding, ...], wanted: Strike | None) -> None:
    assert strike_of(Health(findings)) == wanted
    assert strike_of(None) is None


def test_one_pod_is_blamed_and_two_at_once_are_a_false_alarm() -> None:
    assert assess({"a": FATAL}, {}, [], []) == Blame({"a": FATAL})
    both = assess({"a": FATAL, "b": FATAL}, {}, [], [])
    assert both.blamed == {}
    assert both.held == "findings speak against 2 pods within 5 min, which may be a false alarm: no ranks move for it"


def test_a_false_alarm_of_a_fleet_is_judged_without_a_look_at_each_pod() -> None:
    """Before, what it cost with every event rose with the number of pods."""

    class Unread(Mapping[str, Strike]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, uid: str) -> Strike:
            return {f"p{number}": FATAL for number in range(100)}[uid]

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all were looked at")

    fleet = Unread()
    assert assess(fleet, {}, ["p1"], ["p1", "elsewhere"]) == Blame(
        {"p1": FATAL},
        held="findings speak against 101 pods within 5 min, which may be a false alarm: no ranks move for it",
    )
    failed = assess_preflights(fleet, 150, [], [])
    assert (failed.blamed, failed.held[:44]) == ({}, "the preflight of 100 of 150 pods has failed,")


def test_whoever_is_blamed_stays_so_while_others_follow() -> None:
    later = assess({"a": FATAL, "b": FATAL}, {}, ["a"], ["a"])
    assert (later.blamed, bool(later.held)) == ({"a": FATAL}, True)
    much_later = assess({"a": FATAL, "b": FATAL}, {}, ["a"], [])
    assert much_later == Blame({"a": FATAL, "b": FATAL})


def test_links_of_two_pods_under_one_switch_blame_the_switch() -> None:
    domains = {"a": "rack-1", "b": "rack-1", "c": "rack-2"}
    found = assess({"a": SUSPECT, "b": SUSPECT}, domains, [], [])
    assert (found.blamed, found.domains) == ({}, ("rack-1",))
    assert found.held == "links of several pods are down or lossy, look at what they share: rack-1 (2 pods)"
    with_third = assess({"a": SUSPECT, "b": SUSPECT, "c": FATAL}, domains, [], [])
    assert (with_third.blamed, with_third.domains) == ({"c": FATAL}, ("rack-1",))


def test_gpus_of_two_pods_in_one_rack_blame_no_rack() -> None:
    assert assess({"a": FATAL, "b": FATAL}, {"a": "rack-1", "b": "rack-1"}, [], []).domains == ()


def test_pods_whose_domain_nobody_knows_share_none() -> None:
    assert assess({"a": SUSPECT, "b": SUSPECT}, {"a": "", "b": ""}, [], []).domains == ()
