"""The end of a log."""

from pathlib import Path

import pytest

from unbroken_local.kubelet.logs import BLOCK_BYTES, tail_offset, tail_text


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        pytest.param("a\nb\nc\n", 2, "b\nc\n", id="the last two"),
        pytest.param("a\nb\nc", 2, "b\nc", id="an unfinished last line counts"),
        pytest.param("a\nb\n", 9, "a\nb\n", id="more than there are"),
        pytest.param("a\n\n\n", 2, "\n\n", id="empty lines count"),
        pytest.param("a\nb\n", 0, "", id="none"),
        pytest.param("", 3, "", id="an empty log"),
    ],
)
def test_tail_is_the_last_lines(tmp_path: Path, content: str, lines: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(content)
    assert content[tail_offset(path, lines) :] == expected


def test_tail_reads_backwards_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    rows = [f"{number:09d}\n" for number in range(BLOCK_BYTES // 4)]
    path.write_text("".join(rows))
    for wanted in (1, 7, 6553, 6554, 15000):
        assert tail_offset(path, wanted) == (len(rows) - wanted) * 10


def test_tail_text_is_limited_in_bytes_and_empty_without_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 100)
    assert tail_text(path, 5, 10) == "x" * 10
    assert tail_text(tmp_path / "none", 5, 10) == ""
