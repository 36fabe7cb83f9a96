"""One class name, one meaning: a reader who searches for a name finds one class."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("core", "sidecar", "operator", "cli")
"""The local cluster is a tool for developers, and stands apart."""
SAME_THING_TWICE = {
    "Layer": "the reference's name for the script's own layers (rank_assignment.Layer), and ours",
    "InternalError": "the reference's name, and ours",
    "Timeouts": "the spec's timeouts, as the CRD and as core have them",
    "Rarely": "limits log lines in packages that never import each other",
}
"""Names that two classes may have, and why."""


def classes_of(folders: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the modules that define each class, without the stand-ins of `unbroken.nvrx`, whose names NVIDIA chose."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "nvrx" in file.parts:
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    return found


def test_no_two_classes_have_one_name() -> None:
    twice = {name: files for name, files in classes_of(PACKAGES).items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SAME_THING_TWICE} == {}


def test_each_exception_is_still_one() -> None:
    found = classes_of(PACKAGES)
    assert [name for name in SAME_THING_TWICE if len(found.get(name, [])) < 2] == []
