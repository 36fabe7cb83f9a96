"""The memory as a storage of torch.distributed.checkpoint, in a group of one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from unbroken.memory import Checkpointer, Reader, Saved, Skipped, Writer

from .conftest import LivePod


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model, "number": {"step": int(value)}}


def read_back() -> tuple[int | None, float, int]:
    """Return the step that is restored, and what is in it."""
    fresh = make_state(0.0)
    reader = Reader(fresh)
    try:
        if reader.step is not None:
            load(fresh, storage_reader=reader)
        return reader.step, fresh["model"].weight[0, 0].item(), fresh["number"]["step"]
    finally:
        reader.close()


def test_a_plain_save_is_loaded_again(pod: LivePod) -> None:
    pod.start()
    writer = Writer(3)
    save(make_state(3.0), storage_writer=writer)
    assert isinstance(writer.result, Saved)
    assert read_back() == (3, 3.0, 3)


def test_a_reader_refuses_what_is_no_state() -> None:
    with pytest.raises(TypeError, match=r"Reader: want the state, a dictionary .* got Linear"):
        Reader(torch.nn.Linear(4, 4))  # type: ignore[arg-type]  # What it refuses.


def test_an_asynchronous_save_is_loaded_again(pod: LivePod) -> None:
    pod.start()
    writer = Writer(4)
    future: Any = async_save(make_state(4.0), storage_writer=writer)
    future.result()
    assert isinstance(writer.result, Saved)
    assert read_back() == (4, 4.0, 4)


def test_a_checkpointer_reads_what_a_writer_has_saved_and_the_other_way_round(pod: LivePod) -> None:
    pod.start()
    save(make_state(5.0), storage_writer=Writer(5))
    fresh = make_state(0.0)
    assert Checkpointer().load(fresh) == 5
    assert (fresh["model"].weight[0, 0].item(), fresh["number"]["step"]) == (5.0, 5)
    Checkpointer().save(make_state(6.0), 6)
    assert read_back() == (6, 6.0, 6)


def test_a_writer_of_an_earlier_iteration_saves_nothing(pod: LivePod) -> None:
    pod.start()
    Checkpointer().save(make_state(1.0), 1)
    late = Writer(2)
    pod.be(iteration=1)
    assert Checkpointer().load(make_state(0.0)) == 1
    save(make_state(2.0), storage_writer=late)
    assert late.result == Skipped(2, "another iteration of the job has begun")
    assert read_back() == (1, 1.0, 1)


def test_a_reader_without_a_checkpoint_says_so(pod: LivePod) -> None:
    pod.start()
    assert read_back() == (None, 0.0, 0)
    reader = Reader(make_state(0.0))
    with pytest.raises(ValueError, match="no checkpoint in memory can be read"):
        reader.read_metadata()
    reader.close()


def test_the_newest_checkpoint_of_the_disk_is_what_is_left_without_memory(pod: LivePod) -> None:
    # A job without memory: nobody waits for a keeper.
    pod.be_outside()
    disk = pod.folder / "disk"
    for step in (2, 10):
        save(make_state(float(step)), checkpoint_id=disk / f"step-{step}")
    # Begun, and never ended.
    (disk / "step-11").mkdir()
    fresh = make_state(0.0)
    assert Checkpointer(disk=disk).load(fresh) == 10
    assert (fresh["model"].weight[0, 0].item(), fresh["number"]["step"]) == (10.0, 10)


def test_the_later_one_of_memory_and_disk_is_taken(pod: LivePod) -> None:
    pod.start()
    disk = pod.folder / "disk"
    save(make_state(5.0), checkpoint_id=disk / "step-5")
    Checkpointer().save(make_state(4.0), 4)
    assert Checkpointer(disk=disk).load(make_state(0.0)) == 5
    Checkpointer().save(make_state(6.0), 6)
    assert Checkpointer(disk=disk).load(make_state(0.0)) == 6
