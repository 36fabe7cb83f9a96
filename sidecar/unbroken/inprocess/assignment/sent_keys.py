"""The key that a step of the script's own sends to other ranks, computed where its rank runs.

One worker answers for all, and its host name or device is not that of the others. So each worker takes such a step
once before the first plan, as far as the call of `ctx.store.send_key`, and sends what it got with its first report.
"""

import inspect
import json
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn

from unbroken.inprocess.assignment.steps import RankAssignmentCtx
from unbroken.inprocess.state import State


class _KeySent(BaseException):
    """Leaves the step; no Exception, so that no handler in it swallows this."""


class _KeyStore:
    """Takes a key, and ends the step there."""

    def __init__(self) -> None:
        self.key: object = None

    def send_key(self, key: object, rank: int | None) -> NoReturn:
        self.key = key
        raise _KeySent

    def send_state(self, state: State, rank: int | None) -> None:
        """Ignore it: states are those of each plan."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"ctx.store.{name} before send_key: want the key to depend on this rank alone")


def sends_key(step: object) -> bool:
    """Return whether the step's own code names `send_key`; helper functions that it calls are not looked at."""
    called = inspect.getattr_static(type(step), "__call__", None)
    return isinstance(called, FunctionType) and "send_key" in called.__code__.co_names


def sent_key(step: Any, state: State) -> str:
    """Return the key that the step sends in this state, as JSON. Raises ValueError if it sends none."""
    store = _KeyStore()
    try:
        step(RankAssignmentCtx(replace(state), store, set()))
    except _KeySent:
        return json.dumps(store.key)
    raise ValueError("it returned without a call of send_key")
