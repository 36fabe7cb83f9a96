"""The store client that env:// means during a wrapped call: torch's own, but one that can be left.

torch connects in C++ and tries again, up to the group's timeout (30 minutes), and nothing can end that from outside.
When the rank that serves the store dies just then, everybody else would be lost with it. So torch is asked for short
tries only, and the trying again is Python's, where an interruption can strike.
"""

import contextlib
import datetime
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

TRY_TIMEOUT = datetime.timedelta(seconds=1)

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
        deadline_s = time.monotonic() + timeout.total_seconds()
        while True:
            remaining = datetime.timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
            is_last = remaining <= TRY_TIMEOUT
            generator = original(url, timeout=min(TRY_TIMEOUT, remaining), **options)
            try:
                store, rank, world_size = next(generator)
            except _connection_errors():
                if is_last or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    raise
                continue
            store.set_timeout(timeout)
            yield store, rank, world_size
            yield from generator
            return

    return connect


def _connection_errors() -> tuple[type[Exception], ...]:
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    return (dist.DistNetworkError, dist.DistStoreError)
