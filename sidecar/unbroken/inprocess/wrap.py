"""The decorator that users see."""

import datetime
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

from unbroken.inprocess.abort import Abort, AbortTorchDistributed
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.finalize import Finalize
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.loop import entry
from unbroken.inprocess.loop.call import WrappedCall, current_call
from unbroken.inprocess.loop.call_wrapper import CallWrapper
from unbroken.inprocess.loop.early_group import take_early_group
from unbroken.inprocess.loop.parameters import bind_by_annotation
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.rank_assignment import RankAssignment, RankFilter
from unbroken.inprocess.standalone.hosting import Hosting
from unbroken.inprocess.terminate import Terminate

_ABORT = AbortTorchDistributed()


class Wrapper:
    """Restarts a training function in the same process, on all workers of the job, after a fault of any of them.

    `@Wrapper()` on a function, or `Wrapper(...)(function)`. The call returns the function's value once it has returned
    on all active workers; a spare returns None. Durations are timedeltas.

    Args:
        store_factory, store_kwargs: accepted and without effect: no store is polled; the agent pushes.
        initialize: runs at the start of every iteration.
        abort: frees a blocked main thread; None leaves it blocked.
        finalize: runs after the function was left.
        health_check: runs at the start of every iteration and after `finalize`.
        rank_assignment, rank_filter: sent to the job's coordinator, which assigns ranks by them, within the job's
            spec; the same on all workers, or the job fails with the words of both. Of classes of one's own one worker
            evaluates it for each plan. FilterCountGroupedByKey is refused: the error names the replacement.
        monitor_thread_interval, monitor_process_interval, heartbeat_interval: accepted and without effect: push.
        progress_watchdog_interval: longest time between two automatic stamps of progress.
        soft_timeout, hard_timeout, heartbeat_timeout, last_call_wait, termination_grace_time: the job's `timeouts`
            decide; a value of one's own is warned about. soft_timeout also bounds the interval of the stamps.
        barrier_timeout: how long the agent may be away while this worker waits for a plan or for the others.
        completion_timeout: the same after the function has returned here.
        monitor_process_logfile: accepted and without effect: there is no monitor process.
        enabled: False returns the function as it is.
        completion: runs when the job is done.
        terminate: runs when this worker leaves for good.

    Raises TypeError and ValueError that name the option.
    """

    def __init__(
        self,
        *positional: NoReturn,
        store_factory: type | None = None,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _ABORT,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment | None = None,
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
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "positional")}
        if positional:
            raise TypeError(
                "Wrapper: must be written with parentheses (@unbroken.inprocess.Wrapper()) and takes options by name "
                f"only, got {getattr(positional[0], '__name__', positional[0])!r}"
            )
        self.options = WrapperOptions(**given)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapped function. Raises TypeError for a generator or coroutine function."""
        if not callable(fn):
            raise TypeError(f"wrapped function: want a function, got {fn!r} of type {type(fn).__name__}")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(f"wrapped function: want one that runs when it is called, got {fn!r}")
        if not self.options.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return _call(self.options, fn, args, kwargs)

        return wrapped


def _call(options: WrapperOptions, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    outer = current_call()
    if outer is not None:
        return outer.run_inside(options, _bind(fn, args, kwargs, outer))
    entry.refuse_other_threads()
    group = take_early_group() if options.takes_group else None
    entry.refuse_a_group()
    hosting = Hosting(options, os.environ)
    call: WrappedCall | None = None
    try:
        call = WrappedCall(options, hosting.place)
        function = _bind(fn, args, kwargs, call)
        if group is not None:
            function = functools.partial(group.call_with_group, function)
        call.open()
        return call.run(function)
    finally:
        if call is not None:
            call.close()
        hosting.close(None if call is None else call.num_workers)


def _bind(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], call: WrappedCall
) -> Callable[[], Any]:
    bound_args, bound_kwargs = bind_by_annotation(fn, args, kwargs, CallWrapper, call.wrapper())
    return functools.partial(fn, *bound_args, **bound_kwargs)
