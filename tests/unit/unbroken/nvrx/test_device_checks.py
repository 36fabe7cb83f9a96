"""Checks of GPU, NVLink and network adapter, on doubles of the driver's library and of /sys."""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.inprocess.exception import HealthCheckError
from unbroken.inprocess.state import FrozenState
from unbroken.nvrx import nics
from unbroken.nvrx.inprocess import health_check
from unbroken.nvrx.inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
)
from unbroken.nvrx.nvml import NotCheckedError, Nvml

STATE = FrozenState(rank=0, world_size=2)
UNSUPPORTED, LOST = 3, 15


class Library:
    """The driver's library with two devices; `codes` are answered instead of 0."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.actions = [0, 0]
        self.links: list[list[int]] = [[1, 1], [1, 1]]
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name in self.codes:
                return self.codes[name]
            answer: int = getattr(self, f"_{name}", lambda *_: 0)(*arguments)
            return answer

        return call

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        self.asked.append(index)
        device._obj.value = index + 1
        return 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        self.asked.append(uuid)
        device._obj.value = 1
        return 0

    def _nvmlDeviceGetFieldValues(self, device: ctypes.c_void_p, count: int, field: Any) -> int:
        assert (count, field._obj.field_id) == (1, 230)
        field._obj.value.as_uint = self.actions[(device.value or 1) - 1]
        return 0

    def _nvmlDeviceGetNvLinkState(self, device: ctypes.c_void_p, link: int, is_active: Any) -> int:
        links = self.links[(device.value or 1) - 1]
        if link >= len(links):
            return UNSUPPORTED
        is_active._obj.value = links[link]
        return 0

    def _nvmlDeviceGetPciInfo_v3(self, device: ctypes.c_void_p, pci: Any) -> int:
        pci._obj.bus_id = f"00000000:{device.value:02X}:00.0".encode()
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Return the double; this process sees all devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Library()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a /sys: each device has an adapter on its own PCI root."""
    for number in (1, 2):
        root = tmp_path / f"devices/pci0000:{number:02x}"
        adapter = root / "nic"
        counters = adapter / f"infiniband/mlx5_{number}/ports/1/counters"
        counters.mkdir(parents=True)
        (counters / "link_downed").write_text("4\n")
        (root / f"0000:{number:02x}:00.0").mkdir()
        for folder, name, target in (
            ("bus/pci/devices", f"0000:{number:02x}:00.0", root / f"0000:{number:02x}:00.0"),
            ("class/infiniband", f"mlx5_{number}", adapter / f"infiniband/mlx5_{number}"),
        ):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).symlink_to(target)
        (adapter / f"infiniband/mlx5_{number}/device").symlink_to(adapter)
    monkeypatch.setattr(nics, "SYSTEM", tmp_path)
    monkeypatch.setattr(
        health_check, "nearest_adapter", lambda bus_id, index: nics.nearest_adapter(bus_id, index, tmp_path)
    )
    monkeypatch.setattr(health_check, "links_lost", lambda adapter: nics.links_lost(adapter, tmp_path))
    return tmp_path


def lose_link(system: Path, adapter: str, total: int) -> None:
    """Let an adapter count so many lost links."""
    counter = next((system / "class/infiniband" / adapter).glob("ports/1/counters/link_downed"))
    counter.write_text(f"{total}\n")


def test_gpu_that_needs_a_reset_ends_this_worker_and_no_other(library: Library) -> None:
    library.actions = [0, 1]
    fine, broken = (ChainedGPUHealthCheck(index, nvml=lambda: Nvml(library)) for index in (0, 1))
    assert fine(STATE) is STATE
    assert fine.has_checked
    with pytest.raises(HealthCheckError, match="device 1: the GPU needs a reset"):
        broken(STATE)
    with pytest.raises(HealthCheckError, match="needs a reset"):
        ChainedGPUHealthCheck(nvml=lambda: Nvml(library))(STATE)


