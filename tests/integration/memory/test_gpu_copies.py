"""Checkpoints in memory of what is on a GPU: the slow way, and with slots that are registered with CUDA."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.waiting import wait_until

from unbroken.memory.shard import Shard, ShardReader
from unbroken.memory.slots import Populating, Slot, SlotChangedError, device_to_register, needed_bytes
from unbroken_core.pod.memory_slots import CONTENT_OFFSET

JOB = Path(__file__).with_name("device_job.py")
LIMIT_S = 200.0
LONG_CYCLES = 2_000_000_000
"""Of a GPU: a second and more."""

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unbroken-test-") as path:
        yield Path(path)


def slot_for(path: Path, shard: Shard) -> Slot:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, needed_bytes(shard))
    return Slot(str(path))


def registered(folder: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Slot:
    monkeypatch.setenv("UNBROKEN_MEMORY_PINNED", "1")
    slot = slot_for(folder / "slot", shard)
    Populating([slot], device_to_register(shard)).wait()
    assert all(slot.device_copies.takes(source) for source in shard.sources)
    return slot


def assert_holds(slot: Slot, shard: Shard, wanted: list[torch.Tensor]) -> None:
    for entry, source in zip(shard.layout.entries, wanted, strict=True):
        start = CONTENT_OFFSET + entry.start
        found = slot.bytes[start : start + entry.num_bytes]
        assert torch.equal(found, source.contiguous().reshape(-1).view(torch.uint8)), entry.name


@pytest.mark.gpu
def test_what_a_gpu_has_is_copied_bit_for_bit(gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each type, with and without gaps, with NaNs; also once the slot was unmapped and mapped again."""
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=gpu)
    state = {f"{kind}": noise.view(torch.uint8 if kind is torch.bool else kind).clone() for kind in DTYPES}
    state["torch.bool"] = noise > 99
    state["gaps"] = noise.view(torch.float32).reshape(512, 512)[::3, 1::2]
    shard = ShardReader().read(state)
    wanted = [one.cpu() for one in shard.sources]
    for _ in range(3):
        slot = registered(folder, shard, monkeypatch)
        slot.copy(shard, lambda: True)
        assert_holds(slot, shard, wanted)
        slot.close()


@pytest.mark.gpu
def test_a_copy_waits_for_what_was_queued_before_and_for_nothing_later(
    gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(1 << 24, device=gpu)}
    shard = ShardReader().read(state)
    slot = registered(folder, shard, monkeypatch)
    for value in range(1, 30):
        torch.cuda._sleep(20_000_000)
        state["w"].fill_(value)
        slot.copy(shard, lambda: True)
        state["w"].fill_(-value)
        assert_holds(slot, shard, [torch.full((1 << 24,), value, dtype=torch.float32)])
    slot.close()


@pytest.mark.gpu
def test_a_copy_that_is_given_up_keeps_its_slot_until_it_has_ended(
    gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"gaps": torch.ones((1 << 12, 1 << 11), device=gpu)[:, ::2]}  # No samples: they would wait.
    shard = ShardReader().read(state)
    slot = registered(folder, shard, monkeypatch)
    answers = iter([True])
    torch.cuda._sleep(LONG_CYCLES)
    with pytest.raises(SlotChangedError, match="another iteration"):
        slot.copy(shard, lambda: next(answers, False))
    assert not slot.lock()
    wait_until(slot.lock, "the device has ended", LIMIT_S)
    slot.unlock()
    slot.close()


@pytest.mark.gpu
def test_what_it_costs(
    gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The table of `make gpu-check` shows both ways; nothing is asserted of time."""
    state = {f"{index}": torch.rand(1 << 26, device=gpu) for index in range(4)}
    shard = ShardReader().read(state)
    slots = {"registered": registered(folder, shard, monkeypatch), "the slow way": slot_for(folder / "plain", shard)}
    Populating([slots["the slow way"]], None).wait()
    took_s: dict[str, list[float]] = {way: [] for way in slots}
    for way in [*took_s] * 5:
        torch.cuda.synchronize()
        began_s = time.monotonic()
        slots[way].copy(shard, lambda: True)
        took_s[way].append(time.monotonic() - began_s)
        assert_holds(slots[way], shard, [one.cpu() for one in shard.sources])
    for slot in slots.values():
        slot.close()
    record_property("seen", ", ".join(f"{way} {sorted(seen)[2]:.3f} s a GiB" for way, seen in took_s.items()))


@pytest.mark.parametrize("pinned", ["0", "1"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_job_with_two_faults_ends_as_one_without(
    request: pytest.FixtureRequest, tmp_path: Path, device: str, pinned: str
) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    if device == "gpu":
        request.getfixturevalue("gpu")
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    variables["UNBROKEN_MEMORY_PINNED"] = pinned
    states = []
    for faults in ("0", "1"):
        out = tmp_path / faults
        out.mkdir()
        command = [sys.executable, "-m", "unbroken", "run", "--pods", "1", "--ranks-per-pod", "2", "--memory", "64Mi"]
        done = subprocess.run(
            [*command, str(JOB)],
            env={
                **os.environ,
                **variables,
                "TEST_OUT": str(out),
                "TEST_FAULTS": faults,
                "UNBROKEN_MEMORY_PINNED": pinned,
            },
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert said.count(": restored ") == (6 if faults == "1" else 2), said
        assert "the slow way" not in said
        states.append([(out / f"state-{rank}").read_bytes() for rank in range(2)])
    assert states[0] == states[1]
