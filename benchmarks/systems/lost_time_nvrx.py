"""Workers of the reference's in-process restart for lost_time.py, forked once torch and it are imported.

A worker that is killed is replaced by one more that waits in reserve: the reference starts no new processes.
"""

import datetime
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from systems.lost_time_job import HARD_S, SOFT_S, WORLD_SIZE, Job, Mark, Trainer, write_mark
from systems.recovery_peers import LONG, free_ports, join, shut_gloo_sockets
from unbroken.inprocess.connections.reverse_lookups import stop_reverse_lookups


def work(job: Job, rank: int, num_workers: int, ports: tuple[int, int]) -> None:
    """Run one worker."""
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed

    class AbortGloo(Abort):  # type: ignore[misc] # the peer has no types
        def __call__(self, state: Any) -> Any:
            # Called as soon as this rank knows of a fault of any.
            write_mark(Path(job.folder), Mark("known", -1, -1, time.monotonic_ns()))
            shut_gloo_sockets()
            return state

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), LOCAL_RANK="0"
    )
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not export it by name
        "127.0.0.1", ports[1], None, is_master=rank == 0, wait_for_workers=False, timeout=LONG
    )
    tight = datetime.timedelta(milliseconds=10)
    names = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
    options: dict[str, Any] = {f"{name}_interval": tight for name in names}
    options |= {
        "abort": inprocess.Compose(AbortTorchDistributed(), AbortGloo()),
        "last_call_wait": datetime.timedelta(0),
    }
    if job.fault == "hang":
        options |= {
            "soft_timeout": datetime.timedelta(seconds=SOFT_S),
            "hard_timeout": datetime.timedelta(seconds=HARD_S),
        }
    if job.fault == "pod-lost":
        # The process that watches a worker is lost with it: only its missing heartbeats tell, after 30 s by default.
        options["heartbeat_timeout"] = datetime.timedelta(seconds=SOFT_S)
    if num_workers > WORLD_SIZE:
        layers = inprocess.rank_assignment
        options["rank_assignment"] = layers.Tree(
            [layers.Layer(min_ranks=WORLD_SIZE, max_ranks=WORLD_SIZE, flag=layers.LayerFlag.RESERVE)]
        )

    def train(call: inprocess.CallWrapper | None = None) -> None:
        if call is None:
            raise RuntimeError("want a CallWrapper from the peer")
        active = int(os.environ["RANK"])

        def find_others() -> list[int]:
            return [call.monitor_process.process_monitor_proc.pid]

        def join_group() -> None:
            join(store, call.iteration, active, WORLD_SIZE, LONG)

        Trainer(job, join_group, lambda step: call.ping(), find_others).train()

    train.__annotations__["call"] = inprocess.CallWrapper
    inprocess.Wrapper(**options)(train)()


def main() -> None:
    """Fork the workers and wait for them."""
    torch.set_num_threads(1)
    importlib.import_module("nvidia_resiliency_ext.inprocess")
    # For all alike: a lost DNS query of c10d's would add five seconds here and there.
    stop_reverse_lookups()
    job = Job.read()
    num_workers = WORLD_SIZE + (job.num_faults if job.fault in ("sigkill", "pod-lost") else 0)
    ports = free_ports()
    pids = []
    for rank in range(num_workers):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(job, rank, num_workers, ports)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
