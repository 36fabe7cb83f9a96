"""The extension's wrapper, on ours."""

import datetime
import functools
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from unbroken.inprocess import wrap
from unbroken.inprocess.abort import Abort
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.compose import Compose, Composition
from unbroken.inprocess.finalize import Finalize
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.loop.call_wrapper import CallWrapper
from unbroken.inprocess.rank_assignment import ActivateAllRanks, RankAssignment, RankFilter, ShiftRanks
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.terminate import Terminate
from unbroken.nvrx.inprocess.abort import AbortTorchDistributed
from unbroken.nvrx.inprocess.health_check import checks_of_this_worker
from unbroken.nvrx.inprocess.patience import LONGEST_PAUSE_S, PatientInitialize
from unbroken.nvrx.inprocess.store import StoreMixin, TCPStore

__all__ = ["CallWrapper", "Wrapper"]

logger = logging.getLogger("nvrx")
"""The extension's name for it: its users' tools look for these lines."""

_ABORT = AbortTorchDistributed()
_ASSIGNMENT = Compose(ActivateAllRanks(), ShiftRanks())
_NO_LIMIT = 2**31 - 1
_MAX_TEXT = 2000
_PAUSE_OF_SOFT_TIMEOUT = 0.25
"""No pause takes more of the time after which a rank without progress hangs."""


class Wrapper(wrap.Wrapper):
    """Restarts a training function in the same process, with the extension's options and ways.

    Beside those of `unbroken.inprocess.Wrapper`: a script may fail without limit in standalone mode (a RetryController
    sets one), with pauses while `initialize`, or a function that has just begun, keeps raising; a group that exists
    when the call begins is made again in each iteration; the chained health checks run at each restart;
    `monitor_process_pidfile` names this process, since there is no monitor process.
    """

    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _ABORT,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = _ASSIGNMENT,
        rank_filter: RankFilter | None = None,
        monitor_thread_interval: datetime.timedelta = timedelta(seconds=1),
        monitor_process_interval: datetime.timedelta = timedelta(seconds=1),
        heartbeat_interval: datetime.timedelta = timedelta(seconds=1),
        progress_watchdog_interval: datetime.timedelta = timedelta(seconds=1),
        soft_timeout: datetime.timedelta = timedelta(seconds=60),
        hard_timeout: datetime.timedelta = timedelta(seconds=90),
        heartbeat_timeout: datetime.timedelta = timedelta(seconds=30),
        barrier_timeout: datetime.timedelta = timedelta(seconds=120),
        completion_timeout: datetime.timedelta = timedelta(seconds=120),
        last_call_wait: datetime.timedelta = timedelta(seconds=1),
        termination_grace_time: datetime.timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        pidfile = given.pop("monitor_process_pidfile")
        # Of their own kinds: the base class need not know the stores of the extension.
        if not (isinstance(store_factory, type) and issubclass(store_factory, StoreMixin)):
            raise TypeError(f"store_factory: want a subclass of StoreMixin, got {store_factory!r}")
        if not isinstance(rank_assignment, RankAssignment):
            raise TypeError(f"rank_assignment: want RankAssignment, got {rank_assignment!r}")
        if pidfile is not None and not (isinstance(pidfile, str) and Path(pidfile).is_absolute()):
            raise ValueError(f"monitor_process_pidfile: want an absolute path, got {pidfile!r}")
        super().__init__(**given)
        for name, value in given.items():
            setattr(self, name, value)
        self.store_kwargs = {} if store_kwargs is None else store_kwargs
        self.monitor_process_pidfile = pidfile
        parts = [*([] if health_check is None else _parts(health_check)), *checks_of_this_worker()]
        self.restart_health_check: HealthCheck | None = Compose(*parts) if parts else None
        self._extend_options()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapped function."""
        wrapped = super().__call__(fn)
        if wrapped is fn or self.monitor_process_pidfile is None:
            return wrapped
        pidfile = self.monitor_process_pidfile

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            _write_pid(pidfile)
            return wrapped(*args, **kwargs)

        return call

    def _extend_options(self) -> None:
        pause_s = min(LONGEST_PAUSE_S, self.options.soft_timeout.total_seconds() * _PAUSE_OF_SOFT_TIMEOUT)
        initialize = PatientInitialize(self.options.initialize, pause_s)
        says_stop, says_restart = _SayStop(initialize), _SayRestart()
        finalize, checks = self.options.finalize, self.restart_health_check
        at_end = Compose(says_restart) if checks is None else Compose(says_restart, *_parts(checks))
        self.options = self.options.extended(
            initialize=initialize,
            finalize=Compose(says_stop) if finalize is None else Compose(finalize, says_stop),
            restart_health_check=at_end,
            takes_group=True,
            no_progress_limit=_NO_LIMIT,
        )


def _parts(check: HealthCheck) -> tuple[Any, ...]:
    return check.instances if isinstance(check, Composition) else (check,)


def _write_pid(pidfile: str) -> None:
    path = pidfile.replace("{rank}", os.environ.get("RANK", "0"))
    try:
        Path(path).write_text(str(os.getpid()))
    except OSError as error:
        logger.error("Failed to write PID file %s: %s", path, error)


class _SayStop(Finalize):
    """Says what ended the function here."""

    def __init__(self, patience: PatientInitialize) -> None:
        self._patience = patience

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log it in the extension's words."""
        self._patience.note_end(state)
        error = state.fn_exception
        if error is not None:
            logger.error("rank=%s fn_ex: %s", state.rank, repr(error)[:_MAX_TEXT])
        logger.warning("rank=%s term_ex: RankShouldRestart()", state.rank)
        return state


class _SayRestart(HealthCheck):
    """Says that this worker goes on. It is no check, and no metric shows it."""

    has_checked = False

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log it in the extension's words."""
        logger.info("rank=%s restart_ex: HealthCheckPassed() iteration=%s", state.rank, state.iteration)
        return state
