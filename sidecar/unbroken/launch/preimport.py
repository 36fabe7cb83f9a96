"""Decides from the user's command whether its workers are forked, and with which imports."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from unbroken.launch.config import LaunchConfig
from unbroken.launch.forking import Forking, is_supported
from unbroken.launch.python_command import (
    PythonCommand,
    main_files,
    modules_worth_importing,
    parse_command,
    variable_read_at_import,
)

_MAX_SCRIPT_BYTES = 4 << 20


def plan_forking(
    config: LaunchConfig, environment: Mapping[str, str], tie: Callable[[], None], complain: Callable[[str], None]
) -> Forking | None:
    """Return the fork server to start; None if each worker is started by Popen."""
    if config.preimport == () or not is_supported():
        return None
    command = parse_command(config.command)
    if command is None or environment.get("PYTHONINSPECT"):
        if config.preimport:
            complain(
                "UNBROKEN_PREIMPORT: no worker is forked: the command is not `python script.py` or `python -m module`"
            )
        return None
    text = _main_text(command, environment)
    if text is None:
        return None
    if config.preimport:
        return Forking(command, config.preimport, environment, tie, complain)
    modules = modules_worth_importing(text)
    name = variable_read_at_import(text)
    if modules and name is not None:
        complain(
            f"{command.target} names {name}, which is read when torch is imported: workers are not forked "
            "(UNBROKEN_PREIMPORT=torch forks them all the same, UNBROKEN_PREIMPORT= silences this)"
        )
    return Forking(command, modules, environment, tie, complain) if modules and name is None else None


def _main_text(command: PythonCommand, environment: Mapping[str, str]) -> str | None:
    """Return the text of the main file; None if it is not found, which the interpreter will report."""
    search_path = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    for path in main_files(command, Path.cwd(), [folder for folder in search_path if folder]):
        with contextlib.suppress(OSError):
            if path.is_file():
                return path.read_bytes()[:_MAX_SCRIPT_BYTES].decode(errors="replace")
    return None
