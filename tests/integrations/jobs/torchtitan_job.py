"""The recipe of docs/integrations/torchtitan.md: a tiny Llama in torchtitan's own Trainer, on CPUs."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.integrations.jobs import titan_cpu  # noqa: F401  # before torchtitan
from tests.integrations.jobs.training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    OUT,
    SAMPLES,
    break_after,
    break_once,
    finish,
    note_step,
    share,
    started,
)
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from unbroken import inprocess
from unbroken.integrations import torchtitan
from unbroken.integrations.samples import GlobalBatches

TOKENS = 8
SAVE_EVERY = 8
WRITES = os.environ.get("TEST_WRITES", "yes") == "yes"
FAILS_UNSAVED = int(os.environ.get("TEST_FAILS_UNSAVED", "0"))
"""Step after which rank 1 fails before it saves, once."""
FAILS_VALIDATING = int(os.environ.get("TEST_FAILS_VALIDATING", "0"))
"""Step whose validation rank 1 fails in, once."""
FAILS_WRITING = int(os.environ.get("TEST_FAILS_WRITING", "0"))
"""Step whose checkpoint of torchtitan's own rank 1 fails in, once."""

ANY_WORLD = os.environ.get("TEST_ANY_WORLD", "yes") == "yes"


class Seen:
    """What this rank was given since the last step, and in which call."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, call: Any) -> None:
        """Forget what was before this call."""
        self.call = call
        self.step = 0
        self.seen: list[int] = []
        self.drawn: list[float] = []


SEEN = Seen()


class Letters(BaseTokenizer):  # type: ignore[misc]  # the package brings no types here
    """No text is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]  # the package brings no types here
        """Nothing."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Return nothing."""
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Return nothing."""
        return ""

    def get_vocab_size(self) -> int:
        """Return one of no text."""
        return 2


class Samples(BaseDataLoader):  # type: ignore[misc]  # the package brings no types here
    """A loader that goes on in a world of any size."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # the package brings no types here
        """Nothing."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        self._done = 0
        self._batches = GlobalBatches(SAMPLES, GLOBAL_BATCH, steps=NUM_STEPS)
        chance = torch.Generator().manual_seed(2)
        self._tokens = torch.randint(0, 2048, (SAMPLES, TOKENS + 1), generator=chance)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Give a rank's part of each step."""
        self._batches.start_at(self._done)
        for ids in self._batches:
            # The step before this one is saved and reported.
            break_after(self._done, SEEN.call)
            self._done += 1
            SEEN.seen += ids
            SEEN.drawn.append(torch.rand(1).item())
            tokens = self._tokens[ids]
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data."""
        return {"done": self._done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on behind that place."""
        self._done = state_dict["done"]


class Checks(Samples):
    """What validations look at. They draw random numbers, as an iterator of a DataLoader does."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # the package brings no types here
        """What a validation sets."""

        infinite: bool = True

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Give the same batch each time."""
        while True:
            torch.rand(1)
            if 0 < SEEN.step == FAILS_VALIDATING and SEEN.call.state.active_rank == 1:
                break_once("exception-validating")
            tokens = self._tokens[: GLOBAL_BATCH // 2]
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


class Notes(MetricsProcessor):  # type: ignore[misc]  # the package brings no types here
    """Notes each step before it is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]  # the package brings no types here
        """Nothing."""

    def log(self, step: int, *args: Any, **kwargs: Any) -> None:
        """Note a step."""
        note_step(step, SEEN.call, SEEN)
        SEEN.step = step
        if step == FAILS_UNSAVED and SEEN.call.state.active_rank == 1:
            break_once("exception-unsaved")
        super().log(step, *args, **kwargs)

    def log_validation(self, loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        """Note what a validation has found."""
        with (OUT / "validations").open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, loss]) + "\n")
        super().log_validation(loss, step, *args, **kwargs)


_save = CheckpointManager.dcp_save


def _fail_or_save(self: CheckpointManager, *args: Any, **kwargs: Any) -> Any:
    if 0 < SEEN.step == FAILS_WRITING and SEEN.call.state.active_rank == 1:
        break_once("exception-writing")
    return _save(self, *args, **kwargs)


CheckpointManager.dcp_save = _fail_or_save


def configuration(call: inprocess.CallWrapper) -> Trainer.Config:
    """Return one for this world."""
    spec = model_registry("debugmodel")
    del spec.model.layers[1:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=Letters.Config(),
        dataloader=Samples.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(
            local_batch_size=share(call),
            global_batch_size=GLOBAL_BATCH,
            seq_len=TOKENS,
            steps=NUM_STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=WRITES, interval=SAVE_EVERY),
        metrics=Notes.Config(log_freq=1),
        # One of them between the last save and the first fault.
        validator=Validator.Config(enable=True, freq=7, steps=1, dataloader=Checks.Config()),
        debug=DebugConfig(seed=1),
        dump_folder=str(OUT / "disk"),
    )


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train."""
    SEEN.begin(call)
    trainer = torchtitan.train(configuration(call), call, any_world=ANY_WORLD)
    finish(trainer.model_parts[0], trainer.step, call)


if __name__ == "__main__":
    started()
    train()
