"""Why nothing can be said of a thing."""

from unbroken_core.vocabulary.errors import UnbrokenError


class NotCheckedError(UnbrokenError):
    """Nothing can be said: the message says why."""
