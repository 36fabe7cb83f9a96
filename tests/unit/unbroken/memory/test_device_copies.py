"""Copies of what is on devices: a stream that ends late, never or with an error. CUDA itself: test_gpu_copies.py."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_until

from unbroken.memory import device_copies, slots
from unbroken.memory.device_copies import DeviceCopies, are_wanted
from unbroken.memory.shard import Shard, ShardReader
from unbroken.memory.slots import Author, Populating, Slot, SlotChangedError, device_to_register, needed_bytes
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, Moment, SlotState

AUTHOR = Author(b"j" * 16, Moment(1, 0, 7), 0, 1)
LIMIT_S = 60.0
CPU = torch.device("cpu")


class Done:
    """What a stream has come to."""

    def __init__(self, devices: "Devices") -> None:
        self._devices = devices
        self.has_ended = threading.Event()

    def query(self) -> bool:
        """Return whether it is there. Raises RuntimeError when the device has failed."""
        if self._devices.failure:
            raise RuntimeError(self._devices.failure)
        return self.has_ended.is_set()


class Devices:
    """One device, whose only stream is a thread that copies when it is let go on. All tensors of 2 and more are on it.

    Written after torch's description of streams and events, for want of a device.
    """

    def __init__(self, problem: str = "") -> None:
        self.may_run = threading.Event()
        self.has_work = False
        self.failure = ""
        self.problem = problem
        self.registered: list[int] = []
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            pairs, done = work
            self.may_run.wait()
            for target, source in pairs:
                target.copy_(source)
            done.has_ended.set()

    def end(self) -> None:
        """End its thread."""
        self.may_run.set()
        self._work.put(None)
        self._thread.join()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on it."""
        return tensor.numel() > 1

    def register(self, device: torch.device, memory: torch.Tensor) -> str:
        """Take memory of the host."""
        if not self.problem:
            self.registered.append(memory.data_ptr())
        return self.problem

    def unregister(self, memory: torch.Tensor) -> None:
        """Give it back."""
        self.registered.remove(memory.data_ptr())

    def stream(self, device: torch.device) -> object:
        """Return its only one."""
        return self

    def copy(self, stream: object, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Done:
        """Copy later."""
        assert stream is self
        done = Done(self)
        self._work.put((pairs, done))
        self.has_work = True
        return done


@pytest.fixture
def devices() -> Iterator[Devices]:
    made = Devices()
    yield made
    made.end()


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(1 << 16, dtype=torch.float32), "step": torch.tensor(7), "bias": torch.ones(33)}


@pytest.fixture
def shard(state: dict[str, torch.Tensor]) -> Shard:
    return ShardReader().read(state)


def make_slot(folder: Path, shard: Shard, devices: Devices) -> Slot:
    path = folder / "slot"
    path.write_bytes(bytes(needed_bytes(shard)))
    return Slot(str(path), devices)


@pytest.fixture
def slot(tmp_path: Path, shard: Shard, devices: Devices) -> Slot:
    made = make_slot(tmp_path, shard, devices)
    made.device_copies.register(CPU)
    return made


def content(slot: Slot, shard: Shard, name: str) -> torch.Tensor:
    (entry,) = (one for one in shard.layout.entries if one.name == name)
    start = CONTENT_OFFSET + entry.start
    return slot.bytes[start : start + entry.num_bytes].view(entry.dtype)


class Copying(threading.Thread):
    """A save in a thread of its own."""

    def __init__(self, slot: Slot, shard: Shard, devices: Devices) -> None:
        super().__init__(daemon=True)
        self.waits = threading.Event()
        """For the device."""
        self.may_go_on = True
        self.result: object = None
        self._slot, self._shard, self._devices = slot, shard, devices
        self.start()

    def _ask(self) -> bool:
        if self._devices.has_work:
            self.waits.set()
        return self.may_go_on

    def run(self) -> None:
        try:
            self.result = self._slot.copy(self._shard, self._ask)
        except Exception as error:
            self.result = error


