"""Devices that work on their own: GPUs and their like. Nothing here imports torch."""

import sys
from typing import Any

_KINDS = ("cuda", "xpu", "mtia")


def devices_in_use() -> list[Any]:
    """Return the modules of torch for the kinds of devices that the script uses."""
    torch: Any = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in _KINDS)
    return [kind for kind in kinds if kind is not None and kind.is_initialized()]


def wait_for_device() -> None:
    """Wait for all that the present stream of each device in use has to do.

    Raises RuntimeError when a device fails.
    """
    for kind in devices_in_use():
        kind.current_stream().synchronize()
