"""Train a small network on handwritten digits under DistributedDataParallel, and continue through any fault.

    unbroken run --pods 4 --spares 1 --ranks-per-pod 2 --memory 64Mi examples/digits.py     on this machine
    kubectl apply -f examples/digits.yaml                                                   on a cluster

It also runs in a job without memory for checkpoints, and under plain torchrun: it then loses the steps since the last
checkpoint on the disk.

Six things make a training script unbreakable; look for their numbers below:
  (1) Wrap the training function. After a fault it is called again, in the same process wherever possible.
  (2) On entry take all state from the newest checkpoint, none from globals: what ran before may have ended anywhere.
  (3) Save after each step, in memory; `atomic()` keeps a restart from cutting in between a step and its checkpoint.
  (4) Report each step with `ping`, so that a hang is noticed and progress is measured.
  (5) Do slow first-time work before the wrapped function is called, so that a spare has already done it.
  (6) Write to the disk before a planned move (a pod is deleted, a node drained), so that no step is made twice.
"""

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_on_disk
from torch.nn.parallel import DistributedDataParallel

from unbroken import inprocess, memory

NUM_TEST = 360
KEPT_CHECKPOINTS = 3


class Progress:
    """What has been trained: goes into each checkpoint, so that nothing is applied twice and nothing is left out."""

    def __init__(self) -> None:
        self.step = 0
        """The last step that was applied; the first one is 1."""
        self.digest = ""
        """Hash chain over the samples of all applied steps, in the order in which they were applied."""

    def apply(self, step: int, samples: Tensor) -> None:
        """Record that the model has learned from these samples."""
        self.step = step
        self.digest = hashlib.sha256(f"{self.digest} {step} {samples.tolist()}".encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint."""
        self.step, self.digest = state["step"], state["digest"]


def samples_of(step: int, num_samples: int, batch_size: int) -> Tensor:
    """Return the sample numbers of a global step: the same on all ranks, in every replay and at any world size."""
    epoch, position = divmod(step, num_samples // batch_size)
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
    return order[position * batch_size : (position + 1) * batch_size]


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, then for the test; images are (n, 64) in 0..1."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    return images[NUM_TEST:], labels[NUM_TEST:], images[:NUM_TEST], labels[:NUM_TEST]


class Checkpoints:
    """Each step in memory and each n-th on the disk, in the background; in a job without memory on the disk alone."""

    def __init__(self, options: argparse.Namespace, state: dict[str, Any], device: torch.device) -> None:
        """`state` is what is saved and loaded: objects with state_dict and load_state_dict. All ranks together."""
        self._folder, self._every, self._state = options.checkpoints, options.save_every, state
        # As rank 0 sees it: what follows takes all ranks, or none.
        has_memory = torch.tensor(int(memory.is_available()), device=device)
        dist.broadcast(has_memory, src=0)
        self._has_memory = bool(has_memory.item())
        self._memory = memory.Checkpointer(
            every=1, disk=self._folder, disk_every=self._every if self._has_memory else None
        )
        self._written: int | None = None
        """The last step that is known to be on the disk."""

    def load(self) -> None:
        """Go back to the newest checkpoint that all ranks can read; the state stays as it is where there is none."""
        self._written = self._memory.load(self._state)

    def save(self, step: int) -> None:
        """Save the state after a step in memory. Waits for nobody, and may be skipped."""
        if self._has_memory:
            self._memory.save(self._state, step)

    def write_if_due(self, step: int) -> None:
        """Write to the disk where nobody does so in the background."""
        if not self._has_memory and step % self._every == 0:
            self.write(step)

    def write(self, step: int) -> None:
        """Write the state after this step to the disk, and wait until it is there. All ranks, for the same step."""
        if self._has_memory:
            self._memory.flush(self._state, step)
        elif step != self._written:
            # torch writes `.metadata` last, and a folder without it is no checkpoint.
            save_on_disk(self._state, checkpoint_id=self._folder / f"step-{step}")
            self._written = step
            if dist.get_rank() == 0:
                self._remove_old()

    def _remove_old(self) -> None:
        whole = sorted(self._folder.glob("step-*/.metadata"), key=lambda path: int(path.parent.name[len("step-") :]))
        for metadata in whole[:-KEPT_CHECKPOINTS]:
            metadata.unlink(missing_ok=True)
            shutil.rmtree(metadata.parent, ignore_errors=True)


def connect() -> torch.device:
    """Join the process group of this iteration; rank, world size and address are in the environment."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def make_model(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fresh model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.002)


def warm_up() -> None:
    """Train a step of nothing: the first optimizer of a process imports half of torch, which takes a second."""
    model, optimizer = make_model(torch.device("cpu"))
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()


@inprocess.Wrapper()  # (1)
def train(
    options: argparse.Namespace, data: tuple[Tensor, Tensor, Tensor, Tensor], call: inprocess.CallWrapper
) -> None:
    """Train from the newest checkpoint to the last step. Runs once an iteration on each active rank."""
    device = connect()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = (item.to(device) for item in data)
    model, optimizer = make_model(device)
    progress = Progress()
    checkpoints = Checkpoints(options, {"model": model, "optimizer": optimizer, "progress": progress}, device)
    checkpoints.load()  # (2)
    if rank == 0:
        print(f"digits: iteration={call.iteration} world={world_size} after step={progress.step}", flush=True)
    replicas = DistributedDataParallel(model)

    def write(step: int) -> None:
        with call.disable_hang_protection():  # the disk may take its time
            checkpoints.write(step)

    call.on_move(write)  # (6)
    for step in range(progress.step + 1, options.steps + 1):
        do_fault(options.control, rank)
        time.sleep(step_seconds(options.control, options.step_seconds))
        samples = samples_of(step, len(images), options.batch)
        mine = samples[rank::world_size].to(device)
        optimizer.zero_grad()
        # DDP divides by the world size; the sum over the whole batch then is the same at any world size.
        loss = (
            nn.functional.cross_entropy(replicas(images[mine]), labels[mine], reduction="sum")
            * world_size
            / options.batch
        )
        loss.backward()
        with call.atomic():  # (3)
            optimizer.step()
            progress.apply(step, samples)
            checkpoints.save(step)
        call.ping(step=step)  # (4)
        if rank == 0 and step % 100 == 0:
            print(f"digits: step={step} of {options.steps} loss={loss.item():.4f}", flush=True)
        checkpoints.write_if_due(step)

    write(progress.step)
    if rank == 0:
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=1) == test_labels).double().mean().item()
        report(options, progress, accuracy, len(images), call.iteration)
    # Leave together: a rank that left early would look like a fault to the others. The wrapper ends the process group.
    dist.barrier()


