"""What the workers of the tests run: `python -m tests.integration.inprocess.workloads NAME`, the name of a function."""

import importlib
import sys

from . import calls, faults, gpu, interruptions, losses, plugins, waits

LARGE = ("layouts",)
"""Modules that import much of torch, and are imported only where they are wanted; their function is `run`."""


def main(name: str) -> None:
    """Run one workload. Raises LookupError when there is none of this name, or more than one."""
    if name in LARGE:
        importlib.import_module(f".{name}", __package__).run()
        return
    found = [
        vars(theme)[name]
        for theme in (calls, faults, gpu, interruptions, losses, plugins, waits)
        if name in vars(theme)
    ]
    if len(found) != 1:
        raise LookupError(f"workload: want the name of one function, got {name!r}, which {len(found)} modules have")
    found[0]()


if __name__ == "__main__":
    main(sys.argv[1])
