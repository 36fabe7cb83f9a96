"""`unbroken compare`: a script without faults and with them, and whether what it saves is equal, bit for bit.

Here: what workers have recorded, how two records are compared, and what is said of it. Runs are those of unbroken.run;
records are written by unbroken.memory.recording, in the workers.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    from unbroken.comparing.command import run  # noqa: PLC0415 - `unbroken --help` must not pay for it

    return run(arguments)
