"""`unbroken preflight`: tests hosts, GPUs and the links between them before a job begins, and names what is broken.

It runs where the job would: torch and the standard library only. All that may hang is a child process that is killed
after its time: gloo has no abort, and a GPU may take a process with it. Nobody is trained, and nothing is changed.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    from unbroken.preflight.command import run  # noqa: PLC0415 - `unbroken --help` must not pay for it

    return run(arguments)
