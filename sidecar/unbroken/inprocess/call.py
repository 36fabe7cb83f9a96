"""One call of a wrapped function: the loop of iterations.

    READY ──Enter──> RUNNING ──returns──> COMPLETED ──Release──> value
      ^ │              │ │                    │
      │ └─Enter(spare)─┘ └─raises─> STOPPING  │Leave
      │                                │Leave │
      └──── abort, finalize, health check <───┘

The main thread runs this loop. Two threads help: the link's, which reads orders and stamps progress, and a monitor,
which ends a running function (abort, then the gate's interruption).
"""

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from unbroken.inprocess import failure
from unbroken.inprocess.abort import free_sockets
from unbroken.inprocess.endpoint import Endpoint
from unbroken.inprocess.env_store import interruptible_env
from unbroken.inprocess.environment import Place, export
from unbroken.inprocess.exception import HealthCheckError, InternalError, RestartAbort
from unbroken.inprocess.gate import Gate, Outcome, RankShouldRestart
from unbroken.inprocess.groups import Undertaker, current_groups, take_groups
from unbroken.inprocess.link import Link, Orders
from unbroken.inprocess.names import stop_reverse_lookups
from unbroken.inprocess.options import Options
from unbroken.inprocess.progress import Progress
from unbroken.inprocess.sockets import release_connections
from unbroken.inprocess.state import FrozenState, Mode, State
from unbroken_core.messages import PROTOCOL, Attach, Enter, Fault, Release, WorkerReport
from unbroken_core.reasons import Cause, JobPhase, WorkerPhase

logger = logging.getLogger(__name__)

MAX_COLLECTIONS = 3
GOODBYE_S = 5.0
ATOMIC_POLL_S = 0.05

_live: "weakref.WeakSet[CallWrapper]" = weakref.WeakSet()
_kept_store: list[Any] = []
"""The iteration's store, where this worker serves it. It lives until the next plan, when all ranks have left: a client
that finds no server tries again for long. After the last iteration it outlives the call: others may shut down late."""


def _forget_all() -> None:
    for call in list(_live):
        call.forget()


os.register_at_fork(after_in_child=_forget_all)


