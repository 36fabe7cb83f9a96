"""Checks of other packages: what cannot be loaded, and what they say that no agent takes, is said and harms nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from unbroken.watch import extensions
from unbroken.watch.checks.check import Check, Judgement, not_checked
from unbroken.watch.extensions import MAX_EXTENSIONS, Extensions
from unbroken.watch.lane import Lane
from unbroken.watch.watch import Board
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.findings import MAX_FINDINGS, Finding, Health, Verdict

WELL = Finding("fans", "", Verdict.OK)
BAD = Finding("fans", "", Verdict.SUSPECT, "slow")


def judge(_history: Any, sample: Any) -> Judgement:
    return Judgement((replace(WELL, message=str(sample)),), None)


FANS = Check("fans", 10.0, lambda: 3, judge)


def make_fans() -> Check:
    return FANS


def make_pumps() -> Check:
    return replace(FANS, name="pumps")


GPU = replace(FANS, name="gpu")
BUSY = replace(FANS, name="busy", period_s=0.0)
NEVER = replace(FANS, name="never", period_s=math.nan)
PROBE = replace(FANS, name="scratch")


def leave() -> Check:
    raise SystemExit(4)


def interrupt() -> Check:
    raise KeyboardInterrupt


class WordlessError(Exception):
    def __repr__(self) -> str:
        raise ValueError


def raise_wordless() -> Check:
    raise WordlessError


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], tuple[list[Check], Sequence[Finding]]]:
    """Load these names of this module, in a job with a probe `scratch`; return the checks, and what is said."""

    def load(names: Sequence[str]) -> tuple[list[Check], Sequence[Finding]]:
        points = [
            EntryPoint(f"{number:02}-{name}", f"{__name__}:{name}", "unbroken.health")
            for number, name in enumerate(names)
        ]
        monkeypatch.setattr(extensions, "entry_points", lambda group: points if group == "unbroken.health" else [])
        checks: list[Check] = []
        check = Extensions({"scratch"}, checks.append).check()
        said = check.judge(None, check.sample()).findings
        assert check.judge(None, check.sample()).findings == said, "they are loaded once"
        return checks, said

    return load


Load = Callable[[Sequence[str]], tuple[list[Check], Sequence[Finding]]]


def test_checks_of_other_packages_are_loaded_and_bad_ones_said(load: Load) -> None:
    bad = ("GPU", "BUSY", "absent", "leave", "interrupt", "raise_wordless")
    checks, refused = load(("FANS", "make_pumps", *bad))
    assert [check.name for check in checks] == ["fans", "pumps"]
    assert [each.message.partition(":")[0].partition("-")[2] for each in refused] == [*bad]
    assert {(each.check, each.verdict, each.code) for each in refused} == {
        ("extensions", Verdict.UNKNOWN, "not-loaded")
    }


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("FANS", "make_fans"), id="the name of another extension: each would hide what the other says"),
        pytest.param(("FANS", "PROBE"), id="the name of a probe"),
        pytest.param(("FANS", "NEVER"), id="a period that is no number: its lane would end"),
        pytest.param(("FANS", "MAX_EXTENSIONS"), id="no check"),
    ],
)
def test_a_check_that_cannot_have_its_name_or_period_is_said(load: Load, names: Sequence[str]) -> None:
    checks, refused = load(names)
    assert ([check.name for check in checks], len(refused)) == (["fans"], 1)


def test_checks_beyond_the_most_are_said(load: Load) -> None:
    checks, refused = load(["FANS"] * (MAX_EXTENSIONS + 2))
    assert (len(checks), len(refused)) == (1, MAX_EXTENSIONS)
    assert refused[-1].message == "want at most 8, got 10, among them 08-FANS, 09-FANS"


class Opaque:
    def __repr__(self) -> str:
        raise KeyboardInterrupt


def run_once(load: Load, monkeypatch: pytest.MonkeyPatch, judge: Callable[[Any, Any], Any]) -> tuple[Finding, ...]:
    """Return what the lane of a check says that judges like this, as the agent reads it."""
    monkeypatch.setattr(f"{__name__}.FANS", replace(FANS, judge=judge))
    said: list[tuple[Finding, ...]] = []
    (check,), _ = load(("FANS",))
    Lane([check], lambda _check, findings: said.append(findings)).step()
    health: Health = wire.decode(wire.encode(Health(said[-1])), Health)
    return health.findings


def odd(**fields: Any) -> Any:
    return replace(BAD, **fields)


def fail(_history: Any, _sample: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(None, id="nothing"),
        pytest.param("abc", id="a text"),
        pytest.param(({"check": "fans"},), id="no finding"),
        pytest.param((odd(verdict="broken"),), id="no verdict"),
        pytest.param((odd(code="it is slow!"),), id="a code of several words"),
        pytest.param((odd(action="x" * 101),), id="too long an action"),
        pytest.param((odd(seen=99),), id="seen too often"),
        pytest.param((odd(seen=math.nan),), id="seen not-a-number times"),
        pytest.param((odd(entity=["a"]),), id="a list"),
        pytest.param((odd(message=Opaque()),), id="no text"),
        pytest.param((odd(check="gpu"),), id="a finding of a built-in check"),
        pytest.param((odd(entity=str(number)) for number in range(10**9)), id="without end"),
    ],
)
def test_what_no_agent_takes_is_unknown(load: Load, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """Seen before: the agent took nothing at all any more from such a watch, or the watch ended, again and again."""
    (finding,) = run_once(load, monkeypatch, lambda _history, _sample: Judgement(said, None))
    assert (finding.check, finding.verdict, finding.code) == ("fans", Verdict.UNKNOWN, "failed")


def test_a_judgement_that_raises_anything_is_unknown(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before: the lane ended, and what the check had said last stayed for half a minute."""
    (finding,) = run_once(load, monkeypatch, fail)
    assert (finding.verdict, finding.code, finding.message) == (Verdict.UNKNOWN, "failed", "KeyboardInterrupt()")


def test_long_texts_are_cut_and_the_finding_counts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(BAD, entity="e" * 1000, message="m" * 100_000)
    (finding,) = run_once(load, monkeypatch, lambda _history, _sample: Judgement((long,), None))
    assert finding == replace(BAD, entity="e" * 128, message="m" * 300)


def test_a_check_that_floods_hides_neither_what_others_found_nor_what_nobody_could_look_at() -> None:
    """Seen before: 64 findings of one check, and the status no longer said that GPUs were not checked."""
    board = Board(lambda: None)
    board.put("fans", tuple(replace(BAD, entity=f"fan {number:02}") for number in range(MAX_FINDINGS)))
    board.put("gpu", (not_checked("gpu", "no driver"),))
    link = Finding("network", "eth0", Verdict.SUSPECT, "link-down")
    board.put("network", (Finding("network", "", Verdict.OK), link, not_checked("network", "eth1: no answer")))
    health = board.health()
    assert (len(health.findings), health.num_dropped) == (MAX_FINDINGS, 4)
    told = {(each.check, each.code) for each in health.findings if each.check != "fans"}
    assert told == {("gpu", "not-told"), ("network", "link-down"), ("network", "not-told")}
