"""Devices that work on their own: GPUs and their like."""

import sys
from typing import Any

_KINDS = ("cuda", "xpu")


def wait_for_device() -> None:
    """Wait for all that the present stream of a device in use has to do. Imports nothing.

    Raises RuntimeError when the device fails.
    """
    torch: Any = sys.modules.get("torch")
    for name in _KINDS:
        kind = getattr(torch, name, None)
        if kind is not None and kind.is_initialized():
            kind.current_stream().synchronize()
