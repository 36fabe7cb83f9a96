"""A training script for tests: `plain` as written for torchrun, `wrapped` with the in-process wrapper.

`bare` is as `plain`, but with a collective of its own: torch takes two seconds of a processor to import, which most
tests have no use for. Appends "name rank iteration pid" to TEST_EVENTS; trains until rank 0 sees the file TEST_DONE.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unbroken import inprocess

_CONNECT_LIMIT_S = 60.0
STEP_S = 0.01
"""The pace of steps, and of tries to connect; no test waits for it."""


def note(name: str, rank: int) -> None:
    """Append one event; a write of one line is atomic."""
    iteration = os.environ.get("TORCHELASTIC_RESTART_COUNT", "?")
    with Path(os.environ["TEST_EVENTS"]).open("a") as file:
        file.write(f"{name} {rank} {iteration} {os.getpid()}\n")


def is_done() -> bool:
    """Return whether the test wants an end."""
    return Path(os.environ["TEST_DONE"]).exists()


def meet(rank: int, size: int) -> list[socket.socket]:
    """Return the connections to all other ranks on rank 0, to rank 0 on the others."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            return [server.accept()[0] for _ in range(size - 1)]
    until_s = time.monotonic() + _CONNECT_LIMIT_S
    while True:
        try:
            return [socket.create_connection(address)]
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(STEP_S)


def hear(peer: socket.socket) -> bytes:
    """Return the byte that the other side sends. Raises ConnectionError when it has gone."""
    byte = peer.recv(1)
    if not byte:
        raise ConnectionError("a peer has gone")
    return byte


def train_without_torch() -> None:
    """Step until told to stop, as `train` does: nobody goes on without all others."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers = meet(rank, size)
    is_noted, word = False, b""
    while word != b"1":
        if rank:
            peers[0].sendall(b".")
            word = hear(peers[0])
        else:
            for peer in peers:
                hear(peer)
            word = b"1" if is_done() else b"0"
            for peer in peers:
                peer.sendall(word)
        if not is_noted:
            note("started", rank)
            is_noted = True
        time.sleep(STEP_S)
    note("finished", rank)


def train(call: "inprocess.CallWrapper | None" = None) -> int:
    """Reduce until told to stop; the world must agree in every step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    is_noted = False
    while True:
        total = torch.ones(2)
        total[1] = float(rank == 0 and is_done())
        dist.all_reduce(total)
        assert total[0].item() == size
        if call is not None:
            call.ping()
        if not is_noted:
            note("started", rank)
            is_noted = True
        if total[1].item() > 0:
            break
        time.sleep(STEP_S)
    dist.destroy_process_group()
    note("finished", rank)
    return rank


if __name__ == "__main__":
    if "--grandchild" in sys.argv:
        child = subprocess.Popen(["sleep", "1000"])
        note(f"grandchild-{child.pid}", 0)
    if sys.argv[1] == "bare":
        train_without_torch()
    elif sys.argv[1] == "plain":
        train()
    else:
        from unbroken import inprocess

        @inprocess.Wrapper()
        def wrapped(call: inprocess.CallWrapper) -> int:
            """Get the call by annotation."""
            return train(call)

        wrapped()
