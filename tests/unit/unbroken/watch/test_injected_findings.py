"""What the watch finds because somebody ordered it: as the check would say it, for a while, and as what it is."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.faults.__main__ import obey
from unbroken.faults.findings import MAX_FINDINGS, OrderedFinding, add_finding, read_findings
from unbroken.watch.checks.check import Judgement
from unbroken.watch.checks.injected import INJECTED, judge_injected
from unbroken.watch.checks.probe import is_free
from unbroken.watch.config import read_config
from unbroken_core.pod.fault_orders import FaultOrder, write_order
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import Finding, Verdict

XID = FaultOrder(id="0123456789abcdef", kind="xid", code=79, seconds=30)
LINK = FaultOrder(id="00000000000000aa", kind="link-down")
CHECK = FaultOrder(id="00000000000000bb", kind="check", check="scratch", verdict="degraded")
ON_PURPOSE = "(on purpose, by `unbroken inject`)"


def test_findings_are_those_of_the_checks_and_a_suspect_one_counts_its_looks() -> None:
    sample = [OrderedFinding(order, 9.0) for order in (XID, LINK, CHECK)]
    first = judge_injected(None, sample)
    assert [(each.check, each.entity, each.verdict, each.code, each.seen) for each in first.findings] == [
        ("gpu-events", "injected", Verdict.FATAL, "xid-79", 1),
        ("network", "injected", Verdict.SUSPECT, "link-down", 1),
        ("scratch", "", Verdict.DEGRADED, "probe-failed", 1),
    ]
    assert {each.message.endswith(ON_PURPOSE) for each in first.findings} == {True}
    second = judge_injected(first.history, sample)
    assert [each.seen for each in second.findings] == [1, 2, 2]
    assert judge_injected(second.history, []) == Judgement((), {})


@pytest.mark.parametrize(("code", "verdict"), [(31, Verdict.OK), (94, Verdict.SUSPECT), (500, Verdict.DEGRADED)])
def test_an_xid_means_what_it_means_of_the_driver(code: int, verdict: Verdict) -> None:
    found: tuple[Finding, ...] = judge_injected(None, [OrderedFinding(replace(XID, code=code), 9.0)]).findings
    assert [each.verdict for each in found] == [verdict]


def test_a_finding_ends_with_its_seconds_and_the_same_order_is_one(tmp_path: Path) -> None:
    assert read_findings(tmp_path, 100.0) == ()
    assert "for 30 s; nothing is broken" in add_finding(tmp_path, XID, lambda: 100.0)
    assert add_finding(tmp_path, XID, lambda: 110.0) == "this order was carried out before; nothing was done again"
    add_finding(tmp_path, LINK, lambda: 110.0)
    assert read_findings(tmp_path, 129.9) == (OrderedFinding(XID, 130.0), OrderedFinding(LINK, 170.0))
    assert read_findings(tmp_path, 130.0) == (OrderedFinding(LINK, 170.0),)
    assert read_findings(tmp_path, 10.0) == (), "of before the host was started again"


def test_more_findings_than_a_few_are_refused(tmp_path: Path) -> None:
    for number in range(MAX_FINDINGS):
        add_finding(tmp_path, replace(LINK, id=f"{number:016x}"), lambda: 0.0)
    with pytest.raises(InputError, match="want at most 8 findings on purpose at a time; nothing was done"):
        add_finding(tmp_path, XID, lambda: 1.0)
    add_finding(tmp_path, XID, lambda: 61.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1, null, [], [1]]",
        json.dumps([["{}", 5.0], [write_order(XID), "x"], [write_order(XID), float("inf")]]),
        json.dumps([[write_order(FaultOrder(id=XID.id, kind="exception")), 5.0]]),
        "[" * 5000,
    ],
)
def test_whatever_a_trainer_writes_into_the_file_counts_as_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "fault-findings.json").write_text(text)
    assert read_findings(tmp_path, 1.0) == ()


def test_a_pod_without_a_watch_or_without_consent_finds_nothing_on_purpose(tmp_path: Path) -> None:
    place = {"UNBROKEN_DIR": str(tmp_path)}
    with pytest.raises(InputError, match="xid: this pod allows no faults; want UNBROKEN_ALLOW_FAULTS=1"):
        obey([write_order(XID)], place)
    with pytest.raises(InputError, match=r"xid: this pod has no watch; want health\.mode Observe or Act"):
        obey([write_order(XID)], {**place, "UNBROKEN_ALLOW_FAULTS": "1"})
    assert list(tmp_path.iterdir()) == []
    allowed = {**place, "UNBROKEN_ALLOW_FAULTS": "1", "UNBROKEN_WATCH": "1"}
    assert obey([write_order(XID)], allowed).startswith("xid: ")
    assert [read_config(each).allows_faults for each in (place, allowed)] == [False, True]
    assert not is_free(INJECTED)


def test_of_many_orders_at_once_each_that_is_told_to_be_done_is_found(tmp_path: Path) -> None:
    def order(number: int) -> bool:
        try:
            return "the watch finds it" in add_finding(tmp_path, replace(XID, id=f"{number:016x}"))
        except InputError as error:
            return "want at most 8 findings" not in str(error)

    with ThreadPoolExecutor(32) as pool:
        done = [number for number, is_done in enumerate(pool.map(order, range(64))) if is_done]
    found = read_findings(tmp_path, time.monotonic())
    assert sorted(int(each.order.id, 16) for each in found) == done
    assert len(done) == MAX_FINDINGS


@pytest.mark.timeout(60)
def test_neither_a_pipe_nor_a_link_in_the_place_of_the_file_holds_the_watch_up(tmp_path: Path) -> None:
    add_finding(tmp_path, XID, lambda: 0.0)
    file = tmp_path / "fault-findings.json"
    file.rename(tmp_path / "other")
    file.symlink_to("other")
    assert read_findings(tmp_path, 1.0) == ()
    file.unlink()
    os.mkfifo(file)
    assert read_findings(tmp_path, 1.0) == ()
    add_finding(tmp_path, LINK, lambda: 1.0)
    assert [each.order.kind for each in read_findings(tmp_path, 2.0)] == ["link-down"]
