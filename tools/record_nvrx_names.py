"""Record the public names of NVIDIA's `inprocess`, from an unpacked wheel, for the test that compares ours with them.

    python tools/record_nvrx_names.py FOLDER_OF_INPROCESS VERSION > tests/data/nvrx/names.json

Names, parameters and members only; nothing is imported.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

SPECIAL = ("__init__", "__call__")


def main() -> None:
    """Print the record."""
    folder, version = Path(sys.argv[1]), sys.argv[2]
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        if found := _names(ast.parse(path.read_text()), is_root=not name):
            modules[name] = found
    record = {"package": "nvidia-resiliency-ext", "version": version, "modules": modules}
    print(json.dumps(record, indent=1, sort_keys=True))


def _names(tree: ast.Module, *, is_root: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = _members(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = " ".join(_parameters(node))
        elif isinstance(node, ast.ImportFrom) and is_root and node.level:
            found |= {alias.name: "" for alias in node.names}
    return found


def _members(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            if not member.name.startswith("_") or member.name in SPECIAL:
                kinds = [ast.unparse(decorator) for decorator in member.decorator_list]
                words = _parameters(member)[0 if "staticmethod" in kinds else 1 :]
                found[member.name] = "(property)" if "property" in kinds else " ".join(words)
        elif isinstance(member, (ast.Assign, ast.AnnAssign)):
            target = member.targets[0] if isinstance(member, ast.Assign) else member.target
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                found[target.id] = "(attribute)"
    return found


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of parameters in order, with `*` before those by keyword only, and `=` after optional ones."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_needed = len(positional) - len(arguments.defaults)
    words = [f"{each.arg}{'=' if place >= num_needed else ''}" for place, each in enumerate(positional)]
    if arguments.vararg:
        words.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        words.append("*")
    words += [
        f"{each.arg}{'=' if default else ''}"
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return words + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


if __name__ == "__main__":
    main()
