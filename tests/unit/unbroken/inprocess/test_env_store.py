"""What env:// means during a wrapped call, with a stand-in for torch's own handler."""

import datetime
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from unbroken.inprocess.connections.env_store import TRY_TIMEOUT, interruptible_env

TIMEOUT = datetime.timedelta(minutes=5)


class Store:
    """Knows the timeout that it was left with."""

    timeout: datetime.timedelta | None = None

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout


class Handler:
    """Stands for torch's: the first tries may fail."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.tries: list[datetime.timedelta] = []

    def __call__(self, url: str, timeout: datetime.timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
        assert (url, options) == ("env://", {})
        self.tries.append(timeout)
        if len(self.tries) <= self.num_failures:
            raise dist.DistNetworkError("nobody listens")
        yield Store(), 0, 2


def connect(monkeypatch: pytest.MonkeyPatch, handler: Handler) -> Store:
    handlers = {"env": handler}
    monkeypatch.setattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", handlers)
    with interruptible_env():
        store, rank, world_size = next(handlers["env"]("env://", timeout=TIMEOUT))
    assert handlers["env"] is handler
    assert (rank, world_size) == (0, 2)
    return store


def test_rank_0_that_serves_the_store_itself_waits_for_the_others_as_long_as_the_script_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    handler = Handler()
    connect(monkeypatch, handler)
    assert handler.tries == [TIMEOUT]


def test_store_of_the_library_is_tried_shortly_and_again_and_keeps_the_scripts_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("unbroken.inprocess.connections.env_store._wait_for_server", lambda deadline_s: None)
    handler = Handler(num_failures=2)
    assert connect(monkeypatch, handler).timeout == TIMEOUT
    assert handler.tries == [TRY_TIMEOUT] * 3


def test_store_that_never_answers_is_an_error_once_the_scripts_timeout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("unbroken.inprocess.connections.env_store._wait_for_server", lambda deadline_s: None)
    monkeypatch.setattr(f"{__name__}.TIMEOUT", TRY_TIMEOUT)
    with pytest.raises(dist.DistNetworkError, match="nobody listens"):
        connect(monkeypatch, Handler(num_failures=1))