class CallWrapper:
    """What the wrapped function may ask for: annotate a parameter with this class.

    Belongs to one call, and to the main thread of the process that made it; in a forked child it does nothing.
    """

    def __init__(self, options: Options, place: Place) -> None:
        """Raises ValueError when torch.distributed is initialised already, RestartError when the call cannot start."""
        if threading.current_thread() is not threading.main_thread():
            raise InternalError(
                f"wrapped function: want a call in the main thread, got one in {threading.current_thread().name}"
            )
        if _live:
            raise InternalError("wrapped function: want one call at a time, got one inside another")
        self._options = options
        self._place = place
        self._gate = Gate()
        self._progress = Progress(place.local_rank, place.incarnation)
        attach = Attach(PROTOCOL, "worker", os.getpid(), place.local_rank, place.incarnation)
        self._link = Link(place.folder, attach, self._progress, options.beat_s)
        self._undertaker = Undertaker()
        self._endpoint: Endpoint | None = None
        self._state: State | None = None
        self._iteration = -1
        self._is_pinged = False
        self._abort_lock = threading.Lock()
        self._aborted_iteration = -1
        self._to_stop: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._monitor = threading.Thread(target=self._watch, name="unbroken-monitor", daemon=True)
        self._does_freeze = False
        self._old: list[Any] = []
        """Groups and stores of the last iteration, until they are destroyed in the background."""
        self._is_garbage_left = False

    # ------------------------------------------------------------------------------------------ for the function

    @property
    def iteration(self) -> int:
        """Number of this run of the function, from 0; -1 before the first."""
        return self._iteration

    @property
    def state(self) -> FrozenState:
        """This worker as of now."""
        return self._current_state().freeze()

    def ping(self, step: int | None = None) -> None:
        """Say that training moves on. From the first ping in an iteration on, silence counts as a hang.

        `step` is the number of the step that was finished; the job shows the highest.
        """
        if self._progress.ping(step):
            self._is_pinged = True
            self._link.report(WorkerReport(WorkerPhase.RUNNING, self._iteration, has_progress=True))

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function is not interrupted; it may be nested.

        An interruption waits for its end; once one has begun, entering raises RankShouldRestart.
        """
        return self._gate.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Hold off soft and hard timeout on this worker, for a long step that says nothing."""
        self._progress.set_protection(is_on=False)
        try:
            yield
        finally:
            self._progress.set_protection(is_on=True)

    # ------------------------------------------------------------------------------------------ life of the call

    def open(self) -> None:
        """Start the threads. Raises ValueError when torch.distributed is initialised already."""
        import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

        if not dist.is_available():
            raise ValueError("torch.distributed: want a torch that was built with it")
        if dist.is_initialized():
            raise ValueError(
                "torch.distributed: want it not initialised when the wrapped function is called; "
                "call init_process_group inside of the function"
            )
        stop_reverse_lookups()
        self._gate.install()
        self._freeze_garbage()
        _live.add(self)
        self._monitor.start()
        self._link.start(self._on_leave)

    def close(self) -> None:
        """End the threads and give everything back; harmless when repeated."""
        _live.discard(self)
        self._progress.detach()
        if self._monitor.is_alive():
            self._to_stop.put(None)
            self._monitor.join(GOODBYE_S)
        self._link.close()
        self._gate.uninstall()
        if self._endpoint is not None:
            self._endpoint.close()
        old, self._old = self._old, []
        self._undertaker.bury(old)
        self._undertaker.join(GOODBYE_S)
        release_connections()
        if self._does_freeze:
            gc.unfreeze()

    def forget(self) -> None:
        """Leave the parent's sockets and stamps alone in a forked child."""
        _live.discard(self)
        self._gate.forget()
        self._progress.forget()
        self._link.forget()
        if self._endpoint is not None:
            self._endpoint.close()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the function until the job releases this worker; return its value, None for a spare."""
        while True:
            enter = self._await_plan()
            if isinstance(enter, Release):
                return self._finish(enter, None)
            self._begin(enter)
            outcome = self._run_iteration(function)
            release = self._settle(outcome)
            if release is not None:
                return self._finish(release, outcome.value)
            self._recover(outcome.error)
            del outcome

    # ------------------------------------------------------------------------------------------ one iteration

    def _await_plan(self) -> Enter | Release:
        """Say READY and return the next plan with a rank for this worker, or the end of the job."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self._place.pod_address)
        self._report(WorkerPhase.READY)
        self._collect_garbage()
        while True:
            entered = self._iteration

            def is_news(orders: Orders, entered: int = entered) -> bool:
                return orders.release is not None or (orders.enter is not None and orders.enter.iteration > entered)

            orders = self._link.wait(is_news, self._options.barrier_timeout.total_seconds(), "next plan")
            if orders.release is not None:
                return orders.release
            enter = orders.enter
            if enter is None:
                raise InternalError("orders: want a plan or a release, got neither")
            self._iteration = enter.iteration
            if enter.rank is not None and not orders.has_left(enter.iteration):
                return enter
            if enter.rank is None:
                self._set_state(enter)
            self._report(WorkerPhase.READY)

    def _begin(self, enter: Enter) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            raise InternalError("endpoint: want one that was bound before READY, got none")
        # There is a plan: all ranks have left the former iteration.
        release_connections()
        self._undertaker.bury(_kept_store[:])
        _kept_store.clear()
        self._set_state(enter)
        export(self._place, enter)
        if (endpoint.host, endpoint.port) == (enter.master_host, enter.master_port):
            _kept_store[:] = [endpoint.serve()]
        endpoint.close()
        self._endpoint = None

    def _set_state(self, enter: Enter) -> None:
        first = self._state
        size = enter.world_size + enter.spare_ranks
        rank = enter.world_size if enter.rank is None else enter.rank
        self._state = State(
            rank=rank,
            world_size=size,
            active_rank=enter.rank,
            active_world_size=enter.world_size,
            initial_rank=rank if first is None else first.initial_rank,
            initial_world_size=size if first is None else first.initial_world_size,
            iteration=enter.iteration,
            mode=Mode.INACTIVE if enter.rank is None else Mode.ACTIVE,
        )

    def _run_iteration(self, function: Callable[[], Any]) -> Outcome:
        options, state = self._options, self._current_state()

        def body() -> Any:
            if options.initialize is not None:
                options.initialize(state.freeze())
            if options.health_check is not None:
                options.health_check(state.freeze())
            return function()

        self._gate.reset()
        self._is_pinged = False
        self._report(WorkerPhase.RUNNING)
        self._progress.begin(self._iteration)
        if self._link.orders.has_left(self._iteration):
            self._gate.leave("the iteration was over before it began")
            outcome = Outcome(error=RankShouldRestart("the iteration was over before it began"))
        else:
            with interruptible_env():
                outcome = self._gate.run(body)
        self._progress.end()
        return outcome

    def _settle(self, outcome: Outcome) -> Release | None:
        """Wait until the iteration is over for everyone; return the release when the job is, too."""
        error = outcome.error
        if error is not None and not isinstance(error, (Exception, RankShouldRestart)):
            self._leave_for_good(error, Cause.BASE_EXCEPTION)
            raise error
        iteration = self._iteration
        if not self._gate.is_leaving:
            self._tell(error)
        wait_s = self._options.completion_timeout if error is None else self._options.barrier_timeout
        orders = self._link.wait(
            lambda orders: orders.has_left(iteration) or orders.release is not None,
            wait_s.total_seconds(),
            "end of the iteration",
        )
        if orders.release is not None and not orders.has_left(iteration):
            return orders.release
        self._abort_once()
        return None

    def _tell(self, error: BaseException | None) -> None:
        if error is None:
            self._report(WorkerPhase.COMPLETED)
            return
        self._current_state().fn_exception = error
        self._report(WorkerPhase.STOPPING, fault=failure.fault_of(error, Cause.EXCEPTION, self._iteration))
        logger.error(
            "function raised: iteration=%d rank=%s", self._iteration, self._current_state().rank, exc_info=error
        )

    def _recover(self, error: BaseException | None) -> None:
        """Bring the process into a state in which the function may start again."""
        options, state = self._options, self._current_state()
        self._old += take_groups()
        try:
            if options.finalize is not None:
                options.finalize(state.freeze())
        except BaseException as finalize_error:
            self._leave_for_good(finalize_error, Cause.BASE_EXCEPTION)
            raise finalize_error from error
        try:
            if options.health_check is not None:
                options.health_check(state.freeze())
        except Exception as health_error:
            self._leave_for_good(health_error, Cause.UNHEALTHY)
            raise HealthCheckError(failure.describe(health_error)) from health_error
        state.fn_exception = None
        failure.drop(error)
        self._is_garbage_left = True

    def _finish(self, release: Release, value: Any) -> Any:
        state = self._current_state() if self._state is not None else State.from_env()
        if release.outcome is not JobPhase.COMPLETE:
            abort = RestartAbort(f"the job has failed: {release.message}")
            self._terminate(state, abort)
            raise abort
        if self._options.completion is not None:
            try:
                self._options.completion(state.freeze())
            except Exception as error:
                logger.error("completion raised: iteration=%d", self._iteration, exc_info=error)
        return value

    def _leave_for_good(self, error: BaseException, cause: Cause) -> None:
        self._report(WorkerPhase.STOPPING, fault=failure.fault_of(error, cause, self._iteration))
        self._gate.leave("this worker leaves")
        self._abort_once()
        self._old += take_groups()
        self._terminate(self._current_state(), error)

    def _terminate(self, state: State, error: BaseException) -> None:
        state.mode = Mode.TERMINATED
        if self._options.terminate is None:
            return
        try:
            self._options.terminate(state.freeze())
        except Exception as terminate_error:
            raise terminate_error from error

    # ------------------------------------------------------------------------------------------ ending a function

    def _on_leave(self, orders: Orders) -> None:
        """In the link's thread: the function, if it runs, is over."""
        iteration = self._iteration
        if iteration >= 0 and orders.has_left(iteration) and not self._gate.left.is_set():
            leave = orders.leave
            culprit = "" if leave is None else f"{leave.cause} on rank {leave.rank}: {leave.detail}"
            self._gate.leave(f"iteration {iteration} is over: {culprit}")
            self._progress.stop_main()
            self._to_stop.put(iteration)

    def _watch(self) -> None:
        """In the monitor's thread: end the function when told to."""
        while (iteration := self._to_stop.get()) is not None:
            self._stop_function(iteration)

    def _stop_function(self, iteration: int) -> None:
        gate = self._gate
        while not gate.atomic_lock.acquire(timeout=ATOMIC_POLL_S):
            if gate.left.is_set():
                return
        try:
            # The main thread may have left by itself meanwhile, and be on its way to the next iteration.
            if self._iteration == iteration and not gate.left.is_set():
                self._abort_once()
                gate.force_out(self._free_again)
        finally:
            gate.atomic_lock.release()

    def _free_again(self) -> None:
        # Under the lock that the main thread takes on its way out: the next iteration's sockets are not to be touched.
        with self._abort_lock:
            if self._options.abort is not None and not self._gate.left.is_set():
                free_sockets()

    def _abort_once(self) -> None:
        """Free what is blocked in a communicator, once an iteration; whoever comes second waits for the first."""
        with self._abort_lock:
            if self._aborted_iteration == self._iteration:
                return
            self._aborted_iteration = self._iteration
            self._old += current_groups()
            if self._options.abort is None:
                return
            try:
                self._options.abort(self._current_state().freeze().without_exception())
            except Exception as error:
                logger.error("abort raised: iteration=%d", self._iteration, exc_info=error)

    # ------------------------------------------------------------------------------------------ small things

    def _report(self, phase: WorkerPhase, fault: Fault | None = None) -> None:
        endpoint = self._endpoint if phase is WorkerPhase.READY else None
        self._link.report(
            WorkerReport(
                phase=phase,
                iteration=self._iteration,
                host="" if endpoint is None else endpoint.host,
                port=0 if endpoint is None else endpoint.port,
                fault=fault,
                has_progress=self._is_pinged,
            )
        )

    def _current_state(self) -> State:
        if self._state is None:
            raise InternalError("state: want one from the first plan, got none")
        return self._state

    def _freeze_garbage(self) -> None:
        """Spare every later collection the objects that exist before the function first runs (70 ms with torch).

        Only once: what a later iteration leaves behind must stay collectable.
        """
        if gc.isenabled() and gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._does_freeze = True

    def _collect_garbage(self) -> None:
        """Free what the last iteration left in cycles, then let its groups go. Others get ready meanwhile."""
        if not self._is_garbage_left:
            return
        self._is_garbage_left = False
        sys.last_value = sys.last_traceback = None  # an interactive user's copies pin everything
        for _ in range(MAX_COLLECTIONS):
            if not gc.collect():
                break
        old, self._old = self._old, []
        self._undertaker.bury(old)
