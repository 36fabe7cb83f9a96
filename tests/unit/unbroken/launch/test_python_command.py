"""Which commands are forked, and what for."""

from pathlib import Path

import pytest

from unbroken.launch.config import read_config
from unbroken.launch.python_command import (
    differing_variable,
    main_files,
    modules_in,
    modules_worth_importing,
    parse_command,
    variable_read_at_import,
)
from unbroken_core.vocabulary.errors import InputError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["python", "train.py"], ((), "train.py", False, ()), id="script"),
        pytest.param(["/venv/bin/python3.11", "a/b.py", "-m", "x"], ((), "a/b.py", False, ("-m", "x")), id="path"),
        pytest.param(["python3.13t", "-u", "-m", "pkg.main", "--lr", "1"], (("-u",), "pkg.main", True, ("--lr", "1"))),
        pytest.param(
            ["python", "-uB", "-W", "error", "-Xdev", "-I", "t.py"],
            (("-uB", "-W", "error", "-Xdev", "-I"), "t.py", False, ()),
            id="options",
        ),
    ],
)
def test_python_command_is_taken_apart(words: list[str], expected: tuple[object, ...]) -> None:
    command = parse_command(words)
    assert command is not None
    assert (command.options, command.target, command.is_module, command.arguments) == expected
    assert (list(command.words), command.interpreter) == (words, words[0])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param(["torchrun", "train.py"], id="another program"),
        pytest.param(["bash", "train.sh"], id="shell"),
        pytest.param(["pypy3", "train.py"], id="another interpreter"),
        pytest.param(["python"], id="interactive"),
        pytest.param(["python", "-"], id="stdin"),
        pytest.param(["python", "-c", "print()"], id="text"),
        pytest.param(["python", "-i", "train.py"], id="inspect"),
        pytest.param(["python", "-um", "train"], id="options in one word"),
        pytest.param(["python", "-v", "train.py"], id="unknown option"),
        pytest.param(["python", "train"], id="folder or archive"),
        pytest.param(["python", "train.pyc"], id="compiled"),
        pytest.param(["python", "-m"], id="no module"),
        pytest.param(["python", "-m", "torch.distributed.run", "train.py"], id="torchrun as a module"),
        pytest.param(["python", "-W"], id="no value"),
    ],
)
def test_what_a_fork_could_not_become_is_left_alone(words: list[str]) -> None:
    assert parse_command(words) is None


def test_module_is_looked_for_in_the_working_directory_first() -> None:
    command = parse_command(["python", "-m", "a.b"])
    assert command is not None
    found = list(main_files(command, Path("/home"), ["/lib"]))
    assert found == [
        Path(path) for path in ("/home/a/b.py", "/home/a/b/__main__.py", "/lib/a/b.py", "/lib/a/b/__main__.py")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\n", ()),
        ("from torch import nn\n", ("torch",)),
        ("import torchvision\n", ("torch",)),
        ("import os, torch.nn as nn\n", ("torch",)),
        ("import torch.nn as nn\n", ("torch", "torch.nn")),
        (
            "from torch.distributed.fsdp import fully_shard\nfrom unbroken import inprocess as ip, memory\n",
            ("torch", "torch.distributed.fsdp", "unbroken.inprocess", "unbroken.memory"),
        ),
        ("import torch\nfrom unbroken.memory import Checkpointer\n", ("torch", "unbroken.memory")),
        ("import torch\nimport unbroken.agents\nimport torch.utils.tensorboard\n", ("torch",)),
        ("import torch\ndef later():\n    import torch.distributed.fsdp\n", ("torch",)),
        ("".join(f"import torch.nn.m{i}\n" for i in range(99)), ("torch", *(f"torch.nn.m{i}" for i in range(31)))),
        ("if TYPE_CHECKING:\n    import torch\n", ()),
        ("# import torch\ndef train():\n    from torch import optim\n", ()),
        ("import torch\noptimizer = torch.optim.SGD([])\n", ("torch", "torch._dynamo")),
    ],
)
def test_script_says_what_is_worth_to_be_imported(text: str, expected: tuple[str, ...]) -> None:
    assert modules_worth_importing(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", "OMP_NUM_THREADS"),
        ("os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'x')", "PYTORCH_CUDA_ALLOC_CONF"),
        ("os.environ['TORCH_LOGS'] = 'all'", "TORCH_LOGS"),
        ("# OMP_NUM_THREADS is set outside", None),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'; os.environ['NCCL_DEBUG'] = 'INFO'", None),
        ("os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'; os.environ['TORCHELASTIC_RUN_ID']", None),
        ("rank = os.environ['RANK']", None),
    ],
)
def test_script_that_sets_what_torch_reads_at_its_import_is_found(text: str, expected: str | None) -> None:
    assert variable_read_at_import(text) == expected


def test_environments_may_differ_in_who_the_worker_is_only() -> None:
    born = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    place = {"RANK": "1", "LOCAL_RANK": "1", "ROLE_WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert differing_variable(born, {**born, **place, "UNBROKEN_INCARNATION": "3"}) is None
    assert differing_variable(born, {**born, "OMP_NUM_THREADS": "2"}) == "OMP_NUM_THREADS"
    assert differing_variable(born, {**born, "MY_RANK": "2"}) == "MY_RANK"
    assert differing_variable(born, {"OMP_NUM_THREADS": "1"}) == "PATH"


def test_setting_with_what_is_no_module_is_refused_by_its_name() -> None:
    environment = {"UNBROKEN_DIR": "/run", "UNBROKEN_PREIMPORT": "torch;os"}
    with pytest.raises(InputError, match=r"UNBROKEN_PREIMPORT: want names of modules .*, got 'torch;os'"):
        read_config(["--", "python", "train.py"], environment)


def test_setting_is_a_list_of_modules() -> None:
    assert modules_in(" torch, torch._dynamo ,") == ("torch", "torch._dynamo")
    assert modules_in("") == ()
    with pytest.raises(ValueError, match="got 'a-b'"):
        modules_in("torch,a-b")
