"""`make scan`: every finding is explained, every explanation has its finding, and looking at nothing is no success."""

from typing import Any

import pytest
import yaml
from tools.scanners import scan

ENTRY: dict[str, Any] = {"check": "CKV_1", "resources": ["Pod.a", "Pod.b"], "why": "It has to be so because."}
KNOWN = {("CKV_1", "Pod.a"), ("CKV_1", "Pod.b")}


def report(passed: int = 200, errors: int = 0) -> dict[str, Any]:
    """Return what checkov writes."""
    failed = [{"check_id": "CKV_1", "resource": "Pod.ops.a"}, {"check_id": "CKV_1", "resource": "Pod.b"}]
    return {"summary": {"passed": passed, "parsing_errors": errors}, "results": {"failed_checks": failed}}


def test_findings_are_known_by_check_and_object() -> None:
    assert scan.findings(report()) == KNOWN == scan.explained([ENTRY])


@pytest.mark.parametrize("seen", [report(passed=3), report(errors=1), {"passed": 0, "failed": 0}, {}])
def test_a_scanner_that_saw_too_little_is_an_error(seen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="want at least 100 passed checks and no parsing error"):
        scan.findings(seen)


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        pytest.param({"one": KNOWN}, [], id="explained"),
        pytest.param({"one": {("CKV_1", "Pod.a")}, "two": {("CKV_1", "Pod.b")}}, [], id="in one scope each"),
        pytest.param(
            {"one": {*KNOWN, ("CKV_2", "Pod.a")}},
            ["one: CKV_2 Pod.a: correct it, or explain it in tools/scanners/exceptions.yaml"],
            id="new",
        ),
        pytest.param({"one": {("CKV_1", "Pod.a")}}, ["exceptions.yaml: CKV_1 Pod.b: no longer occurs"], id="stale"),
    ],
)
def test_what_is_found_is_what_is_explained(found: dict[str, set[scan.Finding]], lines: list[str]) -> None:
    assert scan.complaints(found, KNOWN) == lines


def test_an_exception_needs_a_sentence() -> None:
    with pytest.raises(ValueError, match="CKV_1: want a reason in a sentence, got 'no'"):
        scan.explained([{**ENTRY, "why": "no"}])
    assert scan.explained(yaml.safe_load(scan.EXCEPTIONS.read_text()))
