"""Exceptions of the function: how to describe them, and how to free what they hold."""

import builtins
import sys
import traceback
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from unbroken.inprocess.exception import RestartAbort
from unbroken_core.protocol.messages import Fault
from unbroken_core.vocabulary.reasons import Cause

MAX_DETAIL = 2000
MAX_FRAMES = 16
MAX_NESTED = 8
"""Groups within groups of exceptions; what is deeper is not described."""
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
"""() before Python 3.11."""


def fault_of(error: BaseException, cause: Cause, iteration: int) -> Fault:
    """Describe an exception for the coordinator; never raises, whatever the exception's class does."""
    return Fault(cause=cause, iteration=iteration, detail=describe(error), stack=_frames(error))


def describe(error: BaseException) -> str:
    """Return type and text in one line of at most MAX_DETAIL characters; of a group also those of its last one."""
    last = error
    for _ in range(MAX_NESTED):
        if isinstance(last, _GROUP):
            # Not by its name, which a class may give another meaning.
            last = _GROUP.exceptions.__get__(last)[-1]
    return _line(error) if last is error else f"{_line(error)} ... {_line(last)}"[:MAX_DETAIL]


def _line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    name = type(error).__name__
    # Cut first: the text may be too long to copy twice.
    line = " ".join(text[:MAX_DETAIL].split())
    return (f"{name}: {line}" if line else name)[:MAX_DETAIL]


def drop(error: BaseException | None) -> None:
    """Free everything that an exception and its chain hold: locals of their frames, tracebacks, each other."""
    for link in list(_chain(error)):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__context__ = None
        link.__cause__ = None


def show_without_frames(error: RestartAbort) -> None:
    """Have the interpreter show this error, should nobody catch it, in one line: where it was raised says nothing."""
    hook = sys.excepthook
    # Weak: where somebody catches it and goes on, the hook must not hold what its frames do.
    shown = weakref.ref(error)

    def show(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        is_it = value is shown()
        hook(kind, value.with_traceback(None) if is_it else value, None if is_it else frames)

    sys.excepthook = show


def _frames(error: BaseException) -> tuple[str, ...]:
    found: list[str] = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDER):
            found.append(f"{code.co_filename}:{step.tb_lineno} in {code.co_name}")
        step = step.tb_next
    return tuple(found[-MAX_FRAMES:])


_OWN_FOLDER = __file__.rpartition("/")[0].rpartition("/")[0] + "/"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    pending = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [link.__context__, link.__cause__, *getattr(link, "exceptions", ())]
