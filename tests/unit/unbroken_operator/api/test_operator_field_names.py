"""Messages name fields of the spec as users find them in the CRD."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts, violations
from unbroken_core.vocabulary.layers import Layer
from unbroken_operator.api.models import Spec
from unbroken_operator.api.schema import structural_schema

ROOT = Path(__file__).parents[4]
SOURCES = sorted(
    path for folder in ("core", "operator", "sidecar") for path in (ROOT / folder).rglob("*.py") if path.is_file()
)
SCHEMA: dict[str, Any] = structural_schema(Spec)
GROUPS = [name for name, field in SCHEMA["properties"].items() if field.get("type") == "object" and name != "template"]
PATH = re.compile(rf"(?<![\w./-])(?:spec\.)?((?:{'|'.join(GROUPS)})(?:\[[^]]*\])?(?:\.[a-zA-Z]+(?:\[[^]]*\])?)+)")

LABEL_OF_A_PLATFORM = re.compile(r"topology\.(kubernetes\.io|k8s\.aws)/")


def is_field(path: str) -> bool:
    """Whether the schema of the spec has a field at this dotted path; what stands in brackets is an item of a list."""
    schema: Any = SCHEMA
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        schema = schema.get("items", schema).get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def paths_in(text: str) -> Iterator[str]:
    """Return what looks like a field of the spec."""
    for found in PATH.finditer(text):
        if not LABEL_OF_A_PLATFORM.match(text, found.start()):
            yield found[1]


def messages_in(source: Path) -> Iterator[str]:
    """Return the strings of a module that are no docstrings; what an f-string fills in becomes a word."""
    tree = ast.parse(source.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in docstrings:
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inner:
            yield node.value


def test_paths_are_told_from_words_that_are_none() -> None:
    text = "spec.timeouts.soft: want less than timeouts.hardSeconds; topology.layers[rack].minRanks, my.world.x."
    assert [(path, is_field(path)) for path in paths_in(text)] == [
        ("timeouts.soft", False),
        ("timeouts.hardSeconds", True),
        ("topology.layers[rack].minRanks", True),
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_fields_that_a_module_names_in_its_messages_are_in_the_crd(source: Path) -> None:
    named = {path for text in messages_in(source) for path in paths_in(text) if "{" not in path}
    assert {path for path in named if not is_field(path)} == set()


def test_every_violation_of_the_settings_begins_with_a_field_of_the_crd() -> None:
    zero = Timeouts(0, 0, 0, 0, 0, 0, 0, 0, 0)
    layers = (Layer("a", "x", min_ranks=0), Layer("a", "x", min_ranks=2, max_ranks=1))
    unchecked = object.__new__(JobSettings)
    fields: dict[str, Any] = {
        "job": "j",
        "replicas": 0,
        "min_replicas": 2,
        "spares": -1,
        "ranks_per_pod": 0,
        "layers": layers,
        "divisible_by": 9,
        "max_ranks": 1,
        "min_ranks_per_pod": 7,
        "rungs": (),
        "max_faults_per_rank": None,
        "no_progress_limit": 0,
        "fatal_exit_codes": (0,),
        "timeouts": zero,
    }
    for name, value in fields.items():
        object.__setattr__(unchecked, name, value)
    found = violations(unchecked)
    rungs = tuple(RungBudget(budget.rung, -1, 0.0) for budget in JobSettings(job="j").rungs[:1]) * 2
    object.__setattr__(unchecked, "rungs", rungs)
    found += violations(unchecked)
    assert len(found) > 20
    assert [message for message in found if not is_field(message.partition(":")[0])] == []
