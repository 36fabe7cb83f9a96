"""Which devices are the pod's, where its container sees more."""

import pytest

from unbroken.watch.nvml import Gpu
from unbroken.watch.visible import read_visible

A, B, C, D = (Gpu(f"GPU-{name}", number + 1, "") for number, name in enumerate("abcd"))


def lost(number: int) -> Gpu:
    return Gpu(f"GPU {number}", -15, "")


@pytest.mark.parametrize(
    ("text", "devices", "own"),
    [
        pytest.param("", (A, B), [0, 1], id="nothing is named"),
        pytest.param("all", (A, B), [0, 1], id="all"),
        pytest.param("void", (A, B), [0, 1], id="a device plugin that mounts"),
        pytest.param("GPU-b", (A, B, C), [1], id="a UUID"),
        pytest.param(" GPU-c ,GPU-a,", (A, B, C), [0, 2], id="UUIDs"),
        pytest.param("GPU-z", (A, B), [], id="the UUID of nobody here"),
        pytest.param("GPU-a", (A, lost(1), C), [0], id="a lost GPU of another pod"),
        pytest.param("GPU-a,GPU-b", (A, lost(1), C), [0, 1], id="an own one that is lost"),
        pytest.param("GPU-a,GPU-b", (A, lost(1), lost(2)), [0, 1, 2], id="one of two that are lost"),
        pytest.param("2,3", (A, B, C, D), [2, 3], id="numbers in a privileged container"),
        pytest.param("2,3", (A, lost(1), C, lost(3)), [2, 3], id="numbers, and who is lost"),
        pytest.param("2,3", (C, D), [0, 1], id="numbers, and only these are let through"),
        pytest.param("6,7", (A, B, C), [0, 1, 2], id="numbers that count otherwise"),
        pytest.param("99", (A, B), [0, 1], id="a number that nobody has"),
        pytest.param("9" * 5000, (A, B), [0, 1], id="no number of a device"),
        pytest.param("MIG-GPU-b/7/0", (A, B, C), [1], id="a part of a device"),
        pytest.param("1:0,1:1", (A, B, C), [1], id="parts of a device by number"),
        pytest.param("MIG-5f7c", (A, B), [0, 1], id="a part that does not say of which"),
        pytest.param("0,GPU-c", (A, B, C), [0, 2], id="both"),
    ],
)
def test_devices_of_other_pods_are_none_of_ours(text: str, devices: tuple[Gpu, ...], own: list[int]) -> None:
    assert read_visible(text, len(devices)).own(devices) == own
