"""Each row of the threat model names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
EXPECTED = {
    "somebody on the pods' network",
    "somebody on the network of several hosts",
    "trainer code in one container",
    "holder of an agent's token",
    "tenant who may create jobs",
    "tenant who controls the rendezvous image",
    "reader of Secrets",
    "operator's account taken over",
    "a node",
    "package index or registry",
}


def rows() -> dict[str, list[str]]:
    """Return the cells of each row of the table, by who it is about."""
    table = TEXT.partition("## Threat model\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| **")]
    return {line.split("**")[1]: [cell.strip() for cell in line.strip("|").split("|")] for line in lines}


def test_everybody_who_might_attack_has_a_row() -> None:
    assert rows().keys() >= EXPECTED


@pytest.mark.parametrize("who", sorted(rows()))
def test_a_row_says_what_they_can_and_cannot_and_names_tests_that_exist(who: str) -> None:
    cells = rows()[who]
    assert [bool(cell) for cell in cells] == [True] * 4
    named = PLACE.findall(cells[3])
    assert named, "no test shows it"
    assert cells[3].count("`") == 2 * len(named), "something else than tests"
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            path,
            name,
        )


def test_every_test_that_the_page_names_exists() -> None:
    for path, name in PLACE.findall(TEXT):
        assert re.search(rf"^(async )?def {name}", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), path
