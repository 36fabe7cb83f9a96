"""What a restarted agent finds of the memory of the one before it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.agent.adapters.memory_file import MemoryFile, read_memory
from unbroken.agent.decisions.events import AgentMemory
from unbroken_core.protocol.messages import Plan, RankPlan
from unbroken_core.vocabulary.reasons import RankReason, Role


def memory(iteration: int, num_ranks: int = 2) -> AgentMemory:
    ranks = tuple(RankPlan(rank, rank, RankReason.FIRST) for rank in range(num_ranks))
    plan = Plan(3, iteration, Role.ACTIVE, num_ranks, "127.0.0.9", 600, ranks, ("r1",), 2)
    return AgentMemory(3, iteration - 1, plan, (0,) * num_ranks)


def test_first_agent_of_a_folder_finds_an_empty_memory(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == AgentMemory()


def test_next_agent_finds_what_was_written_last_however_long_what_was_before(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path)
    for iteration, num_ranks in enumerate((64, 64, 1, 2)):
        file.write(memory(iteration, num_ranks))
        assert read_memory(tmp_path) == memory(iteration, num_ranks)
    file.close()
    following = MemoryFile(tmp_path)
    assert following.read() == memory(3, 2)
    following.write(memory(4))
    assert read_memory(tmp_path) == memory(4)
    following.close()


@given(kept=st.integers(min_value=0, max_value=400), garbage=st.binary(max_size=40))
def test_write_that_was_cut_off_leaves_the_memory_before_it(
    tmp_path_factory: pytest.TempPathFactory, kept: int, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("pod")
    file = MemoryFile(folder)
    for iteration in (0, 1, 2):
        file.write(memory(iteration))
    file.close()
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    newest = next(path for path, content in contents.items() if content.split()[1] == b"3")
    torn = contents[newest][:kept] + garbage
    newest.write_bytes(torn)
    # What follows the text may be the end of a longer one before it.
    is_whole = torn.startswith(contents[newest].rstrip(b"\n"))
    assert read_memory(folder) == memory(2 if is_whole else 1)


def test_folder_that_cannot_be_written_costs_the_memory_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = MemoryFile(tmp_path / "missing")
    file.write(memory(0))
    assert file.read() == AgentMemory()
    assert "memory not kept" in caplog.text
