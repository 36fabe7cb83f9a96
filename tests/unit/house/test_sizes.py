"""No function and no folder of the five packages grows beyond what one reads in one go."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("core", "sidecar", "operator", "cli", "local")
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20
"""In one folder, without `__init__.py`. The local cluster is a tool for developers, and stands apart."""


def long_functions(source: str) -> list[str]:
    """Return the functions that have more lines than allowed, with their number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name}: {num_lines}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_has_more_than_sixty_lines(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): long for file in files if (long := long_functions(file.read_text()))} == {}


def test_a_function_of_sixty_one_lines_would_be_found() -> None:
    body = "    pass\n"
    assert long_functions("async def f():\n" + 60 * body) == ["f: 61"]
    assert long_functions("def f():\n" + 59 * body) == []


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "local"])
def test_no_folder_has_more_than_twenty_modules(package: str) -> None:
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert folders
    sizes = {
        str(folder.relative_to(ROOT)): len(set(folder.glob("*.py")) - {folder / "__init__.py"}) for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}


@pytest.mark.parametrize("part", ["tests", "benchmarks", "tools", "examples"])
def test_no_folder_beside_them_has_more_than_twenty_files(part: str) -> None:
    folders = {file.parent for file in (ROOT / part).rglob("*.py") if "node_modules" not in file.parts}
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}
