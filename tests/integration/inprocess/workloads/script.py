"""What the scripts of all workloads do."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from unbroken import inprocess
from unbroken.inprocess.connections.endpoint import Endpoint
from unbroken.inprocess.pod import link
from unbroken.inprocess.torch_state import leftovers

HANG_S = 3600.0
"""A hang that only an interruption ends; no test waits so long."""
LIMIT_S = 120.0
"""A test that does not come to write its file by then has failed."""
STEP_S = 0.01
"""What a step of training would take, so that a loop of them leaves others the processor; nobody waits for it."""


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


def exists(variable: str) -> bool:
    """Return whether the file that the variable names is there."""
    return Path(os.environ[variable]).exists()


def wait_for_file(variable: str) -> None:
    """Wait in Python code, which an interruption can leave, until the test has written the file."""
    wait_for(lambda: exists(variable), f"the file {os.environ[variable]}")


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    """Wait in Python code for a condition. Raises TimeoutError."""
    # tests/waiting.py belongs to pytest, which is not to be in a worker.
    until_s = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > until_s:
            raise TimeoutError(f"want {what} within {LIMIT_S:g} s, got none")
        time.sleep(STEP_S)


def settle() -> None:
    """Wait until the groups and stores of former iterations are destroyed, which happens in the background."""
    wait_for(
        lambda: not any(thread.name == "unbroken-destroy" for thread in threading.enumerate()), "old groups destroyed"
    )


def bind_no_port_twice() -> None:
    """Let no two endpoints of this process have the same port: the system gives one out again now and then."""
    used: set[int] = set()
    bind = Endpoint.__init__

    def bind_another(endpoint: Endpoint, host: str) -> None:
        bind(endpoint, host)
        taken = []
        while endpoint.port in used:
            taken.append(endpoint._socket)
            bind(endpoint, host)
        for listener in taken:
            listener.close()
        used.add(endpoint.port)

    # The product may use a port again; the tests that call this tell former endpoints from new ones by it.
    mock.patch.object(Endpoint, "__init__", bind_another).start()


def end_without_haste() -> None:
    """Let the end of a call wait for its threads for as long as a busy machine takes; the test asks for all of them."""
    leftovers.CLOSE_TIMEOUT_S = link.SEND_TIMEOUT_S = LIMIT_S


def is_first(call: inprocess.CallWrapper) -> bool:
    """Return whether this is the first iteration of the job (a process that was started later never sees it)."""
    return call.iteration == 0


def one_fault(call: inprocess.CallWrapper) -> int:
    """Rank 1 raises in the first iteration; return the size of the world."""
    start()
    if is_first(call):
        if my_rank() == 1:
            raise ValueError("injected")
        total()
    return int(total())


def tell_outcome(train: Callable[[], object]) -> None:
    """Call it, and write what it returns or raises."""
    try:
        note("returned", value=train())
    except BaseException as error:
        note("raised", error=type(error).__name__, text=str(error), cause=type(error.__cause__).__name__)
        raise
