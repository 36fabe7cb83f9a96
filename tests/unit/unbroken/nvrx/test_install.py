"""Whose `nvidia_resiliency_ext.inprocess` a script finds, each in an interpreter of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken
import unbroken_core

ROOTS = [str(Path(next(iter(package.__path__))).parent) for package in (unbroken, unbroken_core)]
TORCH_FREE = "import sys; assert 'torch' not in sys.modules, 'torch was imported'"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with a folder first in its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *ROOTS])}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with an extension that has `inprocess` and another package."""
    for name in ("", "inprocess", "checkpointing"):
        package = tmp_path / "nvidia_resiliency_ext" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"WHOSE = 'theirs {name}'\n")
    return tmp_path


def test_script_finds_ours_and_the_rest_of_the_extension_stays(installed: Path) -> None:
    script = (
        "from unbroken.nvrx import install\ninstall()\ninstall()\n"
        f"{TORCH_FREE}\n"
        "import nvidia_resiliency_ext.checkpointing as rest\n"
        f"{TORCH_FREE}\n"
        "import nvidia_resiliency_ext.inprocess.rank_assignment\n"
        "from nvidia_resiliency_ext.inprocess.tools import inject_fault\n"
        "import nvidia_resiliency_ext as top, unbroken.nvrx.inprocess as ours\n"
        "assert top.inprocess is ours and top.WHOSE == 'theirs '\n"
        "assert inject_fault.__name__ == 'unbroken.nvrx.inject_fault'\n"
        "print(rest.WHOSE)\n"
    )
    done = run(installed, "-c", script)
    assert (done.stdout, done.returncode) == ("theirs checkpointing\n", 0), done.stderr


def test_extension_that_is_loaded_already_is_refused_with_its_file(installed: Path) -> None:
    done = run(installed, "-c", "import nvidia_resiliency_ext.inprocess\nfrom unbroken.nvrx import install\ninstall()")
    assert done.returncode == 1
    where = installed / "nvidia_resiliency_ext/inprocess/__init__.py"
    assert f"nvidia_resiliency_ext.inprocess is loaded already, from {where}: want install() before" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("checkpointing", "nvidia-resiliency-ext is not installed", id="another-package"),
        pytest.param("inprocess.monitor_process", "not part of its public interface; there are abort,", id="internal"),
    ],
)
def test_module_that_is_not_there_is_named(tmp_path: Path, name: str, words: str) -> None:
    assert importlib.util.find_spec("nvidia_resiliency_ext") is None
    script = f"from unbroken.nvrx import install\ninstall()\nimport nvidia_resiliency_ext.{name}"
    done = run(tmp_path, "-c", script)
    assert f"No module named 'nvidia_resiliency_ext.{name}'" in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("is_module", [True, False])
def test_command_runs_script_or_module_as_the_interpreter_would(tmp_path: Path, is_module: bool) -> None:
    (tmp_path / "beside.py").write_text("HERE = 'beside'\n")
    text = "import sys, beside, unbroken.nvrx.finder as f\nprint(__name__, sys.argv[1:], beside.HERE)\n"
    (tmp_path / "script.py").write_text(text + "assert f._Inprocess in map(type, sys.meta_path)\n")
    words = ["-m", "script"] if is_module else ["script.py"]
    done = run(tmp_path, "-m", "unbroken.nvrx", *words, "--steps", "3")
    assert (done.stdout, done.returncode) == ("__main__ ['--steps', '3'] beside\n", 0), done.stderr


def test_command_leaves_the_path_as_it_is_where_it_is_safe(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("HERE = 'beside'\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text("import beside\nprint(beside.HERE)\n")
    done = run(tmp_path, "-P", "-m", "unbroken.nvrx", "scripts/script.py")
    assert (done.stdout, done.returncode) == ("beside\n", 0), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "want a script or -m with a module, got nothing", id="nothing"),
        pytest.param(["--steps"], "want a script or -m with a module, got --steps", id="option"),
        pytest.param(["gone.py"], "no script 'gone.py' in ", id="no-such-file"),
    ],
)
def test_command_says_what_it_wants(tmp_path: Path, words: list[str], message: str) -> None:
    done = run(tmp_path, "-m", "unbroken.nvrx", *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
