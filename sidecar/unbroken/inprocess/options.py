"""The options of the wrapper, checked."""

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from unbroken.inprocess.abort import Abort
from unbroken.inprocess.assignment.policy import refuse_beside_tree, refuse_policy
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.finalize import Finalize
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.rank_assignment import RankAssignment, RankFilter
from unbroken.inprocess.terminate import Terminate

logger = logging.getLogger(__name__)


_SET_BY_THE_JOB_S = {
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 30,
    "last_call_wait": 1,
    "termination_grace_time": 5,
}
"""Defaults, in seconds, of the options that a job's spec overrides."""


@dataclass(frozen=True)
class WrapperOptions:
    """Keyword arguments of `Wrapper`, which has the defaults. Raises TypeError and ValueError that name the option."""

    store_factory: type | None
    store_kwargs: Mapping[str, Any] | None
    initialize: Initialize | None
    abort: Abort | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    rank_assignment: RankAssignment | None
    rank_filter: RankFilter | None
    monitor_thread_interval: datetime.timedelta
    monitor_process_interval: datetime.timedelta
    heartbeat_interval: datetime.timedelta
    progress_watchdog_interval: datetime.timedelta
    soft_timeout: datetime.timedelta
    hard_timeout: datetime.timedelta
    heartbeat_timeout: datetime.timedelta
    barrier_timeout: datetime.timedelta
    completion_timeout: datetime.timedelta
    last_call_wait: datetime.timedelta
    termination_grace_time: datetime.timedelta
    monitor_process_logfile: str | None
    enabled: bool
    completion: Completion | None
    terminate: Terminate | None
    restart_health_check: HealthCheck | None = None
    """Runs after `finalize` instead of `health_check`; None: that one."""
    takes_group: bool = False
    """Whether a group that exists when the call begins is made again in each iteration, instead of being refused."""
    no_progress_limit: int | None = None
    """In standalone mode: so many faults in a row without progress are recovered; None: the mode's own rule."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_order(self)
        refuse_policy("rank_assignment", self.rank_assignment)
        refuse_policy("rank_filter", self.rank_filter)
        refuse_beside_tree(self.rank_assignment, self.rank_filter)

    def extended(self, **changed: Any) -> "WrapperOptions":
        """Return a copy with other values for some; checked again."""
        return replace(self, **changed)

    @property
    def beat_s(self) -> float:
        """Seconds between two stamps of progress."""
        soft_s = self.soft_timeout.total_seconds()
        return max(min(1.0, soft_s / 10, self.progress_watchdog_interval.total_seconds()), 0.1)

    def names_set_by_the_job(self) -> list[str]:
        """Return the options that were set without effect, because the job's spec overrides them."""
        return [
            name
            for name, default_s in _SET_BY_THE_JOB_S.items()
            if getattr(self, name) != datetime.timedelta(seconds=default_s)
        ]


_TYPES: dict[str, tuple[type, ...]] = {
    "store_kwargs": (Mapping, type(None)),
    "initialize": (Initialize, type(None)),
    "abort": (Abort, type(None)),
    "finalize": (Finalize, type(None)),
    "health_check": (HealthCheck, type(None)),
    "rank_assignment": (RankAssignment, type(None)),
    "rank_filter": (RankFilter, type(None)),
    "monitor_process_logfile": (str, type(None)),
    "enabled": (bool,),
    "completion": (Completion, type(None)),
    "terminate": (Terminate, type(None)),
    "restart_health_check": (HealthCheck, type(None)),
}
_DURATIONS = tuple(field.name for field in fields(WrapperOptions) if field.type is datetime.timedelta)
_ASCENDING = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)


def _check_types(options: WrapperOptions) -> None:
    if options.store_factory is not None and not isinstance(options.store_factory, type):
        raise TypeError(f"store_factory: want a class or None, got {options.store_factory!r}")
    wanted = _TYPES | dict.fromkeys(_DURATIONS, (datetime.timedelta,))
    for name, types in wanted.items():
        value = getattr(options, name)
        if not isinstance(value, types):
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
            raise TypeError(f"{name}: want {names}, got {value!r} of type {type(value).__name__}")


def _check_order(options: WrapperOptions) -> None:
    for name in _DURATIONS:
        value = getattr(options, name)
        if value < datetime.timedelta(0) or (value == datetime.timedelta(0) and name != "last_call_wait"):
            raise ValueError(f"{name}: want more than 0 seconds, got {value.total_seconds():g}")
    for less, more in _ASCENDING:
        low, high = getattr(options, less), getattr(options, more)
        if low >= high:
            raise ValueError(
                f"{less}: want less than {more} ({high.total_seconds():g} s), got {low.total_seconds():g} s"
            )
    logfile = options.monitor_process_logfile
    if logfile is not None and not Path(logfile).is_absolute():
        raise ValueError(f"monitor_process_logfile: want an absolute path, got {logfile!r}")
