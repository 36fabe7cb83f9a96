"""What a keeper tells of its slots stays within what an agent and a rendezvous take, whatever a trainer wrote there."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from unbroken.keeper.arena import COPIES, Arena, SealedSlot
from unbroken.keeper.copies import owners_of
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import NoRoom
from unbroken_core.pod.memory_slots import EMPTY, Moment
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_DETAIL
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.vocabulary.checkpoints import Held


class ForgedSlots:
    """Each slot that a pod may have says another rank of one step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reached(self, path: Path) -> Path:
        return path

    def sealed(self) -> list[SealedSlot]:
        heads = [replace(EMPTY, moment=Moment(1, 0, 10), rank=rank, world_size=1000) for rank in range(200)]
        own = [SealedSlot(self.folder / f"{head.rank}.slot", head) for head in heads]
        return own + [SealedSlot(self.folder / COPIES / f"mark-{head.rank}-0.slot", head) for head in heads]


def test_slots_that_say_more_ranks_than_a_pod_has_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one trainer would make the reports of its own pod, and of those that keep its copies, be refused."""
    monkeypatch.setattr(f"{Telling.__module__}.{owners_of.__name__}", lambda _arena: {"mark": "uid-1"})
    monkeypatch.setattr(Telling, "_digest", lambda _self, _sealed: "ab")
    held = Telling(cast(Arena, ForgedSlots(tmp_path)), tmp_path).held()
    assert wire.decode(wire.encode(held), Held) == held
    assert [len(holding.shards) for holding in held.holdings] == [MAX_RANKS_PER_POD]
    assert [(copy.owner, len(copy.shards)) for copy in held.copies] == [("uid-1", MAX_RANKS_PER_POD)]


def test_a_lack_of_room_is_told_once_until_there_is_room_or_another_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Telling.__module__}.{owners_of.__name__}", lambda _arena: {})
    monkeypatch.setattr(Telling, "_digest", lambda _self, _sealed: "ab")
    telling = Telling(cast(Arena, ForgedSlots(tmp_path)), tmp_path)
    version = telling.wait(0, 0.0)
    for used in range(1000):
        # What a trainer asks for again and again.
        telling.set_room(1, NoRoom(2 << 20, 1 << 20, f"its slots have {used} bytes"))
    assert telling.wait(version, 0.0) == version + 1
    no_room = telling.held().no_room
    assert no_room.startswith("checkpoints in memory need 2097152 bytes in this pod")
    assert no_room.endswith("but its limit is 1048576: its slots have 0 bytes")
    telling.set_room(1, NoRoom(4 << 20, 1 << 20, "x" * 2 * MAX_DETAIL))
    assert "4194304" in telling.held().no_room
    assert wire.decode(wire.encode(telling.held()), Held) == telling.held()
    telling.set_room(0, None)
    assert "4194304" in telling.held().no_room
    telling.set_room(1, None)
    assert telling.held().no_room == ""
    assert telling.wait(version, 0.0) == version + 3
