"""How a command ends when nobody reads its output any more, as in `unbroken status | head -1`, and at Ctrl-C."""

import os
import select
import sys
from collections.abc import Callable

CLOSED_PIPE = 141
"""Exit code, as a shell shows it for a program that SIGPIPE has ended."""
INTERRUPTED = 130
"""... that SIGINT has ended."""


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code.

    CLOSED_PIPE, without a word, when nobody read its output to the end; INTERRUPTED at Ctrl-C.
    """
    try:
        try:
            return command()
        finally:
            # What is still in the buffer would be written when the interpreter ends, and complain there.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _is_closed(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
