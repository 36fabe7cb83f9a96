"""N members of torch's dynamic rendezvous, each in a process of its own, forked from one that has imported torch.

Prints the seconds until the last member has its rank, in the first round and in the next: the store is TCPStore, the
backend c10d, as under `torchrun --rdzv-backend=c10d`. c10d's reverse DNS lookups, which can stall it for five seconds
each, are switched off.
"""

import json
import os
import sys
import time
import traceback
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from unbroken.inprocess.connections.reverse_lookups import stop_reverse_lookups

_ROUNDS = 2


def member(number: int, size: int, port: int, start: list[int], answer: int) -> None:
    """Take part in each round once it is announced; write when the rank is known."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    backend = C10dRendezvousBackend(store, "bench")
    handler = DynamicRendezvousHandler.from_backend("bench", store, backend, size, size, local_addr="127.0.0.1")
    os.write(answer, b"0\n")
    for turn in range(_ROUNDS):
        os.read(start[turn], 1)
        info = handler.next_rendezvous()
        if not isinstance(info.bootstrap_store_info, RendezvousStoreInfo) or info.world_size != size:
            raise RuntimeError(f"member {number}: want a world of {size}, got {info}")
        os.write(answer, f"{time.monotonic()!r}\n".encode())
    time.sleep(3600)  # Whoever leaves closes the rendezvous for the others.


def main() -> None:
    """Fork the members, start each round, print the seconds of both."""
    size = int(sys.argv[1])
    stop_reverse_lookups()
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts = [os.pipe() for _ in range(_ROUNDS)]
    answer_out, answer_in = os.pipe()
    children = []
    for number in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                member(number, size, master.port, [pipe[0] for pipe in starts], answer_in)
            except BaseException:
                traceback.print_exc()
                os.write(answer_in, b"failed\n")
                os._exit(1)
        children.append(pid)
    try:
        with os.fdopen(answer_out) as answers:
            for _ in range(size):
                answers.readline()
            seconds = []
            for pipe in starts:
                since_s = time.monotonic()
                os.write(pipe[1], b"." * size)
                seconds.append(max(float(answers.readline()) for _ in range(size)) - since_s)
        print(json.dumps(seconds))
    finally:
        for pid in children:
            os.kill(pid, 9)
        for pid in children:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
