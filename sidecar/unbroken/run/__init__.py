"""`unbroken run`: a job on one machine, without Kubernetes: all parts as processes, and the operator's stand-in.

Here: options, the parts' processes, addresses and files, and what the terminal shows. No decisions about ranks or
restarts, and no code of agents, rendezvous or launchers: they are started as in a cluster.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    from unbroken.run.command import run  # noqa: PLC0415 - `unbroken --help` must not pay for it

    return run(arguments)
