"""Every exception from a rule of linter or type checker says on its line why it is there."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("core", "sidecar", "operator", "local", "cli", "tests", "benchmarks", "examples", "tools")
BARE = re.compile(r"(noqa(: *[A-Z]+[0-9]+(, *[A-Z]+[0-9]+)*)?|type: *ignore(\[[a-z, -]*\])?|pragma: *no cover)\s*$")
"""At the end of a comment: nothing follows that could be a reason."""


def without_reason(source: str) -> list[int]:
    """Return the numbers of the lines whose exception has no reason behind it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start[0] for token in tokens if token.type == tokenize.COMMENT and BARE.search(token.string)]


@pytest.mark.parametrize(
    ("comment", "is_bare"),
    [
        ("# noqa", True),
        ("# noqa: E402", True),
        ("# noqa: C901, PLR0911", True),
        ("# noqa: E402 - warns at import", False),
        ("# type: ignore", True),
        ("# type: ignore[attr-defined, misc]", True),
        ("# type: ignore[attr-defined] # not exported", False),
        ("# pragma: no cover", True),
        ("# what noqa: means here", False),
    ],
)
def test_reason_is_seen(comment: str, is_bare: bool) -> None:
    assert without_reason(f"text = '# noqa'\nnumber = 1  {comment}\n") == ([2] if is_bare else [])


def test_every_exception_from_a_rule_has_its_reason() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in without_reason(path.read_text(encoding="utf-8"))
    ]
    assert found == []
