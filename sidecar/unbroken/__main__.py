"""The command `unbroken`: finds its commands by the entry point group `unbroken.commands`."""

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points

from unbroken_core import __version__
from unbroken_core.conventions.console import run_command

_GROUP = "unbroken.commands"


def main() -> int:
    """Run the command named first; return its exit code, 2 when there is none."""
    return run_command(_run)


def _run() -> int:
    arguments = sys.argv[1:]
    commands = {command.name: command for command in entry_points(group=_GROUP)}
    if arguments and arguments[0] == "--version":
        print(f"unbroken {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(commands))
        return 0 if arguments else 2
    command = commands.get(arguments[0])
    if command is None:
        print(f"unbroken: want one of {', '.join(sorted(commands))}, got {arguments[0]!r}", file=sys.stderr)
        return 2
    # The command sees its own arguments only.
    sys.argv = [f"unbroken {command.name}", *arguments[1:]]
    return int(command.load()() or 0)


def _help(commands: dict[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:<{width}}  {_summary(commands[name])}" for name in sorted(commands)]
    return "\n".join(
        ["usage: unbroken [--version] COMMAND ...", "", *lines, "", "`unbroken COMMAND --help` says more."]
    )


def _summary(command: EntryPoint) -> str:
    """Return what the docstring of the command's package says, without its name."""
    try:
        package = importlib.import_module(command.module.removesuffix(".__main__"))
    except ImportError as error:
        return f"not installed: {error}"
    first = (package.__doc__ or "").strip().partition("\n")[0]
    return first.partition(": ")[2] or first


if __name__ == "__main__":
    sys.exit(main())