def test_gpu_that_is_lost_is_not_healthy(library: Library) -> None:
    library.codes["nvmlDeviceGetFieldValues"] = LOST
    with pytest.raises(HealthCheckError, match="code 15 of NVML"):
        ChainedGPUHealthCheck(0, nvml=lambda: Nvml(library))(STATE)


@pytest.mark.parametrize("kind", [ChainedGPUHealthCheck, ChainedNVLHealthCheck, ChainedNicHealthCheck])
def test_without_a_driver_it_is_said_once_that_nothing_was_checked(
    kind: type[ChainedGPUHealthCheck], caplog: pytest.LogCaptureFixture
) -> None:
    def no_library() -> Nvml:
        raise NotCheckedError("libnvidia-ml.so.1 cannot be loaded: no such file")

    check = kind(0, nvml=no_library)
    with caplog.at_level(logging.WARNING):
        assert check(STATE) is check(STATE) is STATE
    assert not check.has_checked
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{kind.__name__}: not checked: libnvidia-ml.so.1 cannot be loaded: no such file"]


def test_old_driver_that_does_not_tell_is_not_taken_for_healthy(library: Library) -> None:
    library.codes["nvmlDeviceGetFieldValues"] = UNSUPPORTED
    check = ChainedGPUHealthCheck(0, nvml=lambda: Nvml(library))
    check(STATE)
    assert not check.has_checked


@pytest.mark.parametrize(
    ("visible", "index", "asked"),
    [
        pytest.param("1,0", 0, [1], id="numbers"),
        pytest.param("GPU-ab, GPU-cd", 1, [b"GPU-cd"], id="uuids"),
        pytest.param("1", None, [1], id="all"),
    ],
)
def test_device_is_the_one_that_cuda_means(
    library: Library, monkeypatch: pytest.MonkeyPatch, visible: str, index: int | None, asked: list[Any]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ChainedGPUHealthCheck(index, nvml=lambda: Nvml(library))(STATE)
    assert library.asked == asked


def test_device_that_this_process_does_not_see_is_not_checked(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check = ChainedGPUHealthCheck(3, nvml=lambda: Nvml(library))
    check(STATE)
    assert not check.has_checked


def test_links_that_are_down_are_named_and_keep_the_worker(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.links[1] = [1, 0, 1]
    check = ChainedNVLHealthCheck(1, nvml=lambda: Nvml(library))
    assert check(STATE) is STATE
    # The metric must not say that it has passed.
    assert not check.has_checked
    assert "NVLinks not active: device=1 links={0: [1]}" in caplog.text
    library.links[1] = [1, 1]
    check(STATE)
    assert check.has_checked


def test_adapter_that_lost_its_link_since_the_last_look_ends_the_worker_beside_it(
    library: Library, system: Path
) -> None:
    checks = [ChainedNicHealthCheck(index, nvml=lambda: Nvml(library)) for index in (0, 1)]
    for check in checks:
        assert check(STATE) is STATE
        assert check.has_checked
    lose_link(system, "mlx5_2", 6)
    checks[0](STATE)
    with pytest.raises(HealthCheckError, match="mlx5_2 has lost its link 2 times since the last look"):
        checks[1](STATE)
    # Once: it is back, and the next one is another loss.
    assert checks[1](STATE) is STATE


def test_adapter_on_another_pci_root_is_none_of_this_device(library: Library, system: Path) -> None:
    (system / "class/infiniband/mlx5_1").unlink()
    check = ChainedNicHealthCheck(0, nvml=lambda: Nvml(library))
    check(STATE)
    assert not check.has_checked


@pytest.mark.parametrize("text", ["", "many\n", "9" * 5000])
def test_counter_that_is_no_number_is_not_checked(library: Library, system: Path, text: str) -> None:
    check = ChainedNicHealthCheck(0, nvml=lambda: Nvml(library))
    next((system / "class/infiniband/mlx5_1").glob("ports/1/counters/link_downed")).write_text(text)
    check(STATE)
    assert not check.has_checked
