"""What is shown of hostile text, wherever it is shown."""

import io
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken_core.conventions.printable import PrintableFormatter, printable, printable_lines, printable_value

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\n\x00\x7f\u202eevil\u2066\u200b\u2028\ud800é 漢"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("ValueError: é 漢 🙂 '\\n'", "ValueError: é 漢 🙂 '\\n'", id="what is harmless stays"),
        pytest.param("\x1b[31mred\x07", "\\x1b[31mred\\x07", id="escape sequence"),
        pytest.param("\x9b31m", "\\x9b31m", id="escape sequence of eight bits"),
        pytest.param("one\r\nI unbroken: two\t", "one\\r\\nI unbroken: two\\t", id="forged line"),
        pytest.param("\u202eevil\u2066\u200f", "\\u202eevil\\u2066\\u200f", id="direction"),
        pytest.param("\u2028\u2029\x85", "\\u2028\\u2029\\x85", id="other line ends"),
        pytest.param("\ud800", "\\ud800", id="half of a pair"),
    ],
)
def test_control_characters_are_shown_and_do_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(max_size=200))
def test_whatever_it_is_it_becomes_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert all(line.isprintable() for line in printable_lines(text).split("\n"))
    assert printable_lines(text).count("\n") == text.count("\n")


def test_all_strings_of_a_json_value_are_covered_and_nothing_else_changes() -> None:
    value = {"a\x1b": ["\x1b", {"b": "\u202e\n"}], "n": 1, "f": 0.5, "none": None, "t": True}
    found = printable_value(value)
    assert found == {"a\\x1b": ["\\x1b", {"b": "\\u202e\n"}], "n": 1, "f": 0.5, "none": None, "t": True}
    deep: list[Any] = []
    # Deeper than hypothesis lets the stack be while it runs.
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        printable_value(deep)


def test_a_log_line_stays_one_line_and_a_traceback_cannot_forge_another() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname).1s unbroken.test: %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("fault: detail=%s", f"{HOSTILE}\nE unbroken.test: forged")
    try:
        raise ValueError(f"{HOSTILE}\nE unbroken.test: forged")
    except ValueError:
        logger.exception("failed", stack_info=True)
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if not line.startswith("  | ")] == [
        f"W unbroken.test: fault: detail={printable(HOSTILE)}\\nE unbroken.test: forged",
        "E unbroken.test: failed",
    ]
