"""A training loop that `unbroken compare` breaks: right, or wrong in the way that its first argument names."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unbroken import inprocess, memory

NUM_STEPS = {"seldom": 48}


class Flaws:
    """What makes a loop other than it should be."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._own = folder / "own"
        self._num_seen = 0

    def begin(self, iteration: int) -> None:
        """Before anything is made."""
        if self.kind == "fails":
            sys.exit(3)
        if self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "fails later" and iteration:
            sys.exit(4)
        torch.manual_seed(int.from_bytes(os.urandom(4), "big") if self.kind == "random" else 0)

    def first_step(self, done: int | None) -> int:
        """Return where the loop begins."""
        if self.kind == "own file" and done is None and self._own.exists():
            return int(self._own.read_text()) + 1
        return 0 if done is None else done + 1

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step."""
        self._num_seen += 1
        if self.kind == "counter":
            optimizer.param_groups[0]["lr"] = 0.1 / self._num_seen

    def save(self, state: dict[str, Any], step: int) -> None:
        """Before a save."""
        if self.kind == "clock":
            state["saved at"] = time.time()  # No two runs have the same: that is what it is for.
            state["generator"] = torch.tensor(list(os.urandom(8)))  # as one that nobody has seeded
        if self.kind == "own file":
            self._own.write_text(str(step))

    def end(self) -> None:
        """After all."""
        if self.kind == "garbage" and (record := os.environ.get("UNBROKEN_RECORD")):
            Path(record, "mine.lines").write_bytes(b"garbage\n" + os.urandom(1 << 16))


@inprocess.Wrapper()
def train(kind: str, folder: Path, call: inprocess.CallWrapper) -> None:
    """Train, and save each step, or each fourth one."""
    flaws = Flaws(kind, folder)
    flaws.begin(call.iteration)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    model, dropout = nn.Linear(4, 4), nn.Dropout(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}
    checkpoints = memory.Checkpointer(every=4 if kind == "seldom" else 1)
    done = None if kind in ("no load", "nothing") else checkpoints.load(state)
    torch.set_rng_state(state["random"])
    for step in range(flaws.first_step(done), NUM_STEPS.get(kind, 12)):
        flaws.step(optimizer)
        optimizer.zero_grad()
        dropout(model(torch.ones(4))).square().sum().backward()
        for each in model.parameters() if world_size > 1 else ():
            dist.all_reduce(each.grad)
        optimizer.step()
        state["random"] = torch.get_rng_state()
        flaws.save(state, step)
        if kind != "nothing":
            with call.atomic():
                checkpoints.save(state, step)
        call.ping(step=step)
    flaws.end()


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "."))
