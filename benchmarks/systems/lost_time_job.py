"""What all systems of lost_time.py train: a transformer under FSDP2, which breaks where it is told to.

python lost_time_job.py        Its settings are the variable BENCH_LOST_TIME; see Job.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_LOST_TIME"
WORLD_SIZE = 2
SOFT_S, HARD_S = 5.0, 10.0
"""How long a hang lasts until it is one."""
_VOCABULARY = 8192


@dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    fault: str
    """exception, sigkill, pod-lost (the worker and all that manages it), or hang (a loop that makes no step)."""
    num_faults: int
    width: int
    layers: int
    every: int
    after: int
    """Steps from a checkpoint to a fault."""
    folder: str
    memory_every: int = 1
    """The same of checkpoints in memory."""

    @classmethod
    def read(cls) -> "Job":
        """Read what the benchmark has set."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """Return what `read` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def fault_steps(self) -> list[int]:
        """The steps that faults keep from being made, when they are made first."""
        return [self.every * number + self.after + 1 for number in range(self.num_faults)]


@dataclass(frozen=True)
class Mark:
    """One stamp, of CLOCK_MONOTONIC: one clock for all processes of a machine."""

    name: str
    """entered, joined, built, restored (of `step`, -1 for none), step (it is made), saved (its checkpoint is over),
    fault (before this step); started (a process), known (the system knows of a fault), created (all pods, anew)."""
    step: int
    rank: int
    at_ns: int


def write_mark(folder: Path, mark: Mark) -> None:
    """Add a stamp; any number of processes may at once."""
    descriptor = os.open(folder / "marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps(asdict(mark)) + "\n").encode())
    os.close(descriptor)


def read_marks(folder: Path) -> list[Mark]:
    """Return all stamps."""
    path = folder / "marks"
    return [Mark(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


class Trainer:
    """One iteration, or attempt, in one process."""

    def __init__(
        self,
        job: Job,
        join: Callable[[], None],
        ping: Callable[[int], None],
        find_others: Callable[[], list[int]] | None = None,
    ) -> None:
        """Take how to join and ping; `find_others` finds the processes that are lost with this worker's pod."""
        self._job, self._join, self._ping = job, join, ping
        self._find_others = find_others or (lambda: lost_processes(job.system))
        self._folder = Path(job.folder)
        self._rank = int(os.environ["RANK"])

    def train(self) -> None:
        """Join, make the model, restore it, and train until a fault or the end."""
        import torch

        self._mark("entered")
        self._join()
        self._mark("joined")
        state = self._make()
        self._mark("built")
        done = self._load(state)
        self._mark("restored", done)
        model, optimizer = state["model"], state["optimizer"]
        for step in range(done + 1, self._job.fault_steps[-1] + 3):
            self._break_if_due(step)
            tokens = torch.randint(_VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            self._mark("step", step)
            if self._save(state, step):
                self._mark("saved", step)
            self._ping(step)

    def _make(self) -> dict[str, Any]:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        width = self._job.width
        blocks = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(self._job.layers)
        ]
        model = nn.Sequential(nn.Embedding(_VOCABULARY, width), *blocks, nn.Linear(width, 64))
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    def _load(self, state: dict[str, Any]) -> int:
        """Return the step that the state is of, -1 without one."""
        if self._job.system == "unbroken-memory":
            from unbroken import memory

            self._checkpoints = memory.Checkpointer(every=self._job.memory_every)
            done = self._checkpoints.load(state)
            return -1 if done is None else done
        from torch.distributed.checkpoint.state_dict_loader import load

        whole = [int(path.parent.name.removeprefix("step-")) for path in self._folder.glob("step-*/.metadata")]
        newest = max(whole, default=-1)
        if newest >= 0:
            load(self._stateful(state), checkpoint_id=self._folder / f"step-{newest}")
        return newest

    def _save(self, state: dict[str, Any], step: int) -> bool:
        """Return whether training stood still for a checkpoint."""
        if self._job.system == "unbroken-memory":
            self._checkpoints.save(state, step)
            return step % self._job.memory_every == 0
        if step % self._job.every:
            return False
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._stateful(state), checkpoint_id=self._folder / f"step-{step}")
        if self._rank == 0:
            shutil.rmtree(self._folder / f"step-{step - 2 * self._job.every}", ignore_errors=True)
        return True

    def _stateful(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what torch's own checkpoints need: it makes the optimizer's state before it is read."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = state["model"], state["optimizer"]

        class Whole:
            def state_dict(self) -> dict[str, Any]:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                return {"model": of_model, "optimizer": of_optimizer}

            def load_state_dict(self, found: dict[str, Any]) -> None:
                set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

        return {"all": Whole()}

    def _break_if_due(self, step: int) -> None:
        if step not in self._job.fault_steps or self._rank != WORLD_SIZE - 1:
            return
        try:
            # Once in all: the step is made again.
            os.close(os.open(self._folder / f"fault-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        has_more = self._job.fault == "pod-lost" and self._job.system != "recreate"
        victims = self._find_others() if has_more else []
        self._mark("fault", step)
        if self._job.fault == "exception":
            raise RuntimeError("injected by the benchmark")
        if self._job.fault == "hang" or (self._job.system, self._job.fault) == ("recreate", "pod-lost"):
            # A pod of a cluster is lost when it is deleted: the benchmark does that once it sees the mark.
            while True:
                # Not a busy loop: it would take a processor from those who recover.
                time.sleep(0.001)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _mark(self, name: str, step: int = -1) -> None:
        write_mark(self._folder, Mark(name, step, self._rank, time.monotonic_ns()))


def lost_processes(system: str) -> list[int]:
    """Return the processes that are lost with this worker's pod, but for itself."""
    import psutil

    if not system.startswith("unbroken"):
        # Its launcher, which is all that there is on this "node".
        return [os.getppid()]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("UNBROKEN_DIR") == os.environ["UNBROKEN_DIR"] and process.pid != os.getpid():
                found.append(process)
    # Whoever would start another one goes first.
    return [process.pid for process in sorted(found, key=lambda one: len(one.parents()))]


def run_wrapped(job: Job) -> None:
    """Train under our wrapper."""
    import torch.distributed as dist

    from unbroken import inprocess

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        Trainer(job, lambda: dist.init_process_group("gloo"), lambda step: call.ping(step=step)).train()

    train()


def run_plain(job: Job) -> None:
    """Train as under torchrun."""
    import torch.distributed as dist

    ping = _no_ping
    if job.system == "ft_launcher":
        from nvidia_resiliency_ext import fault_tolerance

        client = fault_tolerance.RankMonitorClient()
        client.init_workload_monitoring()

        def ping(step: int) -> None:
            client.send_heartbeat()

    Trainer(job, lambda: dist.init_process_group("gloo"), ping).train()


def _no_ping(step: int) -> None:
    """Nobody asks."""


def main() -> None:
    """Train as the system wants it."""
    job = Job.read()
    if job.system == "recreate":
        write_mark(Path(job.folder), Mark("started", -1, int(os.environ["RANK"]), time.monotonic_ns()))
    import torch

    torch.set_num_threads(1)
    if job.system in ("unbroken-memory", "unbroken-disk"):
        run_wrapped(job)
    else:
        run_plain(job)


if __name__ == "__main__":
    main()
