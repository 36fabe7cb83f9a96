"""Which faults a script makes by itself, wherever it runs, so that no restart mends them."""

import re

from unbroken_core.vocabulary.reasons import Cause

_GIVES_UP = "SystemExit"
"""The type of `sys.exit` with another code than 0."""
_IN_THE_CODE = re.compile(
    r"NameError: name '[^']*' is not defined|UnlikeCheckpointError: the checkpoint of step \d+"
    r"|(?:SyntaxError|IndentationError|TabError): .*\.py, line \d+\)$",
    re.ASCII,
)
"""Errors that say nothing but that the code is wrong, or that it loads what it has saved into another state.

Empty data, a service that answers nothing or a shared file system that is away can raise all the others:
UnboundLocalError after a loop over nothing, SyntaxError of what literal_eval reads, TypeError and AttributeError of
None, KeyError, IndexError, ZeroDivisionError, ImportError.
"""


def is_mistake(cause: Cause, detail: str) -> bool:
    """Return whether a fault is the script's own: an error of its code, or that it gives up."""
    return has_given_up(cause, detail) or (cause is Cause.EXCEPTION and _IN_THE_CODE.match(detail) is not None)


def has_given_up(cause: Cause, detail: str) -> bool:
    """Return whether the script left by `sys.exit` with another code than 0."""
    return cause is Cause.BASE_EXCEPTION and detail.partition(":")[0] == _GIVES_UP