def test_a_copy_has_ended_only_when_the_device_has(slot: Slot, shard: Shard, devices: Devices) -> None:
    copying = Copying(slot, shard, devices)
    assert copying.waits.wait(LIMIT_S)
    assert copying.is_alive()
    assert not content(slot, shard, "weight").any()
    devices.may_run.set()
    copying.join()
    assert isinstance(copying.result, tuple), copying.result
    assert not slot.device_copies.are_under_way
    for name, source in zip((one.name for one in shard.layout.entries), shard.sources, strict=True):
        assert torch.equal(content(slot, shard, name), source.reshape(-1)), name


def test_a_slot_that_a_device_may_still_write_is_nobodys(slot: Slot, shard: Shard, devices: Devices) -> None:
    """The next iteration has begun: who copied goes, and what the device writes late spoils no later checkpoint."""
    head = slot.begin(AUTHOR, shard)
    copying = Copying(slot, shard, devices)
    assert copying.waits.wait(LIMIT_S)
    copying.may_go_on = False
    copying.join()
    assert isinstance(copying.result, SlotChangedError)
    slot.void(head)
    assert not slot.lock()
    devices.may_run.set()
    wait_until(slot.lock, "the device has ended")
    found = slot.head
    assert found is not None
    assert found.state is SlotState.FREE
    slot.unlock()


def test_a_device_that_fails_ends_a_save_with_its_error(slot: Slot, shard: Shard, devices: Devices) -> None:
    slot.begin(AUTHOR, shard)
    devices.failure = "CUDA error: an illegal memory access was encountered"
    copying = Copying(slot, shard, devices)
    copying.join()
    assert isinstance(copying.result, RuntimeError)
    assert devices.failure in str(copying.result)
    found = slot.head
    assert found is not None
    assert found.state is SlotState.WRITING
    with pytest.raises(RuntimeError, match="illegal memory access"):
        slot.lock()


def test_tensors_that_change_meanwhile_are_found(
    slot: Slot, shard: Shard, devices: Devices, state: dict[str, torch.Tensor]
) -> None:
    copying = Copying(slot, shard, devices)
    assert copying.waits.wait(LIMIT_S)
    state["bias"].add_(1)
    devices.may_run.set()
    copying.join()
    assert isinstance(copying.result, SlotChangedError)
    assert "changed while they were copied" in str(copying.result)


def test_memory_that_cannot_be_registered_is_written_as_before(
    tmp_path: Path, shard: Shard, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(problem="cudaHostRegister: error 2")
    slot = make_slot(tmp_path, shard, devices)
    Populating([slot], CPU).wait()
    slot.copy(shard, lambda: True)  # The device would never end it.
    assert torch.equal(content(slot, shard, "weight"), shard.sources[0])
    assert "the slow way: cudaHostRegister: error 2" in caplog.text
    slot.close()
    devices.end()


def test_a_closed_slot_is_registered_no_more(slot: Slot, devices: Devices) -> None:
    assert devices.registered == [slot.bytes.data_ptr()]
    slot.close()
    assert devices.registered == []


@pytest.mark.parametrize("failure", ["", "CUDA error: unspecified launch failure"])
def test_a_slot_stays_mapped_when_a_device_does_not_end(
    slot: Slot, shard: Shard, devices: Devices, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """Unmapped, its addresses would soon be somebody else's memory."""
    monkeypatch.setattr(device_copies, "_CLOSE_S", 0.0)
    left: list[Any] = []
    monkeypatch.setattr(slots, "_left_mapped", left)
    copying = Copying(slot, shard, devices)
    assert copying.waits.wait(LIMIT_S)
    copying.may_go_on = False
    copying.join()
    devices.failure = failure
    slot.close()
    assert len(left) == 1
    assert not left[0].closed
    assert len(devices.registered) == 1


def test_only_who_asks_for_it_has_slots_registered(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not are_wanted({})
    assert not are_wanted({"UNBROKEN_MEMORY_PINNED": "yes"})
    assert are_wanted({"UNBROKEN_MEMORY_PINNED": "1"})
    monkeypatch.setenv("UNBROKEN_MEMORY_PINNED", "1")
    # None of these is on a real device.
    assert device_to_register(shard) is None


def test_what_is_not_registered_is_for_nobody(devices: Devices) -> None:
    assert not DeviceCopies(torch.zeros(8, dtype=torch.uint8), devices).takes(torch.zeros(8))
