"""A training of Hugging Face's Trainer: with evaluations, a schedule of learning rates and clipping."""

from typing import Any

from tests.integrations.jobs.training import (
    NUM_STEPS,
    OUT,
    after_step,
    finish,
    make_model,
    make_samples,
    share,
    started,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

from unbroken import inprocess
from unbroken.integrations import huggingface


class AfterStep(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Calls `after_step`."""

    def __init__(self, call: inprocess.CallWrapper) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """As its name says."""
        after_step(state.global_step, self.call, model)


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train."""
    args = TrainingArguments(
        output_dir=str(OUT / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=share(call),
        learning_rate=1e-2,
        warmup_steps=5,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=True,
    )
    samples = make_samples()
    model = make_model()
    trainer = Trainer(model, args, train_dataset=samples, eval_dataset=samples[:24], callbacks=[AfterStep(call)])
    result = huggingface.train(trainer, call)
    finish(model, result.global_step, call)


if __name__ == "__main__":
    started()
    train()
