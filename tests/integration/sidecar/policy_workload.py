"""Trains nothing under the rank assignment that TEST_POLICY names; appends "name rank iteration pid" to TEST_EVENTS.

Who is which rank is in the environment. Nothing here asks torch, whose import costs each process more than all else:
a stand-in without groups takes its place.
"""

import importlib.abc
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from unbroken import inprocess
from unbroken.inprocess import rank_assignment as ra


class Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of torch that do nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch and all below it."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torch" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        contents: dict[str, Any] = {"__getattr__": lambda name: MagicMock(name=f"{module.__name__}.{name}")}
        if module.__name__ == "torch.distributed":
            contents |= {"is_available": lambda: True, "is_initialized": lambda: False, "TCPStore": listen}
        if module.__name__ == "torch":
            contents |= SWITCHES
        vars(module).update(contents)


def listen(*_: object, master_listen_fd: int, **__: object) -> socket.socket:
    """Take the socket, as the store that is served on it does."""
    return socket.socket(fileno=master_listen_fd)


SWITCHES: dict[str, Any] = {
    "is_grad_enabled": lambda: True,
    "get_default_dtype": lambda: None,
    "is_autocast_enabled": lambda _: False,
    "get_autocast_dtype": lambda _: None,
    "is_autocast_cache_enabled": lambda: True,
    "autocast_increment_nesting": lambda: 1,
    "is_inference_mode_enabled": lambda: False,
    "_C": SimpleNamespace(
        _len_torch_function_stack=lambda: 0,
        _len_torch_dispatch_stack=lambda: 0,
        _clear_DTensor_sharding_propagator_cache=lambda: None,
        _autograd=SimpleNamespace(_top_saved_tensors_default_hooks=lambda _: None),
    ),
}
"""As torch has them when nobody has touched them."""

sys.meta_path.insert(0, Torch())

POD = int(os.environ["UNBROKEN_POD"].rpartition("-")[2])


def rack(_state: inprocess.State) -> str:
    """Say where this pod is; evaluated in this process only."""
    return f"rack-{POD % 2}"


def company(state: inprocess.State) -> str:
    """Say with whom this worker counts: those of pod 0 alone, all others together; true in this process only."""
    return f"alone-{state.rank}" if POD == 0 else "together"


class Backwards(ra.RankAssignment):
    """The last is the first. Raises, or hangs, where a file says so; says in TEST_EVENTS who was asked."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        """Renumber."""
        flags = Path(os.environ["TEST_EVENTS"]).parent
        if ctx.state.iteration and not self._is_noted:
            note(f"asked-{POD}", ctx.state.rank or 0)
            self._is_noted = True
        if (flags / "raise").exists():
            raise KeyError("no plan for this")
        while (flags / "hang").exists():
            time.sleep(0.01)  # Hangs as Python code does; the job ends it.
        ctx = ra.ShiftRanks()(ctx)
        ctx.state.rank = ctx.state.world_size - 1 - (ctx.state.rank or 0)
        return ctx

    _is_noted = False


RESERVE = ra.LayerFlag.RESERVE
POLICIES: dict[str, Callable[[], ra.RankAssignment]] = {
    "narrowed": lambda: inprocess.Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.MaxActiveWorldSize(5), ra.ShiftRanks()),
    "tree": lambda: ra.Tree(
        [ra.Layer(key_or_fn="all", flag=RESERVE), ra.Layer(max_ranks=2, key_or_fn=rack, flag=RESERVE)]
    ),
    "powers": lambda: ra.Tree(
        [ra.Layer(key_or_fn="all", flag=RESERVE)], world_size_filter=lambda size: 1 << (size.bit_length() - 1)
    ),
    "gaps": ra.FillGaps,
    "own": Backwards,
    "counted": lambda: inprocess.Compose(
        ra.ShiftRanks(), ra.FilterCountGroupedByKey(company, lambda count: count != 2)
    ),
    "different": lambda: ra.MaxActiveWorldSize(2 + POD),
}


def note(name: str, rank: int) -> None:
    """Append one event; a write of one line is atomic."""
    iteration = os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1")
    with Path(os.environ["TEST_EVENTS"]).open("a") as file:
        file.write(f"{name} {rank} {iteration} {os.getpid()}\n")


@inprocess.Wrapper(rank_assignment=POLICIES[os.environ["TEST_POLICY"]]())
def train(call: inprocess.CallWrapper) -> None:
    """Run until told to stop."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, size) == (call.state.active_rank, call.state.active_world_size)
    note(f"started-{POD}", rank)
    while not Path(os.environ["TEST_DONE"]).exists():
        call.ping()
        time.sleep(0.01)  # The pace of the steps; nothing waits for it.


train()
