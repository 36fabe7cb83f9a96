"""Workers of the peer and of the floor, forked from this process once it has imported torch.

python recovery_peers.py SYSTEM WORLD_SIZE        SYSTEM: nvrx-documented, nvrx-default, nvrx-tight or floor
"""

import datetime
import importlib
import os
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from reports.recovery_marks import HANGS, HARD_S, SETTLE_S, SOFT_S, Scenario, after_first_collective, mark
from unbroken.inprocess.connections.reverse_lookups import stop_reverse_lookups

DOCUMENTED_GLOO_TIMEOUT = datetime.timedelta(seconds=10)
LONG = datetime.timedelta(minutes=5)


def shut_gloo_sockets() -> None:
    """Free whoever is blocked in gloo: the peer itself has nothing for it."""
    from unbroken.inprocess.connections import sockets

    sockets.release_connections()
    sockets.shut_gloo_connections()


def join(store: Any, iteration: int, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Make the group of an iteration on a store that all iterations share, and do its first collective."""
    prefixed = dist.PrefixStore(f"iteration{iteration}", store)  # type: ignore[attr-defined] # torch does not export it by name
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    dist.all_reduce(torch.ones(1))


def nvrx(system: str, scenario: Scenario, store: Any) -> None:
    """Run one worker of the peer."""
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed

    class AbortGloo(Abort):  # type: ignore[misc] # the peer has no types
        def __call__(self, state: Any) -> Any:
            shut_gloo_sockets()
            return state

    abort = AbortTorchDistributed()
    options: dict[str, Any] = {"abort": abort}
    timeout = DOCUMENTED_GLOO_TIMEOUT
    if system != "nvrx-documented":
        options["abort"] = inprocess.Compose(abort, AbortGloo())
        timeout = LONG
    if system == "nvrx-tight":
        tight = datetime.timedelta(milliseconds=10)
        names = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
        options |= {f"{name}_interval": tight for name in names}
        options["last_call_wait"] = datetime.timedelta(0)
    if scenario.kind in HANGS:
        options |= {
            "soft_timeout": datetime.timedelta(seconds=SOFT_S),
            "hard_timeout": datetime.timedelta(seconds=HARD_S),
        }

    def train(call: inprocess.CallWrapper | None = None) -> None:
        if call is None:
            raise RuntimeError("want a CallWrapper from the peer")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        join(store, call.iteration, rank, world_size, timeout)
        after_first_collective(scenario, call.iteration, rank, world_size, call.ping)

    train.__annotations__["call"] = inprocess.CallWrapper
    inprocess.Wrapper(**options)(train)()


def floor(scenario: Scenario, store: Any, rank: int, world_size: int) -> None:
    """Recover without any coordination: all ranks know the instant of the fault beforehand."""
    join(store, 0, rank, world_size, LONG)
    for iteration in range(scenario.num_faults):
        instant_s = _agree_on_instant(store, iteration, rank)
        blocked = threading.Thread(target=_block, daemon=True)
        if rank != 0:
            # Rank 0 is the one that fails; the others wait for it.
            blocked.start()
        time.sleep(max(instant_s - time.monotonic(), 0.0))
        if rank == 0:
            mark(scenario, "fault", iteration)
        shut_gloo_sockets()
        if rank != 0:
            blocked.join()
        groups = list(dist.distributed_c10d._world.pg_names)
        dist.destroy_process_group()
        threading.Thread(target=groups.clear, daemon=True).start()
        join(store, iteration + 1, rank, world_size, LONG)
        mark(scenario, "done", iteration + 1)
        dist.all_reduce(torch.ones(1))


def _block() -> None:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        pass


def _agree_on_instant(store: Any, iteration: int, rank: int) -> float:
    key = f"instant{iteration}"
    if rank == 0:
        store.set(key, repr(time.monotonic() + SETTLE_S + 0.1))
    return float(store.get(key))


def work(system: str, rank: int, world_size: int, ports: tuple[int, int]) -> None:
    """Run one worker."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), LOCAL_RANK="0"
    )
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not export it by name
        "127.0.0.1", ports[1], None, is_master=rank == 0, wait_for_workers=False, timeout=LONG
    )
    scenario = Scenario.read()
    if system == "floor":
        floor(scenario, store, rank, world_size)
    else:
        nvrx(system, scenario, store)


def main() -> None:
    """Fork the workers and wait for them."""
    system, world_size = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if system != "floor":
        importlib.import_module("nvidia_resiliency_ext.inprocess")
    # For all alike: a lost DNS query of c10d's would add five seconds here and there.
    stop_reverse_lookups()
    ports = free_ports()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(system, rank, world_size, ports)
                code = 0
            finally:
                # Without the finalisers of threads and groups that the fork did not make.
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def free_ports() -> tuple[int, int]:
    """Return two ports that are free now."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


if __name__ == "__main__":
    main()
