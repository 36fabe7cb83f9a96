"""Workers that are killed, and what they leave behind: a store, connections, children."""

import contextlib
import datetime
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from unbroken import inprocess
from unbroken.inprocess.connections import sockets

from .script import STEP_S, exists, is_first, my_rank, note, start, total, wait_for, wait_for_file


def steps() -> None:
    """Steps until the file TEST_DONE is there; every step is an all_reduce and a ping."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        world = int(start())
        note("started", iteration=call.iteration, world=world, restart=os.environ["TORCHELASTIC_RESTART_COUNT"])
        step = 0
        while total(float(exists("TEST_DONE"))) == 0:
            step += 1
            call.ping(step=step)
            time.sleep(STEP_S)
        return world

    note("returned", value=train())


def counted_groups() -> None:
    """Says which groups this process has made before it starts: how many members each was asked for."""
    made: list[int | None] = []
    real = dist.init_process_group

    def counted(*args: Any, **options: Any) -> None:
        made.append(options.get("world_size"))
        real(*args, **options)
        note("made", world_size=options.get("world_size"))

    dist.init_process_group = counted

    @inprocess.Wrapper()
    def train() -> None:
        is_clean = not dist.is_initialized()
        start()
        note("started", made=made, is_clean=is_clean)
        wait_for_file("TEST_DONE")

    train()


def lost_before_connecting() -> None:
    """In the second iteration TEST_VICTIM is killed before it connects, while the others connect to it."""
    victim = int(os.environ["TEST_VICTIM"])

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        if call.iteration == 1 and my_rank() == victim:
            note("victim")
            wait_for_file("TEST_GO")
            os.kill(os.getpid(), signal.SIGKILL)
        note("connects", iteration=call.iteration)
        start()
        if is_first(call) and my_rank() == 1:
            raise ValueError("injected")
        return int(total())

    note("returned", value=train())


def peer_that_is_lost_while_a_group_is_formed() -> None:
    """In the first iteration rank 1 has told gloo's address, and does no more.

    Of two addresses the higher one connects. TEST_WAITS_FOR says whether that is rank 1's, or rank 0's, which gets no
    answer.
    """
    own_address = {"connection": "127.0.0.1", "answer": "127.0.0.3"}[os.environ["TEST_WAITS_FOR"]]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        if is_first(call):
            with silent_port(_PEER) as port:
                address = own_address if my_rank() == 0 else _PEER
                groups: Any = dist.ProcessGroupGloo
                options = groups._Options()
                options._devices = [groups.create_device(hostname=address)]
                store = FileStore(str(Path(os.environ["TEST_FOLDER"]) / "addresses"), 2)
                silent = port if own_address > _PEER else None
                groups(AddressStore(store, silent), my_rank(), 2, options)
        elif my_rank() == 0:
            note("freed", has_looked_up_names="encodings.idna" in sys.modules)
        start()
        return int(total())

    note("returned", value=train())


_PEER = "127.0.0.2"


class AddressStore(Store):
    """The store of two ranks. Rank 1 stops once it has told its address; rank 0 may be told another port of it."""

    def __init__(self, store: Store, port: int | None) -> None:
        super().__init__()
        self._store = store
        self._port = port

    def set(self, key: str, value: str) -> None:
        """Say where this rank is."""
        self._store.set(key, value)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        """Wait for what other ranks say."""
        if my_rank() == 1:
            wait_for_file("TEST_DONE")
        self._store.wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        """Return where a rank is: somewhere in it the port and the address, as in a sockaddr_in."""
        value: bytes = self._store.get(key)
        at = value.find(socket.inet_aton(_PEER))
        if at > 0:
            note("connects")
            if self._port is not None:
                value = value[: at - 2] + struct.pack("!H", self._port) + value[at:]
        return value


@contextmanager
def silent_port(host: str) -> Iterator[int]:
    """Listen where nobody who connects gets an answer, as on a host that is gone: the queue is full."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((host, 0))
        listener.listen(0)
        for _ in range(4):
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])


def write_that_fails() -> None:
    """In the first iteration rank 1 is stopped, and what rank 0 writes to it fails: gloo tries it again for ever."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call):
            # A sum of floats of 32 bits: exact for the largest pid there can be.
            peer = int(total(float(os.getpid()) if my_rank() == 1 else 0.0))
            if my_rank() == 1:
                os.kill(peer, signal.SIGSTOP)
            else:
                wait_for(lambda: psutil.Process(peer).status() == psutil.STATUS_STOPPED, "a stopped peer")
                stop_writing()
                note("writes")
            dist.barrier()
        return int(total())

    note("returned", value=train())


def stop_writing() -> None:
    """Let every later write of gloo fail."""
    for descriptor in sockets._gloo_descriptors():
        if sockets._peer(descriptor) is not None:
            connection = socket.socket(fileno=os.dup(descriptor))
            connection.shutdown(socket.SHUT_WR)
            connection.close()


def store_is_gone() -> None:
    """In the first iteration all but rank 0 connect once the file TEST_GO is there: to a store whose server is dead."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        note("waits")
        if is_first(call):
            wait_for_file("TEST_GO")
        note("connects")
        return int(start())

    note("returned", value=train())


def forks() -> None:
    """Rank 0 forks a child in the function, as a data loader does, and is then lost; the child lives on."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call) and my_rank() == 0:
            child = os.fork()
            if child == 0:
                with call.atomic():
                    call.ping(step=99)
                note("child", threads=threading.active_count(), sockets=agent_sockets())
                wait_for_file("TEST_DONE")
                os._exit(0)
            note("forked", child=child, sockets=agent_sockets())
        while total(float(exists("TEST_GO"))) == 0:
            time.sleep(STEP_S)
        if is_first(call):
            if my_rank() == 0:
                raise ValueError("injected")
            total()
        return int(total())

    note("returned", value=train())


def agent_sockets() -> int:
    """Return how many Unix sockets this process has open."""
    return len(psutil.Process().net_connections("unix"))
