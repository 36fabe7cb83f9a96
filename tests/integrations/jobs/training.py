"""What the jobs of all frameworks share: a tiny model, data that are counted, and faults at chosen steps."""

import contextlib
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbroken import inprocess

OUT = Path(os.environ["TEST_OUT"])
NUM_STEPS = 30
SAMPLES, GLOBAL_BATCH = 120, 12
FAULTS: dict[str, int] = json.loads(os.environ.get("TEST_FAULTS", "{}"))
"""Fault by name, and the step after which rank 1 has it, once."""
MUST_GROW = bool(os.environ.get("TEST_MUST_GROW"))
"""A rank that is alone waits until there is another process, then makes a step a second until it has joined."""


class Model(nn.Module):
    """A classifier. It remembers which samples it has seen, and draws a random number for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.seen: list[int] = []
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and scores."""
        if self.training:
            self.seen += ids.tolist()
            self.drawn.append(torch.rand(1).item())
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def make_model() -> Model:
    """Return the same model on each rank and in each iteration."""
    torch.manual_seed(1)
    return Model()


def make_samples(count: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    """Return the data."""
    chance = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(16, generator=chance), "labels": torch.tensor(i % 4), "ids": torch.tensor(i)}
        for i in range(count)
    ]


def share(call: inprocess.CallWrapper) -> int:
    """Return a rank's part of a step's samples."""
    return GLOBAL_BATCH // (call.state.active_world_size or 1)


def started() -> None:
    """Say that this process has imported its framework, and is about to train."""
    (OUT / f"started-{os.getpid()}").touch()


def after_step(step: int, call: inprocess.CallWrapper, model: Any) -> None:
    """Note what this step, counted from 1, was made of, then break, if it is time."""
    note_step(step, call, model)
    break_after(step, call)


def note_step(step: int, call: inprocess.CallWrapper, model: Any) -> None:
    """Note what a step was made of; not later than what saves it, or an interruption in between loses the note."""
    rank = call.state.active_rank
    with (OUT / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps([step, call.iteration, rank, sorted(model.seen), model.drawn]) + "\n")
    model.seen.clear()
    model.drawn.clear()


def break_after(step: int, call: inprocess.CallWrapper) -> None:
    """Break, if it is time."""
    rank, world_size = call.state.active_rank, call.state.active_world_size
    if MUST_GROW and world_size == 1 and step > max(FAULTS.values()) + 2:
        pause = threading.Event()
        with call.disable_hang_protection():
            while len(list(OUT.glob("started-*"))) < 3:
                pause.wait(0.1)
            pause.wait(1.0)
    for fault, at in FAULTS.items():
        if rank == min(1, (world_size or 1) - 1) and step == at:
            break_once(fault)


def break_once(fault: str) -> None:
    """Have this fault, unless a rank has had it."""
    try:
        (OUT / f"broken-{fault}").touch(exist_ok=False)
    except FileExistsError:
        return
    if fault.startswith("exception"):
        raise RuntimeError("rank 1 fails once")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        with contextlib.suppress(ZeroDivisionError):
            threading.Event().wait()


def finish(model: nn.Module, step: int, call: inprocess.CallWrapper) -> None:
    """Write down what has come out, on rank 0."""
    weights = torch.cat([_whole(one).flatten() for one in model.parameters()])
    result = {
        "step": step,
        "iteration": call.iteration,
        "world_size": call.state.active_world_size,
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "weights": weights.tolist(),
    }
    if call.state.active_rank == 0:
        (OUT / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _whole(parameter: Any) -> torch.Tensor:
    parameter = parameter.detach()
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.cpu()
