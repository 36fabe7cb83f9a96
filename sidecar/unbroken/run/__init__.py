"""`unbroken run`: a job on one machine, without Kubernetes: all parts as processes, and the operator's stand-in."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    from unbroken.run.command import run  # noqa: PLC0415 - `unbroken --help` must not pay for it

    return run(arguments)
