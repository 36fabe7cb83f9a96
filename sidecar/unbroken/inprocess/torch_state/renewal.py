"""Between two iterations, everything in torch that depends on rank, world or groups becomes as in a new process.

    left ──empty caches, drop groups──> ready ──same rank and world──────────────────> begin
                                         ├──────other rank or world, all was emptied──> begin, compiled code dropped
                                         ├──────other rank or world, something stayed─> StaleStateError: a new process
                                         └──────also with the same ones, RPC still runs─> likewise

What is proven for the torch at hand goes on in this process: `caches` names all that torch keeps, `mesh_identity` makes
one iteration's meshes unlike another's and checks the first of each iteration. What is not gets a new process. See
docs/design/0017-nothing-stale.md.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state import caches
from unbroken.inprocess.torch_state.compiled import CompiledCode
from unbroken.inprocess.torch_state.holders import find_holder
from unbroken.inprocess.torch_state.mesh_identity import Meshes
from unbroken.inprocess.torch_state.modes import Modes
from unbroken.inprocess.torch_state.remote_calls import RemoteCalls

logger = logging.getLogger(__name__)


UNKNOWN_HOLDER = "by an argument of the wrapped function, or by C++ (compiled code, autograd, a thread's cache)"
ADVICE = "make meshes and models inside the wrapped function, and keep none in a global, a closure or an argument"


class RankLayout(NamedTuple):
    """What compiled code and offsets of shards depend on."""

    rank: int | None
    world_size: int | None


class TorchState:
    """Of one call. All methods belong to the thread that runs the function."""

    def __init__(self) -> None:
        self._meshes = Meshes()
        self._compiled = CompiledCode()
        self._remote_calls = RemoteCalls()
        self._layout: RankLayout | None = None
        """In the last iteration that this process ran; None before the first."""
        self._modes: Modes | None = None
        """Before the first iteration; None until then."""
        self._missing: list[str] = []
        """Names of what torch may keep, and nobody could empty."""
        self._has_looked = False
        """Whether it was said who keeps a mesh of an iteration that is over: that takes long to find out."""

    @contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Everything that torch makes in the block belongs to the iteration of this number."""
        with self._meshes.stamped(number, has_run=self._layout is not None), self._compiled.named_groups():
            yield

    def take(self, layout: RankLayout) -> None:
        """Have this rank, in a world of this size, from now on. An interruption in here does no harm.

        Raises StaleStateError when this process cannot have it without a trace of its former one.
        """
        if self._modes is None:
            self._modes = Modes.read()
        self._modes.restore()
        self._remote_calls.look()
        former = self._layout
        if former is not None and (reason := self._remote_calls.obstacle(former.rank != layout.rank)):
            raise StaleStateError(reason)
        if former is not None and former != layout:
            if reason := self._obstacle():
                was, now = (f"rank {one.rank} of {one.world_size}" for one in (former, layout))
                raise StaleStateError(f"{was} became {now}, but {reason}")
            self._compiled.drop("rank or world changed")
            self._meshes.has_changed = True
        self._layout = layout
        _tell_lightning(layout.rank)

    @property
    def problem(self) -> str:
        """What the check of this iteration's first mesh found; "" when nothing. Also where the script swallowed it."""
        return self._meshes.problem

    def empty(self) -> list[object]:
        """Empty torch's caches once a function was left; return what is to be destroyed in the background."""
        self._remote_calls.note_begun()
        slow, self._missing = caches.empty_all()
        if self._meshes.are_made:
            # Compiled code may have the mesh, or the groups behind it, in it.
            self._compiled.drop("its meshes are gone")
        return slow

    def look_for_left_over(self) -> None:
        """Once garbage is collected: say, once, who keeps a mesh of the iteration that was left."""
        if not self._has_looked and self._meshes.left_over():
            self._has_looked = True
            if holder := find_holder(self._meshes.left_over()):
                logger.warning("a mesh outlives its iteration: %s. Its groups are gone; %s", holder, ADVICE)

    def _obstacle(self) -> str:
        if meshes := self._meshes.left_over():
            # Whoever keeps it may still use it, with the offsets of the previous rank, whether or not it can be found.
            return f"a mesh of that time is kept: {find_holder(meshes) or UNKNOWN_HOLDER}; {ADVICE}"
        if self._missing:
            import torch  # noqa: PLC0415 - the package's import must stay cheap

            return (
                "what empties the memory of the former one cannot be found, or fails "
                f"(torch {torch.__version__}): {', '.join(self._missing)}"
            )
        return ""


def _tell_lightning(rank: int | None) -> None:
    """Set the rank that Lightning reads when it is imported: what runs before a strategy's own setup uses it."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    only: Any = getattr(module, "rank_zero_only", None)
    if rank is not None and hasattr(only, "rank"):
        only.rank = rank
