"""Plug-ins that say on standard output what the in-process restarter does, for a restarter around it."""

import logging
import sys
from dataclasses import dataclass, field
from typing import ClassVar

from unbroken.inprocess.abort import Abort
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.terminate import Terminate

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "NestedRestarterLogger",
]

_said = logging.getLogger("InprocessRestarter.Restarter")


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg] # generic for the type checker alone
    """Whatever standard output is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


class NestedRestarterLogger:
    """Writes whole lines to standard output, whatever the script's own logging does."""

    def __init__(self) -> None:
        self.rank: int | None = None
        if not _said.handlers:
            handler = _StandardOutput(sys.stdout)
            handler.setFormatter(logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s"))
            _said.addHandler(handler)
            _said.setLevel(logging.DEBUG)
            _said.propagate = False

    def set_connected_rank(self, rank: int | None) -> None:
        """Note whose lines these are."""
        self.rank = rank

    def log_for_restarter(self, message: str) -> None:
        """Write one line."""
        _said.debug("%s", message)


@dataclass
class NestedRestarterCallback:
    """Says the state of the restarter, on the worker whose initial rank is `special_rank`."""

    _shared_logger: ClassVar[NestedRestarterLogger] = NestedRestarterLogger()

    restarter_state: str
    restarter_stage: str | None = None
    logger: NestedRestarterLogger = field(default=_shared_logger)
    special_rank: int = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Say it and return the state."""
        if state.initial_rank == self.special_rank:
            self.logger.set_connected_rank(state.initial_rank)
            stage = "" if self.restarter_stage is None else f" stage={self.restarter_stage}"
            self.logger.log_for_restarter(f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}")
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """For `initialize`: first that the restarter is there, then that a restart has been handled."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Say it and return the state."""
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


@dataclass
class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """For `abort`: a restart begins."""

    restarter_state: str = "handling"
    restarter_stage: str | None = "starting"


@dataclass
class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """For `completion`: the job is done."""

    restarter_state: str = "finalized"


@dataclass
class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """For `terminate`: this worker leaves for good."""

    restarter_state: str = "aborted"
