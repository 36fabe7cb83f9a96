"""`unbroken run`: a job on one machine, without Kubernetes: all parts as processes, and the operator's stand-in."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    # Imported here: `unbroken --help` must not pay for it, and nobody else imports this package.
    from unbroken.run.command import run  # noqa: PLC0415

    return run(arguments)
