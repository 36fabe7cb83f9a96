"""Workers that stand still: in waits that an interruption ends, in hangs, in loops that swallow it."""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from unbroken import inprocess

from .script import HANG_S, is_first, my_rank, note, start, total, wait_for_file


def compute() -> None:
    """Never end, in Python."""
    while True:
        pass


BLOCKS: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "recv": lambda: dist.recv(torch.ones(1), src=1),
    "broadcast of objects": lambda: dist.broadcast_object_list([None], src=1),
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "wait of an async all_reduce": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "store": lambda: dist.distributed_c10d._get_default_store().get("a key that nobody sets"),
    "sleep": lambda: time.sleep(HANG_S),
    "queue": lambda: queue.Queue[int]().get(),
    "lock": lambda: threading.Event().wait(),
    "socket": lambda: socket.socketpair()[0].recv(1),
    "child process": lambda: subprocess.run(["sleep", "3600"], check=True),
    "C function that a signal ends": lambda: ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64)),
    "python": compute,
}


def blocked_in() -> None:
    """Rank 1 raises once the others say that they are about to block, each in the call that TEST_BLOCK names."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call):
            note("blocks")
            if my_rank() == 1:
                wait_for_file("TEST_GO")
                raise ValueError("injected")
            BLOCKS[os.environ["TEST_BLOCK"]]()
        return int(total())

    note("returned", value=train())


def hangs() -> None:
    """Rank 1 hangs in the first iteration as TEST_HANG says, the others in all_reduce."""
    how = os.environ["TEST_HANG"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call):
            if my_rank() == 1:
                note("hangs", pid=os.getpid())
                if how == "holding the GIL":
                    ctypes.PyDLL(None).sleep(3600)
                elif how == "in C":
                    mutex = ctypes.create_string_buffer(64)
                    for _ in range(2):
                        ctypes.CDLL(None).pthread_mutex_lock(mutex)
                elif how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif how == "in an atomic section":
                    with call.atomic():
                        time.sleep(HANG_S)
                elif how == "in finally":
                    try:
                        time.sleep(HANG_S)
                    finally:
                        time.sleep(HANG_S)
            total()
        return int(total())

    note("returned", value=train())


def stubborn() -> None:
    """Rank 0 swallows everything in a loop, as TEST_LOOP says."""
    how = os.environ["TEST_LOOP"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            raise ValueError("injected")
        while True:
            try:
                if how == "sleeps":
                    time.sleep(0.05)
                elif how == "collective":
                    total()
                else:
                    sum(range(100))
            except BaseException:
                pass

    note("returned", value=train())
