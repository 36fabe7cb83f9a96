"""What surrounds the plan: logs, watches, and a CRD that is older than the operator."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from unbroken_operator.adapters.errors import KubeGone, KubeUnavailable
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import WatchEvent
from unbroken_operator.adapters.logs import JsonFormatter
from unbroken_operator.decisions.actions import Decision, WriteStatus, lost_fields, without_lost_fields


@pytest.mark.parametrize(
    ("template", "arguments", "fields"),
    [
        pytest.param(
            "delete pod job=%s/%s pod=%s forced=%s why=%s",
            ("ml", "digits", "digits-1", False, "node a has taint x=y:NoSchedule"),
            {
                "event": "delete pod",
                "job": "ml/digits",
                "pod": "digits-1",
                "forced": "False",
                "why": "node a has taint x=y:NoSchedule",
            },
            id="values with blanks and equals signs",
        ),
        pytest.param(
            "plan failed, trying again in_s=%.1f error=%s",
            (0.25, "503 100%"),
            {"event": "plan failed, trying again", "in_s": "0.2", "error": "503 100%"},
            id="numbers and per cents",
        ),
        pytest.param("nothing else", (), {}, id="no fields"),
        pytest.param("told time=%s by=%s", ("noon", "me"), {"event": "told", "by": "me"}, id="names that are ours"),
    ],
)
def test_a_json_line_has_the_pairs_of_the_message_as_fields(
    template: str, arguments: tuple[Any, ...], fields: dict[str, str]
) -> None:
    record = logging.LogRecord("unbroken_operator.x", logging.INFO, __file__, 1, template, arguments, None)
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "unbroken_operator.x",
        "message": template % arguments,
        **fields,
    }


class Source:
    """An API server whose watches end as the test says; then it has no more to say."""

    def __init__(self, *watches: Any) -> None:
        self.watches = list(watches)
        self.num_lists = 0

    async def list(self, _path: str, _selector: str = "", *, read: object) -> tuple[list[dict[str, Any]], str]:
        self.num_lists += 1
        return [], str(100 * self.num_lists)

    async def peek(self, _path: str) -> str:
        return "999"

    async def watch(self, _path: str, version: str, _selector: str = "") -> AsyncIterator[WatchEvent]:
        if not self.watches:
            await asyncio.Event().wait()
        what = self.watches.pop(0)
        if isinstance(what, Exception):
            raise what
        yield WatchEvent("ADDED", {"metadata": {"name": what, "resourceVersion": str(int(version) + 1)}})


class Store:
    """Remembers what it is told, and does not understand the name "odd"."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def read(self, item: dict[str, Any]) -> dict[str, Any]:
        """See Store."""
        return item

    def mark(self) -> int:
        """See Store."""
        return 0

    def replace(self, _items: list[dict[str, Any]], version: str, _mark: int, _namespace: str | None) -> None:
        self.told.append(f"list {version}")

    def upsert(self, item: dict[str, Any]) -> None:
        if item["metadata"]["name"] == "odd":
            raise ValueError("what is this?")
        self.told.append(f"{item['metadata']['name']} {item['metadata']['resourceVersion']}")

    def remove(self, item: dict[str, Any]) -> None:
        self.told.append(f"no {item['metadata']['name']}")


@pytest.mark.parametrize(
    ("watches", "told"),
    [
        pytest.param(["a", "b"], ["list 100", "a 101", "b 102"], id="a watch that ends goes on where it was"),
        pytest.param(["a", KubeGone("410"), "b"], ["list 100", "a 101", "list 200", "b 201"], id="history is gone"),
        pytest.param(["a", *[KubeUnavailable("503")] * 3, "b"], ["list 100", "a 101", "b 102"], id="away for a moment"),
        pytest.param(
            ["a", *[KubeUnavailable("503")] * 4, "b"], ["list 100", "a 101", "list 200", "b 201"], id="away for longer"
        ),
        pytest.param(["a", "odd", "b"], ["list 100", "a 101", "list 200", "b 201"], id="an object that is a riddle"),
    ],
)
def test_a_watch_goes_on_whatever_happens_to_it(
    watches: list[Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = asyncio.sleep

    async def no_time(_delay_s: float) -> None:
        await pause(0)

    async def scenario() -> None:
        source, store = Source(*watches), Store()
        running = asyncio.create_task(Informer(source, "/api/v1/pods", store).run())
        async with asyncio.timeout(60):
            while source.watches or len(store.told) < len(told):
                await pause(0)
        assert store.told == told
        assert not running.done()
        running.cancel()

    monkeypatch.setattr(asyncio, "sleep", no_time)
    asyncio.run(scenario())


def test_a_field_that_the_crd_does_not_have_is_written_once() -> None:
    patch = {"startTime": "2026-01-01T00:00:00Z", "state": "Forming", "lastRecovery": None}
    lost = lost_fields(patch, {"state": "Forming"})
    assert lost == {"startTime"}
    again = Decision((WriteStatus({"startTime": "2026-01-01T00:00:01Z"}),), 5.0)
    assert without_lost_fields(again, lost) == Decision((), 5.0)
    assert without_lost_fields(again, frozenset()) == again
    more = Decision((WriteStatus({"startTime": "2026-01-01T00:00:01Z", "state": "Running"}),), None)
    assert without_lost_fields(more, lost) == more
