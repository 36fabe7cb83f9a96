"""All errors that Unbroken raises on purpose; one class per reaction.

UnbrokenError
├── InputError          the user or operator gave something wrong: show the message, change nothing
├── WireError           a message was refused: count it, log it, close the connection
└── InternalError       a promise of our own code is broken: a bug
"""

from typing import NoReturn


class UnbrokenError(Exception):
    """Root of every error that Unbroken raises on purpose."""


class InputError(UnbrokenError, ValueError):
    """Bad input; the message says what, where, seen and wanted."""


class WireError(UnbrokenError):
    """A message that is malformed, oversized, of another version or out of place."""


class InternalError(UnbrokenError, RuntimeError):
    """A broken promise of our own code."""


def assert_never(value: NoReturn) -> NoReturn:
    """Tell the type checker that no branch is missing (typing.assert_never needs Python 3.11)."""
    raise InternalError(f"unexpected value: want no value to reach this branch, got {value!r}")
