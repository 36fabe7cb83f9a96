"""tools/behaviours.py: which test bears which behaviour, and what the page says about it."""

from typing import Any

import pytest
from tools import behaviours as tool


def data(**changes: Any) -> dict[str, Any]:
    """One area of five behaviours."""
    return {
        "area": [
            {
                "number": 2,
                "title": "Restarts",
                "text": "What starts again.",
                "last": 5,
                "promises": {"1": "It starts."},
                "differs": {"3-4": "For a reason."},
                **changes,
            }
        ]
    }


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        pytest.param("0.10, 2.7: words", ["0.10", "2.7"], id="numbers before the words"),
        pytest.param("Golden vectors of 0.3; 0.41", ["0.3", "0.41"], id="numbers among words"),
        pytest.param("0.8 to 0.11", ["0.8", "0.9", "0.10", "0.11"], id="from one to another"),
        pytest.param("ends in 2.5 s, 1.2 MB or 0.5 %, with torch 2.13.0 on 127.0.0.1 by v1.4", [], id="no behaviours"),
    ],
)
def test_docstring_gives_its_numbers(docstring: str, expected: list[str]) -> None:
    assert [str(box) for box in sorted(tool.boxes_in(docstring))] == expected


def test_only_test_functions_bear_behaviours_and_nothing_is_imported() -> None:
    source = 'raise RuntimeError\nclass TestIt:\n    async def test_it(self): "2.1"\ndef helper(): "2.2"\n'
    assert [(str(box), proof.name) for box, proof in tool.find_proofs("f.py", source)] == [("2.1", "test_it")]


def test_page_names_tests_reasons_and_what_has_neither() -> None:
    areas = tool.read_areas(data())
    proofs = {tool.Box(2, 1): [tool.Proof("tests/test_a.py", "test_it_starts_again")]}
    assert tool.render(areas, proofs) == tool.HEADER + (
        "\n## Restarts\n\nWhat starts again.\n\n| | what | shown by |\n|---|---|---|\n"
        "| 2.1 | It starts. | [it starts again](../tests/test_a.py) |\n"
        "| 2.3 | *Differs:* For a reason. |  |\n"
        "| 2.4 | *Differs:* For a reason. |  |\n"
        "\nNot shown by a test yet: 2.2, 2.5.\n"
    )


@pytest.mark.parametrize("span", ["0", "6", "4-3", "2-9", "a"])
def test_number_that_the_area_does_not_have_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="area 2: want 1 to 5, got"):
        tool.read_areas(data(differs={span: "..."}))


def test_misprint_in_a_docstring_is_found() -> None:
    areas = tool.read_areas(data())
    assert tool.unknown({tool.Box(2, 5): [], tool.Box(2, 6): [], tool.Box(5, 9): []}, areas) == [tool.Box(2, 6)]
