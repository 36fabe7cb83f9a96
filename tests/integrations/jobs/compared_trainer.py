"""Train with Hugging Face's Trainer and a callback that lowers the dropout; `right`, by the step of the Trainer."""

import sys
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from unbroken import inprocess
from unbroken.integrations import huggingface


class Model(nn.Module):
    """A small classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), self.dropout, nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, as the Trainer wants it."""
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Lowering(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Lowers the dropout after each step: the flaw is that it counts the steps itself."""

    def __init__(self, model: Model) -> None:
        self.model, self.num_steps = model, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lower it."""
        self.num_steps += 1
        self.model.dropout.p = 0.5 / (1 + self.num_steps)


class LoweringByStep(Lowering):
    """The same by the Trainer's own step, at the begin of each."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set what belongs to this step."""
        self.num_steps = state.global_step
        self.model.dropout.p = 0.5 / (1 + self.num_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing to do."""


@inprocess.Wrapper()
def train(kind: str, call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(8), "labels": torch.tensor(i % 4)} for i in range(24)]
    args = TrainingArguments(
        output_dir="output",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = Model()
    lowering = (LoweringByStep if kind == "right" else Lowering)(model)
    huggingface.train(Trainer(model, args, train_dataset=samples, callbacks=[lowering]), call)


if __name__ == "__main__":
    train(sys.argv[1])
