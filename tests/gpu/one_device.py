"""Several ranks on one device, as far as NCCL lets them."""

import os
import re
from pathlib import Path

import torch

REFUSALS = ("duplicate gpu", "invalid usage")
"""What NCCL says of two ranks on one device."""


def first_device() -> torch.device:
    """Return the first device, prepared for all ranks of a job; without a GPU the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.update(as_host(str(os.getpid())))
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def as_host(name: str, log: Path | None = None) -> dict[str, str]:
    """Return the environment in which NCCL takes a process for one of the host `name`, which has the first device.

    NCCL refuses two ranks of one host on one device. As two hosts they talk over sockets. With `log` each process
    writes a file into this folder, see `ranks_of_nccl`.
    """
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{log}/nccl.{name}.%p"} if log else {}
    return debug | {
        "NCCL_HOSTID": f"unbroken-gpu-check-{name}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
    }


def ranks_of_nccl(log: Path, num_ranks: int) -> list[int]:
    """Return the ranks of all communicators of so many ranks that processes have made, in order."""
    text = "\n".join(file.read_text(errors="replace") for file in log.glob("nccl.*"))
    return sorted(int(rank) for rank in re.findall(rf"rank (\d+) nranks {num_ranks} .*Init COMPLETE", text))


def is_refusal(error: Exception) -> bool:
    """Return whether NCCL does not let two ranks use one device."""
    return any(words in str(error).lower() for words in REFUSALS)
