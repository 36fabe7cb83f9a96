"""The exit status of a process that is still ending: Linux shows it before its parent can wait for it."""

from pathlib import Path

_STATE, _FLAGS, _EXIT_STATUS = 0, 6, -1
"""Of the fields of /proc/<pid>/stat after the name."""
_STOPPED = "Tt"
_EXITING = 0x4
"""PF_EXITING of the kernel's task flags."""


def exit_status(pid: int) -> int | None:
    """Return the wait status of a process that is ending, for `os.waitstatus_to_exitcode`; None while that is unknown.

    The status stands there before the memory is freed. 0 is no answer: it may be one that is hidden, or the end of the
    main thread alone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, flags, status = fields[_STATE], int(fields[_FLAGS]), int(fields[_EXIT_STATUS])
    except (OSError, ValueError, IndexError):
        return None
    # The status of a stopped process is the signal that stopped it.
    is_ending = bool(flags & _EXITING) and state not in _STOPPED
    return status if is_ending and status != 0 else None
