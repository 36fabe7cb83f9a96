"""The command's errors beside unbroken_core's InputError (exit code 2)."""

from unbroken_core.errors import UnbrokenError


class CommandError(UnbrokenError):
    """What was asked could not be read: show the message, exit code 1."""


class NotThere(CommandError):
    """The API server knows no such thing."""
