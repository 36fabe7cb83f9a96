"""Calls to the API server are made in turns of the namespaces that wait."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from unbroken_operator.adapters.tasks.fair_gate import FairGate


class Crowd:
    """Calls that hold their place until they are told to end."""

    def __init__(self, num_places: int, most_of_one: int) -> None:
        self.gate = FairGate(num_places, most_of_one)
        self.inside: list[str] = []
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def call(self, name: str) -> None:
        """Start the call of a name like `evil/3`."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name))
        await settled()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settled()

    async def _hold(self, name: str) -> None:
        async with self.gate.place(name.partition("/")[0]):
            self.inside.append(name)
            self.order.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.inside.remove(name)


async def settled() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_namespace_that_asks_for_much_does_not_hold_up_one_that_asks_for_little() -> None:
    """Seen before: a call waited for the 512 that others had asked for, 17 s for the first pod of a job."""

    async def scenario() -> None:
        crowd = Crowd(num_places=4, most_of_one=3)
        for number in range(40):
            await crowd.call(f"evil/{number}")
        await crowd.call("good/0")
        assert crowd.inside == ["evil/0", "evil/1", "evil/2", "good/0"], "a place is left for others"
        await crowd.call("fair/0")
        await crowd.call("good/1")
        await crowd.end("evil/0")
        assert crowd.inside[-1] == "fair/0", "who has none comes before who has one, and before who came first"
        await crowd.end("evil/1")
        assert crowd.inside[-1] in ("good/1", "evil/3")
        await crowd.end("evil/2")
        assert {"good/1", "evil/3"} <= set(crowd.inside)
        while crowd.inside:
            await crowd.end(crowd.inside[0])
        assert len(crowd.order) == 43, "nobody was forgotten"
        assert [name for name in crowd.order if name.startswith("evil")] == [f"evil/{n}" for n in range(40)]

    run(scenario)


def test_a_place_that_gets_free_stays_free_where_all_who_wait_have_their_most() -> None:
    async def scenario() -> None:
        crowd = Crowd(num_places=4, most_of_one=2)
        for name in ("evil/0", "good/0", "good/1", "evil/1", "evil/2", "evil/3"):
            await crowd.call(name)
        await crowd.end("good/0")
        assert crowd.inside == ["evil/0", "good/1", "evil/1"]
        await crowd.call("fair/0")
        assert crowd.inside[-1] == "fair/0", "it does not wait for who asked before it"
        await crowd.end("evil/0")
        assert crowd.inside[-1] == "evil/2"
        while crowd.inside:
            await crowd.end(crowd.inside[0])
        assert len(crowd.order) == 7, "nobody was forgotten"

    run(scenario)


def test_equals_take_turns() -> None:
    async def scenario() -> None:
        crowd = Crowd(num_places=1, most_of_one=1)
        for number in range(3):
            for tenant in ("a", "b", "c"):
                await crowd.call(f"{tenant}/{number}")
        while crowd.inside:
            await crowd.end(crowd.inside[0])
        assert crowd.order == [f"{tenant}/{number}" for number in range(3) for tenant in ("a", "b", "c")]

    run(scenario)


@pytest.mark.parametrize("when", ["while it waits", "at the moment when its turn comes"])
def test_who_is_cancelled_takes_no_place_away(when: str) -> None:
    async def scenario() -> None:
        crowd = Crowd(num_places=1, most_of_one=1)
        await crowd.call("a/0")
        await crowd.call("b/0")
        await crowd.call("c/0")
        if when == "while it waits":
            crowd.tasks["b/0"].cancel()
            await crowd.end("a/0")
        else:
            crowd.ends["a/0"].set()
            await asyncio.sleep(0)  # It ends, and its place is given on.
            crowd.tasks["b/0"].cancel()
            await settled()
        assert crowd.inside == ["c/0"]
        await crowd.end("c/0")
        await crowd.call("b/1")
        assert crowd.inside == ["b/1"]
        await crowd.end("b/1")

    run(scenario)


def test_a_call_that_fails_gives_its_place_back() -> None:
    async def scenario() -> None:
        gate = FairGate(1, 1)
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                async with gate.place("a"):
                    raise ValueError("no")

    run(scenario)
