"""What the workers of the tests run; each function is one workload, chosen by its name."""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from unbroken import inprocess

LOCAL_RANK = int(os.environ.get("UNBROKEN_LOCAL_RANK", "-1"))


def note(name: str, **values: Any) -> None:
    """Write one event for the test."""
    rank = int(os.environ.get("RANK", "-1"))
    line = json.dumps({"name": name, "rank": rank, "local": os.environ.get("UNBROKEN_LOCAL_RANK"), **values}) + "\n"
    descriptor = os.open(os.environ["TEST_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def total(value: float = 1.0) -> float:
    """All-reduce a number."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return float(tensor.item())


def my_rank() -> int:
    """Return the active rank."""
    return int(os.environ["RANK"])


def start() -> float:
    """Join the group as any script does; return the sum of ones."""
    dist.init_process_group("gloo")
    return total()


def exception_once() -> None:
    """Rank 1 raises while the others are inside all_reduce."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper, extra: int) -> str:
        world = start()
        note("started", iteration=call.iteration, world=world, extra=extra)
        if call.iteration == 0:
            if my_rank() == 1:
                raise ValueError("injected")
            total()
        return f"value of {my_rank()} in {call.iteration}"

    note("returned", value=train(extra=7))
