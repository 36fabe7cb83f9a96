"""Several ranks on one device, as far as NCCL lets them."""

import os

import torch

REFUSALS = ("duplicate gpu", "invalid usage")
"""What NCCL says of two ranks on one device."""


def first_device() -> torch.device:
    """Return the first device, prepared for all ranks of a job; without a GPU the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # NCCL refuses two ranks of one host on one device. As two hosts they talk over sockets.
    os.environ["NCCL_HOSTID"] = f"unbroken-gpu-check-{os.getpid()}"
    os.environ.update({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def is_refusal(error: Exception) -> bool:
    """Return whether NCCL does not let two ranks use one device."""
    return any(words in str(error).lower() for words in REFUSALS)
