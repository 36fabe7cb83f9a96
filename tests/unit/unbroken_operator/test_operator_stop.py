"""How the operator ends, and what ends with kopf."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import kopf
import pytest

from unbroken_operator import handlers
from unbroken_operator.jobs import Jobs


class Watcher:
    """Stands in for all jobs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, str]] = []
        self.workers: list[asyncio.Task[None]] = []
        self.came = asyncio.Event()
        self.restored = asyncio.Event()

    def observe(self, kind: str | None, job: Mapping[str, Any]) -> None:
        """Start a worker, as for a new job."""
        self.seen.append((kind, job["name"]))
        self.workers.append(asyncio.create_task(asyncio.sleep(3600)))
        self.came.set()


def run_with(
    monkeypatch: pytest.MonkeyPatch, operator: Callable[..., Any], then: Callable[[Watcher, asyncio.Event], Any]
) -> Watcher:
    """Run the watch with a kopf of the test's own, and beside it what the test does."""

    async def is_served() -> bool:
        served.append(len(served) > 0)
        return served[-1]

    served: list[bool] = []

    async def scenario() -> Watcher:
        watcher, stop, ready = Watcher(), asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(60):
            watching = asyncio.create_task(
                handlers.run_operator(cast(Jobs, watcher), None, (), stop, ready, is_served=is_served), name="watch"
            )
            await ready.wait()
            await then(watcher, stop)
            await watching
        assert not any(worker.done() for worker in watcher.workers)
        for worker in watcher.workers:
            worker.cancel()
        await asyncio.gather(*watcher.workers, return_exceptions=True)
        return watcher

    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(handlers, "RESTART_S", 0.0)
    return asyncio.run(scenario())


def test_a_watch_that_fails_ends_no_worker_and_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf cancels all tasks of its loop that were made while it ran: those of the jobs must not be among them."""
    rounds: list[int] = []

    async def operator(memo: handlers.OperatorMemo, stop_flag: threading.Event, ready_flag: Any, **_: Any) -> None:
        rounds.append(len(rounds))
        memo.observe("ADDED", {"name": f"job-{len(rounds)}"})
        ready_flag.set_result(None)
        if len(rounds) == 1:
            others = asyncio.all_tasks() - {cast(asyncio.Task[Any], asyncio.current_task())}
            for task in others:
                task.cancel()
            raise RuntimeError("404 page not found")
        await asyncio.to_thread(stop_flag.wait)

    async def then(watcher: Watcher, stop: asyncio.Event) -> None:
        while len(watcher.seen) < 2:
            watcher.came.clear()
            await watcher.came.wait()
        stop.set()

    watcher = run_with(monkeypatch, operator, then)
    assert watcher.seen == [("ADDED", "job-1"), ("ADDED", "job-2")]


def test_the_watch_is_told_to_end_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def operator(stop_flag: threading.Event, ready_flag: Any, **_: Any) -> None:
        ready_flag.set_result(None)
        await asyncio.to_thread(stop_flag.wait)
        told.append("kopf ends")

    async def then(_: Watcher, stop: asyncio.Event) -> None:
        stop.set()

    run_with(monkeypatch, operator, then)
    assert told == ["kopf ends"]


def test_the_watch_of_jobs_begins_anew_when_the_history_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait in silence until the versions reach those of the former history."""

    async def operator(memo: handlers.OperatorMemo, stop_flag: threading.Event, ready_flag: Any, **_: Any) -> None:
        memo.observe("ADDED", {"name": "digits"})
        ready_flag.set_result(None)
        await asyncio.to_thread(stop_flag.wait)

    async def then(watcher: Watcher, stop: asyncio.Event) -> None:
        await watcher.came.wait()
        watcher.came.clear()
        watcher.restored.set()
        await watcher.came.wait()
        stop.set()

    watcher = run_with(monkeypatch, operator, then)
    assert watcher.seen == [("ADDED", "digits")] * 2
