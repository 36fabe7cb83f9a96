"""How the operator ends."""

import asyncio
import os
import signal
from typing import Any, cast

import kopf
import pytest

from unbroken_operator import __main__ as entry
from unbroken_operator.config import Config
from unbroken_operator.kube import Kube
from unbroken_operator.metrics import OperatorMetrics
from unbroken_operator.quarantine import JobsView
from unbroken_operator.rendezvous_client import RendezvousClient
from unbroken_operator.snapshot import NodeView


def test_jobs_are_stopped_while_kopf_still_runs_since_it_would_wait_for_their_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits 5 s for every task that was made while it ran, and cancels them then."""
    told: list[str] = []

    class Jobs:
        def __init__(self, *_: object, **__: object) -> None:
            self.worker: asyncio.Task[None] | None = None

        def nodes(self) -> dict[str, NodeView]:
            return {}

        def blames(self) -> tuple[JobsView, ...]:
            return ()

        async def start(self) -> None:
            told.append("start")

        async def stop(self) -> None:
            told.append("stop")
            ended.set()

    async def operator(stop_flag: asyncio.Event, ready_flag: asyncio.Event, **_: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, told.append, "only kopf is told")
        ready_flag.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop_flag.wait()
        await ended.wait()
        told.append("kopf ends")

    async def no_wait(*_: object) -> bool:
        return True

    async def run() -> None:
        flags = entry.Flags(asyncio.Event(), asyncio.Event())
        nothing = cast(Any, None)
        async with asyncio.timeout(60):
            await entry._work(
                Config(
                    (), None, "sidecar:1", None, None, is_json_log=False, log_level="INFO", force_delete_after_s=30.0
                ),
                cast(Kube, nothing),
                cast(RendezvousClient, nothing),
                cast(OperatorMetrics, nothing),
                flags,
            )

    ended = asyncio.Event()
    monkeypatch.setattr(entry, "Jobs", Jobs)
    monkeypatch.setattr(entry, "_wait_for_api", no_wait)
    monkeypatch.setattr(kopf, "operator", operator)
    asyncio.run(run())
    assert told == ["start", "stop", "kopf ends", "stop"]