def report(
    options: argparse.Namespace, progress: Progress, accuracy: float, num_samples: int, last_iteration: int
) -> None:
    """Print and file the result, and whether each step was applied exactly once and in order."""
    expected = Progress()
    for step in range(1, options.steps + 1):
        expected.apply(step, samples_of(step, num_samples, options.batch))
    result = {
        "accuracy": accuracy,
        "steps": progress.step,
        "steps_add_up": progress.state_dict() == expected.state_dict(),
        "iterations": last_iteration + 1,
    }
    print(f"digits: test accuracy={accuracy:.4f} {json.dumps(result)}", flush=True)
    temporary = options.checkpoints / f".result.{os.getpid()}"
    temporary.write_text(json.dumps(result) + "\n")
    temporary.replace(options.checkpoints / "result.json")


# --------------------------------------------------------------------- for demonstrations: faults at the word of a file


def step_seconds(control: Path | None, otherwise: float) -> float:
    """Return how long a step is drawn out: what the control folder's file `step-seconds` says, when it is there."""
    try:
        return float((control / "step-seconds").read_text()) if control else otherwise
    except (FileNotFoundError, ValueError):
        return otherwise


def do_fault(control: Path | None, rank: int) -> None:
    """Do once what the file `fault` in the control folder says: `raise RANK` or `hang RANK`."""
    if control is None:
        return
    try:
        kind, culprit = (control / "fault").read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if int(culprit) != rank:
        return
    (control / "fault").replace(control / "fault-done")
    if kind == "raise":
        raise RuntimeError(f"rank {rank} was told to fail")
    # A C function that is called with the interpreter lock held: no thread of this process can run any Python. It locks
    # one mutex twice, since a sleep would end at the signal that asks a hanging worker for its stack.
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("DIGITS_CHECKPOINTS", "digits-checkpoints")
    parser.add_argument("--checkpoints", type=Path, default=Path(folder), help="folder that all ranks share")
    parser.add_argument("--steps", type=int, default=400, help="global steps to train")
    parser.add_argument("--batch", type=int, default=128, help="samples in a step, over all ranks")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints on the disk")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="draw each step out, as a larger model would")
    parser.add_argument("--control", type=Path, help="folder of control files for demonstrations")
    options = parser.parse_args()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    warm_up()  # (5)
    train(parse_options(), load_data())
