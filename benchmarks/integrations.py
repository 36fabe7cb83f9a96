"""What the integrations of frameworks cost: after a fault, and in each step while nothing fails.

    chrt -r 10 python benchmarks/integrations.py --rounds 5 --steps 2000

- recovery: the examples that the pages show, on 4 ranks, with the fault that they bring. Of the time from the fault
  until all ranks have reported a step again, what is spent outside the user's own function: that it ends on all ranks,
  the new plan, and the way into the function. Least, median and most of the rounds.
- step: one worker of `unbroken run` trains with steps of 10 ms of plain Python. What the integration takes of each is
  the CPU time of the main thread between a mark before and one right behind it, over all of its events, less that
  between two marks with nothing between them. Shown are the median with its 95 % interval, by bootstrap, and
  the least of 95 % of the steps. Code that runs once in 10 ms is many times slower where neighbours empty the
  processor's caches: what an empty callback and `torch.empty(1)` take in the same place is shown beside, and `--warm`
  leaves the 10 ms of plain Python out. No checkpoint is due in these steps, as what one costs depends on the model:
  `--every 1` shows that of the smallest there is.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overhead import STEP_S, compute, summary, turns_of_a_step
from unbroken import inprocess, memory

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {"HF Trainer": "hf_trainer", "FSDP2": "fsdp2", "Lightning": "lightning_trainer"}
NUM_RANKS = 4
MOST_OUTSIDE_MS = 150.0
MOST_OF_A_STEP = 0.1
"""Percent."""
NEVER = 1 << 40
JOB_TIMEOUT_S = 300.0
_RECOVERED = re.compile(r"recovered 1: rung in-process in [0-9.]+ m?s \((.*)\)")
_PHASE = re.compile(r"([a-z-]+) ([0-9.]+) (ms|s)")
_OUTSIDE = ("detect", "stop", "plan", "enter")


def main() -> int:
    """Run what was asked for and print two tables; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each recovery (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of each framework (%(default)s)")
    parser.add_argument("--every", type=int, default=NEVER, help="steps between two checkpoints in memory (none)")
    parser.add_argument("--warm", action="store_true", help="steps that compute nothing")
    parser.add_argument("--inside", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        options.result.write_text(json.dumps(measure(options)))
        return 0
    (lines, is_missed), (more, is_more_missed) = recoveries(options.rounds), steps(options)
    print("\n".join(lines + more))
    return 1 if is_missed or is_more_missed else 0


def recoveries(rounds: int) -> tuple[list[str], bool]:
    """Return the table of recoveries, and whether a bar is missed."""
    lines = (
        [f"{'outside the function, ms, 4 ranks':36}{'median':>10}{'min':>10}{'max':>10}{'bar':>10}"] if rounds else []
    )
    is_missed = False
    for name, example in EXAMPLES.items() if rounds else ():
        seen = [outside_ms(example) for _ in range(rounds)]
        is_missed |= statistics.median(seen) > MOST_OUTSIDE_MS
        cells = "".join(f"{value:10.0f}" for value in (statistics.median(seen), min(seen), max(seen)))
        lines.append(f"{name:36}{cells}{f'<= {MOST_OUTSIDE_MS:g}':>10}")
    return lines, is_missed


def steps(options: argparse.Namespace) -> tuple[list[str], bool]:
    """Return the table of steps, and whether a bar is missed."""
    if not options.steps:
        return [], False
    titles = f"{'median us':>10}{'95 % of it':>20}{'least us':>10}{'median %':>10}{'bar':>10}"
    lines, is_missed = [f"{'added to a step of 10 ms':36}{titles}"], False
    for name in JOBS:
        added = _added_us(name, options)
        median, low, high = summary(added)
        least = statistics.quantiles(added, n=20)[0]
        percent = median / 1e6 / STEP_S * 100
        is_barred = options.every == NEVER and name in OURS
        is_missed |= is_barred and percent > MOST_OF_A_STEP
        cells = f"{median:10.1f}{f'{low:.1f} to {high:.1f}':>20}{least:10.1f}{percent:10.3f}"
        lines.append(f"{name:36}{cells}{f'<= {MOST_OF_A_STEP:g}' if is_barred else '':>10}")
    return lines, is_missed


def outside_ms(example: str) -> float:
    """Run an example; return how much of its recovery was spent outside the function. Raises ValueError without one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["--pods", "1", "--ranks-per-pod", str(NUM_RANKS), "--memory", "64Mi"]
        said = _run(Path(folder), [*command, str(ROOT / "examples" / f"{example}.py")])
    if (match := _RECOVERED.search(said)) is None:
        raise ValueError(f"{example}: want a recovery in the process, got {said[-2000:]!r}")
    phases = _PHASE.findall(match[1])
    # What comes after them, first-progress, is the function's own: groups, model, checkpoint and a step.
    return sum(float(number) * (1000 if unit == "s" else 1) for name, number, unit in phases if name in _OUTSIDE)


def _added_us(name: str, options: argparse.Namespace) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        words = ["--inside", name, "--steps", str(options.steps), "--every", str(options.every)]
        words += ["--result", str(result), *(["--warm"] if options.warm else [])]
        _run(Path(folder), ["--memory", "64Mi", __file__, *words])
        found: list[float] = json.loads(result.read_text())
        return found


def _run(folder: Path, words: list[str]) -> str:
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words}: want exit code 0, got {done.returncode}: {done.stdout[-4000:]}")
    return done.stdout


class Clock:
    """Adds up, for each step, the stretches around the integration, less those around nothing."""

    def __init__(self) -> None:
        self.steps_us: list[float] = []
        self._marks_ns = [0, 0, 0, 0]
        self._sum_ns = 0

    def mark(self, place: int) -> None:
        """Be called before the integration (0), right behind it (1), and once more (2), with nothing in between.

        Once before all that (-1), as what measures is slower when it runs for the first time in 10 ms.
        """
        now_ns = time.thread_time_ns()
        self._marks_ns[place] = now_ns
        if place == 2:
            before_ns, behind_ns, _, _ = self._marks_ns
            self._sum_ns += (behind_ns - before_ns) - (now_ns - behind_ns)

    def begin_step(self) -> None:
        """Begin the next step."""
        self.steps_us.append(self._sum_ns / 1000)
        self._sum_ns = 0


def marking(base: type, clock: Clock, place: int, first_event: str) -> Any:
    """Return a callback of this base that marks each event, and begins a step with the first one."""

    def calls(name: str) -> Callable[..., None]:
        def event(*args: Any, **kwargs: Any) -> None:
            if (place, name) == (-1, first_event):
                clock.begin_step()
            clock.mark(place)

        return event

    return type("Marks", (base,), {name: calls(name) for name in dir(base) if name.startswith("on_")})()


class Model(nn.Module):
    """The smallest there is, whose steps take 10 ms of plain Python."""

    turns = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        compute(self.turns)
        return {"loss": (self.layer(x) - labels).square().mean()}


SAMPLES = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8


def _hf(call: inprocess.CallWrapper, clock: Clock, steps: int, every: int, *, is_empty: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from unbroken.integrations import huggingface

    warm, before, *behind = (marking(TrainerCallback, clock, place, "on_step_begin") for place in range(-1, 3))
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(output_dir=".", max_steps=steps, logging_strategy="no", **quiet)
    callbacks = [warm, before, *([TrainerCallback()] if is_empty else [])]
    trainer = Trainer(Model(), args, train_dataset=SAMPLES, callbacks=callbacks)
    # Behind the one that is added when the training begins.
    before.on_train_begin = lambda *args, **kwargs: trainer.callback_handler.callbacks.extend(behind)
    if is_empty:
        trainer.train()
    else:
        huggingface.train(trainer, call, every=every)


def _lightning(call: inprocess.CallWrapper, clock: Clock, steps: int, every: int, *, is_empty: bool = False) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from unbroken.integrations import lightning
    from unbroken.integrations.samples import GlobalBatches

    class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    warm, before, *behind = (marking(Callback, clock, place, "on_train_batch_start") for place in range(-1, 3))
    batches = GlobalBatches(len(SAMPLES), 4, steps=steps)
    resume = Callback() if is_empty else lightning.Resume(call, batches=batches, every=every)
    callbacks = [warm, before, resume, *behind]
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(Module(), DataLoader(SAMPLES, batch_sampler=batches))  # type: ignore[arg-type]  # a list is a data set


def _fsdp2(call: inprocess.CallWrapper, clock: Clock, steps: int, every: int) -> None:
    dist.init_process_group("gloo")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    checkpoints = memory.Checkpointer(every=every)
    checkpoints.load(state)
    batch = {"x": torch.ones(4, 2), "labels": torch.ones(4, 2)}
    for step in range(1, steps + 1):
        clock.begin_step()
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        clock.mark(-1)
        clock.mark(0)
        with call.atomic():
            checkpoints.save(state, step)
        call.ping(step=step)
        clock.mark(1)
        clock.mark(2)


def _comparison(call: inprocess.CallWrapper, clock: Clock, steps: int, every: int) -> None:
    for _ in range(steps):
        clock.begin_step()
        compute(Model.turns)
        clock.mark(-1)
        clock.mark(0)
        torch.empty(1)
        clock.mark(1)
        clock.mark(2)


OURS: dict[str, Callable[[inprocess.CallWrapper, Clock, int, int], None]] = {
    "HF callback": _hf,
    "Lightning callback": _lightning,
    "FSDP2 recipe": _fsdp2,
}
JOBS: dict[str, Callable[[inprocess.CallWrapper, Clock, int, int], None]] = OURS | {
    "an empty callback of HF": functools.partial(_hf, is_empty=True),
    "an empty callback of Lightning": functools.partial(_lightning, is_empty=True),
    "torch.empty(1)": _comparison,
}
"""Those beside ours show what the frameworks, and the place, take for anything."""


def measure(options: argparse.Namespace) -> list[float]:
    """Measure in a worker."""
    clock = Clock()
    Model.turns = 0 if options.warm else turns_of_a_step()

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        JOBS[options.inside](call, clock, options.steps, options.every)

    train()
    # What came before the first step, and the first ones.
    return clock.steps_us[10:]


if __name__ == "__main__":
    sys.exit(main())
