"""The script of the process rung's benchmark: python process_rung_script.py KIND; see process_rung.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from reports.recovery_marks import SETTLE_S, Scenario, mark
from unbroken import inprocess


def join(attempt: int) -> None:
    """Make the group; under torchrun with a prefix for the attempt."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined] # torch does not export it by name
    prefixed = dist.PrefixStore(f"attempt{attempt}", store)  # type: ignore[attr-defined] # nor this
    dist.init_process_group(
        "gloo", store=prefixed, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


def train(scenario: Scenario, attempt: int) -> None:
    """Join, compute once, and have the fault of this attempt."""
    join(attempt)
    if scenario.kind == "training":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(1))
    mark(scenario, "done", attempt)
    dist.all_reduce(torch.ones(1))
    if attempt >= scenario.num_faults:
        return
    if dist.get_rank() == attempt % dist.get_world_size():
        time.sleep(SETTLE_S)
        mark(scenario, "fault", attempt)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def main() -> None:
    """Run the kind that the command names."""
    torch.set_num_threads(1)
    scenario = Scenario.read()
    if sys.argv[1] != "wrapped":
        train(scenario, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        return

    @inprocess.Wrapper()
    def wrapped(call: inprocess.CallWrapper) -> None:
        """Take the number of the attempt from the call."""
        train(scenario, call.iteration)

    wrapped()


if __name__ == "__main__":
    main()
