"""A loop of DDP or FSDP2 with drawn options: trained calmly first, then with checkpoints in memory and drawn faults.

Each rank writes down what each step was made of and has made of the state.
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unbroken import inprocess, memory
from unbroken.integrations import random_numbers
from unbroken.integrations.samples import GlobalBatches

OUT = Path(os.environ["TEST_OUT"])
CHOSEN: dict[str, Any] = json.loads(os.environ["TEST_CHOSEN"])
FAULTS: list[list[dict[str, Any]]] = json.loads(os.environ["TEST_FAULTS"])
"""By iteration, faults of which the first that comes ends it: the kind, the ranks, and the n-th time at a place."""
SAMPLES = 61


class Loop:
    """One training of one rank."""

    def __init__(self, call: inprocess.CallWrapper, *, is_calm: bool) -> None:
        self.call = call
        self.is_calm = is_calm
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.times: dict[str, int] = {}
        torch.manual_seed(0)
        random.seed(0)
        self.data = TensorDataset(torch.randn(SAMPLES, 16), torch.arange(SAMPLES) % 4, torch.arange(SAMPLES))
        self.bare = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.model: nn.Module = self.bare
        if CHOSEN["is_sharded"]:
            fully_shard(self.bare, mesh=init_device_mesh("cpu", (self.world_size,)))
        else:
            # The same sums in the first step after a restart.
            self.model = nn.parallel.DistributedDataParallel(self.bare, find_unused_parameters=True)
        kind = getattr(torch.optim, CHOSEN["optimizer"])
        self.optimizer: torch.optim.Optimizer = kind(self.bare.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 7)
        self.losses: dict[str, float] = {}

    def at(self, place: str) -> None:
        """Have the fault that was drawn for this place, if this is the time."""
        self.times[place] = self.times.get(place, 0) + 1
        drawn = [] if self.is_calm else [*FAULTS, *[[]] * (self.call.iteration + 1)][self.call.iteration]
        for fault in drawn:
            if [fault["place"], fault["time"]] == [place, self.times[place]] and self.rank in fault["ranks"]:
                self.note("fault", place, fault["kind"])
                if fault["kind"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault["kind"] == "exit":
                    sys.exit(10 + self.call.iteration)  # the same code from each rank would end the job
                raise RuntimeError(f"in {place} of iteration {self.call.iteration}")

    def note(self, kind: str, *values: Any) -> None:
        """Write down a line."""
        row = [kind, "calm" if self.is_calm else self.call.iteration, self.rank, *values]
        with (OUT / f"notes-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return what the loop itself keeps."""
        self.at("save")
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it again."""
        self.at("load")
        self.losses = dict(state["losses"])

    def state(self) -> dict[str, Any]:
        """Return all that goes on."""
        numbers = random_numbers.capture(self.rank, self.world_size)
        return {
            **{"model": self.bare, "optimizer": self.optimizer, "schedule": self.schedule},
            **{"loop": self, "random": numbers},
        }

    def train(self) -> None:
        """Train to the end."""
        steps, parts = CHOSEN["steps"], CHOSEN["parts"]
        batches = GlobalBatches(SAMPLES, CHOSEN["share"] * self.world_size, steps=steps * parts, seed=1)
        checkpoints = memory.Checkpointer(every=CHOSEN["every"])
        self.at("begin")
        restored = self.state()
        done = 0 if self.is_calm else checkpoints.load(restored) or 0
        batches.start_at(done * parts)
        rows = iter(DataLoader(self.data, batch_sampler=batches))
        if done:
            random_numbers.restore(restored["random"], self.rank, self.world_size, seed=done)
        for step in range(done + 1, steps + 1):
            self.at("step")
            samples = [sample for _ in range(parts) for sample in self.add_gradients(next(rows))]
            self.optimizer.step()
            self.schedule.step()
            self.at("stepped")
            with self.call.atomic():
                self.note("step", step, samples, self.digest())
                if not self.is_calm:
                    checkpoints.save(self.state(), step)
            if not self.is_calm:
                self.call.ping(step=step)
            self.optimizer.zero_grad()
        self.at("end")

    def add_gradients(self, row: list[torch.Tensor]) -> list[int]:
        """Return the samples."""
        x, labels, samples = row
        loss = nn.functional.cross_entropy(self.model(x), labels)
        self.at("forward")
        loss.backward()
        self.losses[f"{len(self.losses) % 5}"] = loss.item() + random.random()
        found: list[int] = samples.tolist()
        return found

    def digest(self) -> str:
        """Return one of all that goes on."""
        told = hashlib.sha256(repr([self.losses, self.schedule.state_dict(), random.getstate()]).encode())
        kept: dict[Any, Any] = self.optimizer.state_dict()["state"]
        tensors = [*self.bare.state_dict().values(), *(one for row in kept.values() for one in row.values())]
        for one in [*tensors, torch.get_rng_state()]:
            local = one.to_local() if hasattr(one, "to_local") else torch.as_tensor(one)
            told.update(local.detach().contiguous().numpy().tobytes())
        return told.hexdigest()


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train."""
    dist.init_process_group("gloo")
    if call.iteration == 0:
        Loop(call, is_calm=True).train()
        dist.barrier()
    Loop(call, is_calm=False).train()


if __name__ == "__main__":
    train()
