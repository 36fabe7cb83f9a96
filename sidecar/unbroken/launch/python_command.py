"""Which commands a forked process can run, and which modules to import for them beforehand. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_INTERPRETER = re.compile(r"python(\d+(\.\d+)*t?)?")
_SIMPLE_OPTIONS = re.compile(r"-[uBbEIOPqsS]+")
_OPTIONS_WITH_VALUE = ("-W", "-X")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

_IMPORTS_TORCH = re.compile(r"^(import\s+([\w.]+\s*,\s*)*|from\s+)torch\w*\b", re.MULTILINE)
"""Not within a function or a condition: that may never be reached."""
_WHOLE_MODULES = re.compile(
    r"^(?:from|import)\s+(torch\.(?:distributed|nn|optim)(?:\.\w+)*|unbroken\.(?:inprocess|memory))(?=\s|$)",
    re.MULTILINE,
)
"""Imports that take as long again as torch itself and, as all of torch.distributed, start no threads."""
_PARTS_OF_OURS = re.compile(r"^from\s+unbroken\s+import\s+(.*)", re.MULTILINE)
_OURS = ("inprocess", "memory")
_MAX_MODULES = 32
_MAKES_OPTIMIZER = re.compile(r"\boptim")
_READ_AT_IMPORT = re.compile(
    r"\b(?:TORCH(?!_NCCL_|ELASTIC_)[A-Z]*|PYTORCH|ATEN|TRITON|OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB)_[A-Z][A-Z_]*"
)
"""Variables that torch and its libraries read once, at import: a script that sets one must do so before."""

_OF_PLACE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|UNBROKEN)_\w+"
)


@dataclass(frozen=True)
class PythonCommand:
    """`INTERPRETER OPTIONS... SCRIPT ARGUMENTS...` or `INTERPRETER OPTIONS... -m MODULE ARGUMENTS...`."""

    words: tuple[str, ...]
    """The whole command."""
    options: tuple[str, ...]
    target: str
    """Path of the script, or name of the module."""
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def interpreter(self) -> str:
        """Name or path of the interpreter."""
        return self.words[0]


def parse_command(words: Sequence[str]) -> PythonCommand | None:
    """Return the parts of a command; None if a forked process could not run it in the same way."""
    if not words or not _INTERPRETER.fullmatch(PurePosixPath(words[0]).name):
        return None
    num_options = 0
    rest = list(words[1:])
    while num_options < len(rest):
        word = rest[num_options]
        if word in _OPTIONS_WITH_VALUE:
            num_options += 2
        elif word.startswith(_OPTIONS_WITH_VALUE) or _SIMPLE_OPTIONS.fullmatch(word):
            num_options += 1
        else:
            break
    options, rest = tuple(rest[:num_options]), rest[num_options:]
    if rest[:1] == ["-m"]:
        is_known = len(rest) > 1 and _MODULE.fullmatch(rest[1]) and not rest[1].startswith("torch.")
        return PythonCommand(tuple(words), options, rest[1], True, tuple(rest[2:])) if is_known else None
    # Folders and archives are looked up in other ways, and everything else is an option or no script.
    if not rest or not rest[0].endswith(".py") or rest[0].startswith("-"):
        return None
    return PythonCommand(tuple(words), options, rest[0], False, tuple(rest[1:]))


def main_files(command: PythonCommand, working_directory: Path, search_path: Sequence[str]) -> Iterator[Path]:
    """Yield the files that may be the command's main one, the likeliest first; nothing is imported to find out."""
    if not command.is_module:
        yield working_directory / command.target
        return
    relative = command.target.replace(".", "/")
    for folder in (str(working_directory), *search_path):
        yield Path(folder) / f"{relative}.py"
        yield Path(folder) / relative / "__main__.py"


def modules_in(setting: str) -> tuple[str, ...]:
    """Return the modules in a comma-separated setting. Raises ValueError for anything but module names."""
    names = tuple(name.strip() for name in setting.split(",") if name.strip())
    for name in names:
        if not _MODULE.fullmatch(name):
            raise ValueError(f"want names of modules with commas between them, got {name!r}")
    return names


def modules_worth_importing(text: str) -> tuple[str, ...]:
    """Return the modules that a script of this text will import. Making an optimizer imports torch._dynamo."""
    if not _IMPORTS_TORCH.search(text):
        return ()
    first = ("torch", "torch._dynamo") if _MAKES_OPTIMIZER.search(text) else ("torch",)
    whole = _WHOLE_MODULES.findall(text)
    parts = [word for names in _PARTS_OF_OURS.findall(text) for word in re.findall(r"\w+", names)]
    ours = [f"unbroken.{name}" for name in _OURS if name in parts]
    return tuple(dict.fromkeys((*first, *whole, *ours)))[:_MAX_MODULES]


def variable_read_at_import(text: str) -> str | None:
    """Return a variable that a script of this text may set for its import of torch."""
    if "environ" not in text and "putenv" not in text:
        return None
    found = _READ_AT_IMPORT.search(text)
    return None if found is None else found[0]


def is_of_place(name: str) -> bool:
    """Whether a variable only identifies a worker, and does not affect its modules."""
    return _OF_PLACE.fullmatch(name) is not None


def differing_variable(born_with: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return a variable for which a process started in one environment cannot replace one started in the other."""
    names = {name for name in (*born_with, *wanted) if born_with.get(name) != wanted.get(name)}
    return min((name for name in names if not is_of_place(name)), default=None)
