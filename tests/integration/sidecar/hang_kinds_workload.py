"""Ranks train with gloo and hang, one way after the other, each in an iteration of its own: `PLAN [pings]`.

PLAN is `KIND:RANK+RANK,KIND:RANK,...`. Each hang is told by a file in TEST_HANGS, and by a line that names it.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx.experimental.symbolic_shapes  # what `.item()` imports at first would take its time
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from unbroken import inprocess

PLAN = [
    (kind, [int(rank) for rank in ranks.split("+")])
    for kind, ranks in (hang.split(":") for hang in sys.argv[1].split(","))
]
PINGS = sys.argv[2:] == ["pings"]
MARKS = Path(os.environ["TEST_HANGS"])
HANG_AT_STEP = 3
NUM_STEPS = 6
NOW: list[tuple[str, list[int]]] = [("none", [])]
"""Kind and ranks of this iteration's hang, the last one."""


def hangs(step: int) -> bool:
    """Return whether this rank hangs now."""
    return step == HANG_AT_STEP and int(os.environ["RANK"]) in NOW[-1][1]


def note(step: int) -> None:
    """Tell that this rank hangs now."""
    if hangs(step):
        (MARKS / str(PLAN.index(NOW[-1]))).touch()
        print(f"HANGS {NOW[-1][0]} {int(os.environ['RANK'])}", flush=True)


class SlowData(Dataset[int]):
    """Its items come at once, but for the one at which a rank hangs."""

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> int:
        if NOW[-1][0] == "loader" and hangs(index):
            note(index)
            load_for_ever()
        return index


class Slow(torch.autograd.Function):
    """Hangs on its way back."""

    @staticmethod
    def forward(context: object, value: torch.Tensor, step: int) -> torch.Tensor:
        """Pass the value on."""
        context.step = step  # type: ignore[attr-defined] # torch gives it any attribute
        return value.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hang, if this rank is to."""
        if NOW[-1][0] == "backward" and hangs(context.step):  # type: ignore[attr-defined] # torch gives it any attribute
            note(context.step)  # type: ignore[attr-defined] # torch gives it any attribute
            sleep_for_ever()
        return gradient, None


def sleep_for_ever() -> None:
    """Block in a call."""
    while True:
        time.sleep(1000)


def spin_for_ever() -> None:
    """Run Python code."""
    while True:
        time.sleep(0.001)


def load_for_ever() -> None:
    """Block in code of the data set."""
    while True:
        time.sleep(1000)


def hold_the_gil() -> None:
    """Let no thread run."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def read_for_ever() -> None:
    """Block in a read that nobody answers."""
    reader, _writer = os.pipe()
    os.read(reader, 1)


def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the two groups of this rank, of four ranks in a square: its row and its column."""
    rank = int(os.environ["RANK"])
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    row, column = made[rank // 2], made[2 + rank % 2]
    assert isinstance(row, dist.ProcessGroup)
    assert isinstance(column, dist.ProcessGroup)
    return row, column


def go_through(groups: tuple[dist.ProcessGroup, dist.ProcessGroup], step: int) -> None:
    """Take one collective in the row, in the column and in the world, unless this rank is to do something else."""
    kind, (row, column) = NOW[-1][0], groups
    if kind == "circle" and hangs(step):
        note(step)
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=row)
    if kind == "nested" and hangs(step):
        note(step)
        sleep_for_ever()
    dist.all_reduce(torch.ones(1), group=column)
    if kind == "mismatch" and hangs(step):
        note(step)
        dist.barrier()
    dist.all_reduce(torch.ones(1))


def misbehave(step: int) -> None:
    """Hang, if this rank is to."""
    kinds = {
        "sleep": sleep_for_ever,
        "spin": spin_for_ever,
        "gil": hold_the_gil,
        "read": read_for_ever,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "item": sleep_for_ever,
    }
    if hangs(step) and NOW[-1][0] in kinds:
        note(step)
        kinds[NOW[-1][0]]()


def choose() -> None:
    """Choose the hang of this iteration, the same on all ranks."""
    number = torch.tensor([len(list(MARKS.iterdir()))])
    dist.broadcast(number, 0)
    NOW.append(PLAN[int(number)] if int(number) < len(PLAN) else ("none", []))


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train a few steps, all ranks in step."""
    dist.init_process_group("gloo")
    choose()
    world = dist.group.WORLD
    assert world is not None
    groups = pairs() if NOW[-1][0] in ("nested", "circle", "mismatch") else None
    model = DistributedDataParallel(torch.nn.Linear(4, 4)) if NOW[-1][0] == "backward" else None
    for step in map(int, DataLoader(SlowData(), batch_size=1, num_workers=int(NOW[-1][0] == "loader"))):
        if PINGS:
            call.ping(step=step)
        misbehave(step)
        if groups is not None:
            go_through(groups, step)
        elif model is not None:
            model.zero_grad()
            Slow.apply(model(torch.ones(1, 4)), step).sum().backward()  # type: ignore[no-untyped-call] # of torch
        elif NOW[-1][0] == "item":
            # What waits is `.item()`: the collective itself returns at once.
            funcol.all_reduce(torch.ones(1), "sum", world).item()
        elif NOW[-1][0] == "work":
            work = dist.all_reduce(torch.ones(1), async_op=True)
            if hangs(step):
                note(step)
                sleep_for_ever()
            work.wait()
        else:
            dist.all_reduce(torch.ones(1))
    dist.barrier()


if __name__ == "__main__":
    train()
