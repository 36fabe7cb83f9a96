"""How hosts and their leader speak: through torch's store, one key a message, each wait with a limit.

    arrived/<rank>    a host: its name, domains and own checks
    order/<n>         the leader: the pairs of the next round, or the report
    result/<n>/<rank> a host that was in a pair: how it went
    read/<rank>       a host has read the report

All of it may be anything: whoever reaches the port may write it, as in torch's own jobs.
"""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch does not export them by name

MAX_MESSAGE_BYTES = 1 << 20
_MAX_TEXT = 300
_PREFIX = "unbroken-preflight"


class MeetingError(Exception):
    """The leader cannot be reached, or says nothing; the message says what."""


@dataclass(frozen=True)
class MeetingPlace:
    """Where hosts meet."""

    host: str
    port: int
    attempt: str = "0"
    """Tells attempts on one store from each other."""

    def store(self, limit_s: float) -> Store:
        """Connect. Raises MeetingError."""
        return self._open(limit_s, is_server=False)[0]

    def serve(self, limit_s: float) -> tuple[Store, int]:
        """Listen, and return the port as well. Raises MeetingError."""
        return self._open(limit_s, is_server=True)

    def _open(self, limit_s: float, is_server: bool) -> tuple[Store, int]:
        timeout = timedelta(seconds=max(limit_s, 1.0))
        try:
            made = TCPStore(self.host, self.port, is_master=is_server, timeout=timeout, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            what = "cannot listen" if is_server else "no answer"
            raise MeetingError(f"{self.host}:{self.port}: {what}: {first_line(error)}") from error
        return PrefixStore(f"{_PREFIX}/{self.attempt}", made), made.port


def first_line(error: object) -> str:
    """Return the first line of what a library says, not longer than a line should be."""
    return str(error).strip().partition("\n")[0][:_MAX_TEXT]


def put(store: Store, key: str, value: Any) -> None:
    """Write a message. Raises MeetingError."""
    try:
        store.set(key, json.dumps(value))
    except RuntimeError as error:
        raise MeetingError(f"cannot write {key}: {first_line(error)}") from error


def take(store: Store, key: str, limit_s: float) -> Any:
    """Wait for a message and return it. Raises MeetingError."""
    try:
        store.wait([key], timedelta(seconds=max(limit_s, 0.001)))
        data = store.get(key)
    except RuntimeError as error:
        raise MeetingError(f"no {key} within {limit_s:g} s: {first_line(error)}") from error
    value = decoded(data)
    if value is None:
        raise MeetingError(f"{key}: cannot be read")
    return value


def those_that_came(store: Store, keys: list[str], limit_s: float) -> dict[str, Any]:
    """Wait until all keys are there, or for so long; return what is there, None for what cannot be read.

    Raises MeetingError where the store is gone.
    """
    until_s = time.monotonic() + limit_s
    try:
        store.wait(keys, timedelta(seconds=max(limit_s, 0.001)))
    except RuntimeError as error:
        if time.monotonic() < until_s - 0.5:
            raise MeetingError(f"the store has failed: {first_line(error)}") from error
    try:
        return {key: decoded(store.get(key)) for key in keys if store.check([key])}
    except RuntimeError as error:
        raise MeetingError(f"the store has failed: {first_line(error)}") from error


def decoded(data: bytes) -> Any:
    """Return the value of a message; None for one that is too long, or no JSON object."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def uses_store_of_torchrun() -> bool:
    """Return whether torchrun's agent listens at the leader's port already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
