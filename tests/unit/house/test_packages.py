"""What each package imports is what its extra installs, and what the workplace of a developer needs is all there."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
OURS = {"unbroken", "unbroken_core", "unbroken_operator", "unbroken_local", "unbroken_cli"}


def imported_names(folder: Path) -> set[str]:
    """Return the top-level names of all absolute imports of a module or below a folder, without ours and Python's."""
    names: set[str] = set()
    for file in [folder] if folder.is_file() else folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - OURS


def declared(extra: str) -> set[str]:
    """Return the canonical names of the distributions that an extra asks for itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {canonicalize_name(Requirement(text).name) for text in project["optional-dependencies"][extra]}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        pytest.param("core/unbroken_core", set(), id="core: nothing"),
        pytest.param("sidecar/unbroken/inprocess", {"torch"}, id="worker library: torch"),
        pytest.param("sidecar/unbroken/launch", set(), id="launcher: nothing"),
        pytest.param("sidecar/unbroken/watch", set(), id="watch: nothing"),
        pytest.param("sidecar/unbroken/probes", {"grpcio"}, id="probes: what they ask by, where it is there"),
        pytest.param("sidecar/unbroken/faults", set(), id="faults on purpose: nothing"),
        pytest.param("sidecar/unbroken/inprocess/faults", set(), id="those of a worker: nothing, not even torch"),
        pytest.param("sidecar/unbroken/install", set(), id="install: nothing"),
        pytest.param("sidecar/unbroken/memory", {"torch"}, id="checkpoints in memory: torch"),
        pytest.param(
            "sidecar/unbroken/keeper", {"isal"}, id="keeper: nothing but a faster checksum, where it is there"
        ),
        pytest.param("sidecar/unbroken/preflight", {"torch"}, id="preflight: torch"),
        pytest.param("sidecar/unbroken/nvrx", {"torch"}, id="stand-in for the extension: torch"),
        *(
            pytest.param(f"sidecar/unbroken/integrations/{name}.py", {"torch", name}, id=f"integration: {name}")
            for name in ("lightning", "torchtitan")
        ),
        pytest.param(
            "sidecar/unbroken/integrations/huggingface.py",
            {"torch", "transformers", "accelerate"},
            id="integration: transformers and accelerate",
        ),
        pytest.param(
            "sidecar/unbroken",
            {"torch", *declared("sidecar"), *declared("tls"), "transformers", "lightning", "torchtitan", "grpcio"},
            id="sidecar: its extras, the frameworks of its integrations, and what a probe asks by",
        ),
        pytest.param("operator/unbroken_operator", declared("operator"), id="operator: its extra"),
        pytest.param("local/unbroken_local", declared("local"), id="local: its extra"),
        pytest.param("cli/unbroken_cli", {*declared("cli"), *declared("size")}, id="command line: its extras"),
    ],
)
def test_package_imports_only_what_its_extra_installs(folder: str, allowed: set[str]) -> None:
    providers = packages_distributions()
    unknown = {
        name
        for name in imported_names(ROOT / folder)
        if allowed.isdisjoint({canonicalize_name(provider) for provider in providers.get(name, [name])})
    }
    assert unknown == set()


def test_no_two_test_files_have_the_same_name() -> None:
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
