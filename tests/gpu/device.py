"""What the machine has, as one JSON object: python -m tests.gpu.device. Also whether our health check passes on it."""

import json
import time
from types import SimpleNamespace
from typing import Any

import torch

from unbroken import inprocess


def look() -> dict[str, Any]:
    """Return the number of devices and, of the first one, its name, its memory and what the health check took."""
    number = torch.cuda.device_count()
    seen: dict[str, Any] = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "devices": number}
    if number == 0:
        return seen
    properties = torch.cuda.get_device_properties(0)
    seen |= {"name": properties.name, "gib": round(properties.total_memory / (1 << 30), 1)}
    if torch.distributed.is_nccl_available():
        seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    torch.ones(1, device="cuda").add_(1).item()
    began_s = time.monotonic()
    state: Any = SimpleNamespace()
    inprocess.health_check.CudaHealthCheck()(state)
    return seen | {"health_check_s": time.monotonic() - began_s}


if __name__ == "__main__":
    print(json.dumps(look()))
