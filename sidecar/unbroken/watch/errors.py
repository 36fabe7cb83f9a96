"""Why nothing can be said of a thing."""

from unbroken_core.vocabulary.errors import UnbrokenError

_MOST_ERROR = 300
"""Characters of what a check of others raises."""


class NotCheckedError(UnbrokenError):
    """Nothing can be said: the message says why."""


def words_of(error: BaseException) -> str:
    """Return what was raised, in at most 300 characters."""
    try:
        return repr(error)[:_MOST_ERROR]
    except BaseException:  # Its __repr__ is code of others, too.
        return type(error).__name__[:_MOST_ERROR]
