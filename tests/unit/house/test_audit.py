"""`make audit` never takes an index that does not answer for one that knows of nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from tools.scanners import audit
from tools.scanners.audit import Finding

SOUND: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "b", "version": "2", "skip_reason": "Dependency not found on PyPI"}
BAD: dict[str, Any] = {"name": "c", "version": "3", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"]}]}
ROOT = Path(__file__).parents[3]


def judged(*packages: dict[str, Any]) -> tuple[int, list[str]]:
    """Return exit code and lines for one lock with these packages."""
    return audit.verdict({"x.lock": audit.finding({"dependencies": list(packages)})})


@pytest.mark.parametrize(
    ("packages", "code", "lines"),
    [
        pytest.param((SOUND,), 0, ["audit: x.lock: 1 packages, no known vulnerability"], id="sound"),
        pytest.param(
            (SOUND, SKIPPED),
            3,
            ["audit: not done: x.lock: 1 of 2 packages could not be looked up: b"],
            id="one was not looked up",
        ),
        pytest.param((BAD, SOUND), 1, ["audit: x.lock: c 3: PYSEC-1, fixed in 3.1"], id="vulnerable"),
        pytest.param(
            (BAD, SKIPPED),
            1,
            [
                "audit: x.lock: c 3: PYSEC-1, fixed in 3.1",
                "audit: not done: x.lock: 1 of 2 packages could not be looked up: b",
            ],
            id="both",
        ),
        pytest.param((), 3, ["audit: not done: x.lock: no packages were asked for"], id="empty"),
    ],
)
def test_each_package_counts(packages: tuple[dict[str, Any], ...], code: int, lines: list[str]) -> None:
    assert judged(*packages) == (code, lines)


def test_a_long_list_is_cut() -> None:
    _, (line,) = judged(*({**SKIPPED, "name": f"p{index}"} for index in range(100)))
    assert line.endswith("100 of 100 packages could not be looked up: p0, p1, p2, p3, p4, ...")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        pytest.param("echo no network >&2; exit 1", "pip-audit ended with 1: no network", id="failed"),
        pytest.param("true", "pip-audit ended with 0: it said nothing", id="silent"),
        pytest.param("echo '[]'", "pip-audit ended with 0: it said nothing", id="another form"),
        pytest.param(f"echo '{json.dumps({'dependencies': [SOUND]})}'", Finding(1, (), ()), id="answer"),
    ],
)
def test_an_auditor_that_says_nothing_is_no_answer(tmp_path: Path, said: str, wanted: object) -> None:
    """A process that answers so, in place of pip-audit."""
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    assert audit.ask(str(program), tmp_path / "x.lock") == wanted


def test_all_that_is_locked_is_asked_for_but_what_is_old_on_purpose() -> None:
    asked = {*audit.LOCKS, *ROOT.glob("images/*/*.lock"), ROOT / "requirements-integrations-older.lock"}
    assert len(asked) == len(audit.LOCKS) + len(list(ROOT.glob("images/*/*.lock"))) + 1
    found = (*ROOT.glob("*.lock"), *ROOT.glob("[a-z]*/*.lock"), *ROOT.glob("[a-z]*/*/*.lock"))
    assert asked == set(found)
