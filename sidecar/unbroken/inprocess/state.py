"""The state of one wrapped call, as plug-ins see it."""

import enum
import os
from dataclasses import dataclass, fields, replace


class Mode(enum.Enum):
    """What a worker does in the current iteration."""

    INITIALIZED = enum.auto()
    """Before the first plan."""
    ACTIVE = enum.auto()
    """Calls the wrapped function."""
    INACTIVE = enum.auto()
    """A spare: waits."""
    TERMINATED = enum.auto()


@dataclass
class State:
    """Ranks of three kinds, 0-based: among all living workers, among the active ones, and at first."""

    rank: int | None
    """Among all living workers. The active ones come first, so for them it is the active rank. Spares have
    active_world_size: the coordinator chooses among them."""
    world_size: int
    """All living workers, spares included."""
    active_rank: int | None = None
    """None for a spare."""
    active_world_size: int | None = None
    initial_rank: int | None = None
    """Rank in this process' first plan."""
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None
    """What the function raised here in this iteration by itself; None otherwise. Dropped before the next iteration: it
    pins every tensor of the frames that it left."""

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> "State":
        """Read RANK and WORLD_SIZE; 0 of 1 without them. Raises ValueError when they are not numbers."""
        return cls(rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")))

    def set_distributed_vars(self) -> None:
        """Export the active rank and world size as RANK and WORLD_SIZE."""
        os.environ["RANK"] = str(self.active_rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def advance(self) -> None:
        """Begin the next iteration."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> "FrozenState":
        """Return a read-only copy. The exception is not copied: that may call a constructor with wrong arguments."""
        return FrozenState(**{field.name: getattr(self, field.name) for field in fields(self)})

    def copy_from(self, other: "State", fields: tuple[str, ...] | None = None) -> None:
        """Take the named fields of another state; all of them when None."""
        for name in other.__dataclass_fields__ if fields is None else fields:
            setattr(self, name, getattr(other, name))


@dataclass(frozen=True)
class FrozenState:
    """`State`, read-only."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def without_exception(self) -> "FrozenState":
        """Return the same without the exception, to keep."""
        return replace(self, fn_exception=None)
