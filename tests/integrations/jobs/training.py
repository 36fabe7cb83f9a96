"""What the jobs of all frameworks share: a tiny model, data that are counted, and one fault."""

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
NUM_STEPS = int(os.environ.get("TEST_STEPS", "30"))
SAMPLES, GLOBAL_BATCH = 120, 12
FAULT_AT = 7
SLOW_WORLD = int(os.environ.get("TEST_SLOW_WORLD", "0"))
"""In a world of this size each step takes long, so that the job can grow before it ends."""


class Model(nn.Module):
    """A classifier with dropout: its losses depend on the random numbers. It remembers which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and scores."""
        if self.training:
            self.seen += ids.tolist()
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


def after_step(step: int, call: inprocess.CallWrapper, model: Any) -> None:
    """Note what this step was made of, then break, if it is time."""
    rank, world_size = call.state.active_rank, call.state.active_world_size
    with (OUT / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps([step, call.iteration, rank, sorted(model.seen)]) + "\n")
    model.seen.clear()
    if world_size == SLOW_WORLD:
        threading.Event().wait(0.3)
    if rank == 1 and step == FAULT_AT:
        _break(os.environ.get("TEST_FAULT", ""))


def _break(fault: str) -> None:
    try:
        (OUT / "broken").touch(exist_ok=False)
    except FileExistsError:
        return
    if fault == "exception":
        raise RuntimeError("rank 1 fails once")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        with contextlib.suppress(ZeroDivisionError):
            threading.Event().wait()


def finish(model: nn.Module, step: int, call: inprocess.CallWrapper) -> None:
    """Write down what has come out, on rank 0."""
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    result = {
        "step": step,
        "iteration": call.iteration,
        "world_size": call.state.active_world_size,
        "digest": digest,
        "weights": weights.tolist(),
    }
    if call.state.active_rank == 0:
        (OUT / "result.json").write_text(json.dumps(result), encoding="utf-8")
