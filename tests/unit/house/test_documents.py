"""The documents name every word that a job can say, and every path that they name exists."""

import re
from pathlib import Path

import pytest
import tomllib
import yaml

from unbroken_core.vocabulary.reasons import Cause, Reason, Word
from unbroken_operator.api.status_models import ConditionType

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("words", [Reason, Cause, ConditionType], ids=["reasons", "causes", "conditions"])
def test_page_of_conditions_explains_every_word(words: type[Word]) -> None:
    text = (ROOT / "docs" / "reference" / "conditions.md").read_text()
    assert [word.value for word in words if f"`{word.value}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_of_a_page_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_commands_in_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)", pages, flags=re.MULTILINE))
    assert {first or second for first, second in named} <= targets


def test_the_reference_of_the_command_line_has_every_command() -> None:
    """That of `unbroken local` is the page of the local cluster."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert {*re.findall(r"^## unbroken (\w+)", text, re.MULTILINE), "local"} == {
        *project["entry-points"]["unbroken.commands"]
    }


def test_a_number_names_one_page_of_design() -> None:
    """Comments and messages name a page by its number alone."""
    numbers = [page.name[:4] for page in (ROOT / "docs" / "design").glob("*.md")]
    assert sorted(numbers) == sorted(set(numbers))
    titles = {page.name[:4]: page.read_text().splitlines()[0] for page in (ROOT / "docs" / "design").glob("*.md")}
    assert {number for number, title in titles.items() if not title.startswith(f"# {number}: ")} == set()


def _upgrades(text: str) -> list[str]:
    """Return the commands with options: those without name what is done, not how."""
    commands = re.findall(r"helm upgrade [^`\n]*", text.replace("\\\n", ""))
    return [command for command in commands if " --" in command]


def test_every_upgrade_that_is_shown_takes_the_values_that_are_new() -> None:
    """`--reuse-values` lacks them, as the chart's own page says."""
    pages = [*PAGES, *(path for path in (ROOT / "charts").rglob("*") if path.suffix in (".md", ".txt", ".yaml"))]
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    shown = {name: found for name, text in texts.items() if (found := _upgrades(text))}
    assert {"docs/dashboards.md", "charts/unbroken/templates/NOTES.txt"} <= shown.keys()
    assert [line for found in shown.values() for line in found if "--reset-then-reuse-values" not in line] == []
    named = {name for name, text in texts.items() if "--reuse-values" in text}
    assert named == {"charts/unbroken/README.md"}, "only where it says what it lacks"
    assert "rather than\n`--reuse-values`, which lacks" in texts["charts/unbroken/README.md"]


def test_an_upgrade_is_found_wherever_it_is_shown() -> None:
    text = "Run `helm upgrade a b --reuse-values`.\n$ helm upgrade a b \\\n  --set x=1\n`helm upgrade` does.\n"
    assert _upgrades(text) == ["helm upgrade a b --reuse-values", "helm upgrade a b   --set x=1"]


GENERATED = {"docs/behaviours.md", "docs/metrics.md", "docs/reference/api.md", "docs/reference/cli.md"}
BY_HAND = [page for page in PAGES if str(page.relative_to(ROOT)) not in GENERATED]
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$\n?", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_code_of_a_page_says_what_it_is(page: Path) -> None:
    """`sh` is what a reader types: tests/e2e/test_e2e_documented_commands.py runs it."""
    kinds = {kind for kind, _ in _FENCE.findall(page.read_text())}
    assert kinds - {"sh", "text", "python", "yaml"} == set()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_python_and_yaml_of_a_page_can_be_read(page: Path) -> None:
    for kind, text in _FENCE.findall(page.read_text()):
        if kind == "python":
            compile(text, page.name, "exec")
        elif kind == "yaml":
            yaml.safe_load(text)


@pytest.mark.parametrize("page", BY_HAND, ids=[page.name for page in BY_HAND])
def test_prose_is_at_most_100_columns_wide(page: Path) -> None:
    lines = _FENCE.sub("", page.read_text()).splitlines()
    prose = [line for line in lines if not line.startswith(("|", "#", "![", "<"))]
    assert [line for line in prose if len(line) > 100 and " " in line.strip().lstrip("-*0123456789. ")] == []


def test_documents_that_the_code_names_exist() -> None:
    folders = ("core", "sidecar", "operator", "local", "cli", "tools", "tests", "charts", "examples", "benchmarks")
    kinds = (".py", ".yaml", ".toml", ".tpl", ".txt")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files = [path for path in paths if "node_modules" not in path.parts]
    named = {name for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text(errors="ignore"))}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", BY_HAND, ids=[page.name for page in BY_HAND])
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    """What readers took for something else, or had to read twice: docs/glossary.md has the words to use."""
    found = re.findall(
        r"\b(?:tells? of|told of|mend(?:s|ed)?|former world|census|undertaker|homeless)\b", page.read_text()
    )
    assert found == []


@pytest.mark.parametrize("page", BY_HAND, ids=[page.name for page in BY_HAND])
def test_paths_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    folders = "core|sidecar|operator|local|cli|tests|tools|charts|examples|benchmarks|docs|crds"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
