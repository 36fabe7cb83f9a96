"""The store client behind env:// during a wrapped call: torch's own, but interruptible.

torch connects in C++ and retries up to the group's timeout (30 minutes), and nothing can stop that from outside. If the
rank that serves the store dies just then, all others would be lost with it. So torch makes short attempts only, and
Python retries, where an interruption can strike.
"""

import contextlib
import datetime
import importlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

TRY_TIMEOUT = datetime.timedelta(seconds=0.5)
"""Timeout of one attempt, which takes up to six times as long without an answer."""
PROBE_INTERVAL_S = 0.05

_Handler = Callable[..., Iterator[tuple[Any, int, int]]]


@contextlib.contextmanager
def interruptible_env() -> Iterator[None]:
    """Replace torch's handler of env:// for a while; does nothing with a torch that keeps its handlers elsewhere."""
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, _Handler] = getattr(module, "_rendezvous_handlers", {})
    original = handlers.get("env")
    if original is None:
        yield
        return
    handlers["env"] = _handler(original)
    try:
        yield
    finally:
        handlers["env"] = original


def _handler(original: _Handler) -> _Handler:
    def connect(url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=30), **options: Any) -> Any:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Rank 0 serves this store itself and waits in it for the others: a short attempt would end it too early.
            yield from original(url, timeout=timeout, **options)
            return
        deadline_s = time.monotonic() + timeout.total_seconds()
        while (generator := _try(original, url, deadline_s, options)) is None:
            _wait_for_server(deadline_s)
        store, rank, world_size = next(generator)
        store.set_timeout(timeout)
        yield store, rank, world_size
        yield from generator

    return connect


def _try(original: _Handler, url: str, deadline_s: float, options: dict[str, Any]) -> Iterator[Any] | None:
    """Return an iterator over what torch's handler yields; None if the server did not answer and time is left."""
    remaining = datetime.timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
    generator = original(url, timeout=min(TRY_TIMEOUT, remaining), **options)
    try:
        first = next(generator)
    except _connection_errors():
        if remaining <= TRY_TIMEOUT:
            raise
        return None
    return itertools.chain((first,), generator)


def _wait_for_server(deadline_s: float) -> None:
    """Return once the server listens, or at the deadline. The interruption strikes here, outside of a handler."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection(address, timeout=1.0):
                return
        except (OSError, UnicodeError):
            pass
        time.sleep(PROBE_INTERVAL_S)


def _connection_errors() -> tuple[type[Exception], ...]:
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    return (dist.DistNetworkError, dist.DistStoreError)
