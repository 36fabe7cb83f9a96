"""One call of a wrapped function: the loop of iterations.

    READY ──Enter──> RUNNING ──returns──> COMPLETED ──Release──> value
      ^ │              │ │                    │
      │ └─Enter(spare)─┘ └─raises─> STOPPING  │Leave
      │                                │Leave │
      └──── abort, finalize, health check <───┘

The main thread runs this loop. Two threads help: the link's, which reads orders and stamps progress, and the
interrupter's, which ends a running function (abort, then the gate's interruption). A wrapped function that is called
inside another one joins the outer call: both share the iteration, and a fault in it restarts the outer function.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unbroken.inprocess.assignment.evaluation import answer as answer_question
from unbroken.inprocess.assignment.policy import ask, first_state
from unbroken.inprocess.connections.env_store import interruptible_env
from unbroken.inprocess.connections.reverse_lookups import stop_reverse_lookups
from unbroken.inprocess.connections.sockets import release_connections
from unbroken.inprocess.exception import HealthCheckError, InternalError, RestartAbort, StaleStateError
from unbroken.inprocess.interruption import failure
from unbroken.inprocess.interruption.gate import FunctionOutcome, Gate, RankShouldRestart
from unbroken.inprocess.interruption.interrupter import Interrupter
from unbroken.inprocess.interruption.main_thread import has_device, is_waiting, main_thread
from unbroken.inprocess.interruption.rehearsal import rehearse
from unbroken.inprocess.interruption.slow_plugin import POLICY_WAITS, named_when_slow
from unbroken.inprocess.interruption.stacks import StackSignal, is_hang, log_hang
from unbroken.inprocess.loop import entry
from unbroken.inprocess.loop.call_wrapper import CallWrapper
from unbroken.inprocess.loop.inner_calls import InnerCalls, InnerFault
from unbroken.inprocess.loop.plan_state import state_in
from unbroken.inprocess.loop.plugins import Plugins
from unbroken.inprocess.loop.repeated_error import RepeatedError
from unbroken.inprocess.loop.step_hold import StepHold
from unbroken.inprocess.loop.store_offer import StoreOffer
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.pod.busy_time import BusyTime
from unbroken.inprocess.pod.environment import PodContext, export, survive_nccl_errors
from unbroken.inprocess.pod.link import AgentLink, AgentOrders
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken.inprocess.state import FrozenState, Mode, State
from unbroken.inprocess.torch_state import group_states
from unbroken.inprocess.torch_state.groups import take_groups
from unbroken.inprocess.torch_state.leftovers import Leftovers
from unbroken.inprocess.torch_state.renewal import RankLayout, TorchState
from unbroken_core.pod.pod_messages import Attach, Enter, Release, WorkerReport
from unbroken_core.protocol.messages import PROTOCOL, Answer, Fault, Question
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

if TYPE_CHECKING:
    from unbroken.inprocess.faults.port import FaultPort

logger = logging.getLogger(__name__)

_live: "weakref.WeakSet[WrappedCall]" = weakref.WeakSet()


def _forget_all() -> None:
    for call in list(_live):
        call.forget()


os.register_at_fork(after_in_child=_forget_all)


def current_call() -> "WrappedCall | None":
    """Return the call whose function the main thread of this process runs; None outside."""
    return next((call for call in _live if call.is_in_function), None)


class WrappedCall:
    """Belongs to one call, and to the main thread of the process that made it; in a forked child it does nothing."""

    def __init__(self, options: WrapperOptions, place: PodContext) -> None:
        """Raises ValueError when torch.distributed is initialised already, RestartError when the call cannot start."""
        entry.refuse_other_threads()
        if _live:
            raise InternalError("wrapped function: cannot be called from a plug-in")
        self._options = options
        self._place = place
        self._gate = Gate()
        self._progress = ProgressSlot(place.local_rank, place.incarnation, BusyTime(is_waiting, has_device))
        self._stack_signal = StackSignal(place.folder, place.local_rank)
        number = self._stack_signal.number
        attach = Attach(PROTOCOL, "worker", os.getpid(), place.local_rank, place.incarnation, number)
        asked = ask(options.rank_assignment, options.rank_filter, first_state(os.environ, place))
        self._link = AgentLink(
            place.folder, attach, self._progress, options.beat_s, policy=asked.policy, keys=asked.keys
        )
        self._step_hold = StepHold(self._progress, self._link.answer)
        self._leftovers = Leftovers()
        self._torch_state = TorchState()
        self._plugins = Plugins(options)
        self._inner_calls = InnerCalls(self._plugins, self._report_inner_fault)
        self._interrupter = Interrupter(
            self._gate, self._leftovers, self, self._plugins.aborts, self._plugins.patience_s
        )
        self._store = StoreOffer(place.pod_address, self._leftovers)
        self._faults = self._fault_port() if place.allows_faults else None
        self._state: State | None = None
        self._iteration = -1
        self._window_s = 0.0
        self._answered: Question | None = None
        self._is_pinged = False
        self._is_in_function = False
        self._raised = RepeatedError()
        self._has_exited = False
        """Whether the function was left by `sys.exit(0)`."""
        self._has_told_swallowed = False
        self._is_practised = False
        """Whether this worker has run an iteration, or rehearsed one."""
        self._has_run = False
        """Whether this worker has run an iteration."""

    # ------------------------------------------------------------------------------------------ for others

    @property
    def iteration(self) -> int:
        """Number of this run of the function, from 0; -1 before the first."""
        return self._iteration

    @property
    def state(self) -> FrozenState:
        """The present state of this worker."""
        return self._current_state().freeze()

    @property
    def num_workers(self) -> int | None:
        """Number of workers in the last plan, spares included; None before the first."""
        return None if self._state is None else self._state.world_size

    @property
    def is_in_function(self) -> bool:
        """Whether the main thread is inside the function, and not in a plug-in around it."""
        return self._is_in_function

    @property
    def is_pinged(self) -> bool:
        """Whether the function has called `ping` in this iteration."""
        return self._is_pinged

    @property
    def active_rank(self) -> int | None:
        """Rank of this worker; None for a spare, and before the first plan."""
        return None if self._state is None else self._state.active_rank

    def wrapper(self) -> CallWrapper:
        """Return what the function may ask for."""
        at_step = None if self._faults is None else self._faults.at_step
        on_first_ping = self._note_first_ping
        return CallWrapper(
            self, self._gate, self._progress, self._step_hold, on_first_ping=on_first_ping, at_step=at_step
        )

    def _fault_port(self) -> "FaultPort":
        from unbroken.inprocess.faults.port import FaultPort  # noqa: PLC0415 - most jobs allow no faults

        return FaultPort(self._place, self, self._gate, self._progress)

    # ------------------------------------------------------------------------------------------ life of the call

    def open(self) -> None:
        """Start the threads.

        Raises ValueError when torch.distributed is initialised already, RestartError after the end of the job.
        """
        entry.refuse_a_group()
        entry.refuse_after_the_end()
        stop_reverse_lookups()
        survive_nccl_errors()
        self._gate.install()
        self._leftovers.freeze()
        _live.add(self)
        self._interrupter.start()
        self._link.start(self._on_leave, self._on_look)
        if self._faults is not None:
            self._faults.open()

    def close(self) -> None:
        """End the threads and release everything; harmless when repeated."""
        _live.discard(self)
        if self._faults is not None:
            self._faults.close()
        self._progress.detach()
        self._interrupter.close()
        self._link.close()
        self._gate.uninstall()
        self._stack_signal.close()
        self._store.drop()
        self._leftovers.close()
        release_connections()

    def forget(self) -> None:
        """Leave the parent's sockets and stamps alone in a forked child."""
        _live.discard(self)
        self._gate.forget()
        if self._faults is not None:
            self._faults.forget()
        self._progress.forget()
        self._link.forget()
        self._store.forget()

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
                value = self._finish(release, outcome.value)
                if self._has_exited:
                    sys.exit(0)
                return value
            self._recover(outcome.error)
            del outcome

    def run_inside(self, options: WrapperOptions, function: Callable[[], Any]) -> Any:
        """Run a function that was wrapped with these options inside this call's function; return its value.

        Its exceptions and interruptions restart the outermost function.
        """
        return self._inner_calls.run(options, lambda: self.state, function)

    # ------------------------------------------------------------------------------------------ one iteration

    def _await_plan(self) -> Enter | Release:
        """Report READY and return the next plan with a rank for this worker, or the end of the job."""
        self._store.make()
        self._report(WorkerPhase.READY)
        # Others get ready meanwhile.
        if self._leftovers.collect():
            self._torch_state.look_for_left_over()
        # While the job forms or a pod joins it there is time; for a restarted process the others wait.
        self._practise(has_time=self._place.incarnation == 0)
        if self._state is not None and self._state.active_rank == 0:
            # It will most likely be rank 0 again: all others wait for its store.
            self._store.serve_early()
        while True:
            entered = self._iteration

            def is_news(orders: AgentOrders, entered: int = entered) -> bool:
                is_asked = orders.question is not None and orders.question != self._answered
                is_entered = orders.enter is not None and orders.enter.iteration > entered
                return orders.release is not None or is_entered or is_asked

            orders = self._link.wait(is_news, self._options.barrier_timeout.total_seconds(), "next plan")
            if orders.release is not None:
                return orders.release
            enter = orders.enter
            if enter is None or enter.iteration <= entered:
                self._answer(orders.question)
                continue
            self._iteration = enter.iteration
            if enter.rank is not None and not orders.has_left(enter.iteration):
                return enter
            if enter.rank is None:
                self._state = state_in(enter, self._state)
            else:
                self._store.renew()
            self._report(WorkerPhase.READY)
            self._practise(has_time=enter.rank is None)

    def _practise(self, has_time: bool) -> None:
        """Rehearse the first recovery, once."""
        if has_time and not self._is_practised:
            self._is_practised = True
            # Now, while no other rank waits.
            self._leftovers.destroy(rehearse(), after_s=0.0)

    def _answer(self, question: Question | None) -> None:
        """Let the script's policy answer who shall be which rank."""
        if question is None:
            raise InternalError("orders: want a plan, a question or a release, got none")
        self._answered = question
        options = self._options
        with named_when_slow("rank_assignment", self._iteration, self._plugins.patience_s, POLICY_WAITS):
            found = answer_question(options.rank_assignment, options.rank_filter, question)
        self._report(WorkerPhase.READY, answer=found)

    def _begin(self, enter: Enter) -> None:
        self._is_practised = True
        self._state = state_in(enter, self._state)
        self._window_s = enter.window_s
        export(self._place, enter)
        self._store.enter(enter.master_host, enter.master_port)
        release_connections()

    def _run_iteration(self, function: Callable[[], Any]) -> FunctionOutcome:
        def body() -> Any:
            # The gate is open: an interruption now ends the function; an earlier one is seen here.
            self._refuse_what_is_over()
            self._torch_state.take(RankLayout(self.state.active_rank, self.state.active_world_size))
            self._plugins.prepare(self.state)
            if self._plugins.health.is_news:
                # Other results go with later reports: this is for the first, and after a failure.
                self._report(WorkerPhase.RUNNING)
            self._is_in_function = True
            return function()

        self._gate.reset()
        self._inner_calls.begin_iteration()
        group_states.begin_iteration()
        self._is_pinged = False
        self._step_hold.begin(self._iteration)
        self._progress.hold()
        # The agent counts a worker as RUNNING once it has ordered it to enter, but watches a new process only from its
        # report on.
        self._report(WorkerPhase.RUNNING, may_wait=self._has_run)
        self._has_run = True
        self._progress.begin(self._iteration, self._window_s)
        with interruptible_env(), self._torch_state.watched(self._iteration):
            outcome = self._gate.run(body)
        self._is_in_function = False
        self._step_hold.end()
        self._progress.end()
        self._tell_swallowed()
        self._has_exited = isinstance(outcome.error, SystemExit) and outcome.error.code in (None, 0)
        if self._has_exited:
            # An early stop: the script wants no more of this, and calls it a success.
            return FunctionOutcome()
        return FunctionOutcome(error=outcome.error.__cause__) if isinstance(outcome.error, InnerFault) else outcome

    def _tell_swallowed(self) -> None:
        """Say once that the script keeps what it should let pass: it cost time, and may have trained on meanwhile."""
        where = self._gate.swallowed_at
        if where and not self._has_told_swallowed:
            self._has_told_swallowed = True
            logger.warning(
                "a handler swallowed RankShouldRestart, and the function was interrupted again: let it pass, as "
                "`except Exception` does where=%s",
                where,
            )

    def _refuse_what_is_over(self) -> None:
        if self._link.orders.has_left(self._iteration):
            reason = "the iteration was over before it began"
            self._gate.leave(reason)
            raise RankShouldRestart(reason)

    def _settle(self, outcome: FunctionOutcome) -> Release | None:
        """Wait until the iteration is over for everyone; return the release when the job is, too."""
        error = outcome.error
        if self._torch_state.problem and not isinstance(error, StaleStateError):
            # The script has swallowed it.
            error = StaleStateError(self._torch_state.problem)
        if isinstance(error, StaleStateError):
            self._leave_for_good(error, Cause.STALE_STATE)
            raise error
        if error is not None and not isinstance(error, (Exception, RankShouldRestart)):
            self._leave_for_good(error, Cause.BASE_EXCEPTION)
            raise error
        iteration = self._iteration
        if not self._gate.is_leaving:
            self._report_end(error)
        wait_s = self._options.completion_timeout if error is None else self._options.barrier_timeout
        orders = self._link.wait(
            lambda orders: orders.has_left(iteration) or orders.release is not None,
            wait_s.total_seconds(),
            "end of the iteration",
        )
        if orders.release is not None and not orders.has_left(iteration):
            return orders.release
        self._interrupter.abort_once(self._iteration)
        return None

    def _note_first_ping(self) -> None:
        self._is_pinged = True
        self._report(WorkerPhase.RUNNING)

    def _report_inner_fault(self, error: BaseException) -> None:
        if not self._gate.is_leaving:
            self._report_end(error)

    def _report_end(self, error: BaseException | None) -> None:
        if error is None:
            self._report(WorkerPhase.COMPLETED)
            return
        if self._current_state().fn_exception is error:
            # An inner wrapped function has reported it.
            return
        self._current_state().fn_exception = error
        self._report(WorkerPhase.STOPPING, fault=failure.fault_of(error, Cause.EXCEPTION, self._iteration))
        self._raised.log(error, self._iteration, self._current_state().rank)

    def _recover(self, error: BaseException | None) -> None:
        """Prepare the process for another run of the function."""
        state = self._current_state()
        self._leftovers.keep(take_groups())
        try:
            self._plugins.finalize(state.freeze())
        except BaseException as finalize_error:
            self._leave_for_good(finalize_error, Cause.BASE_EXCEPTION)
            raise finalize_error from error
        try:
            self._plugins.check_health(state.freeze())
        except Exception as health_error:
            self._leave_for_good(health_error, Cause.UNHEALTHY)
            raise HealthCheckError(failure.describe(health_error)) from health_error
        self._leftovers.keep(self._torch_state.empty())
        state.fn_exception = None
        failure.drop(error)
        self._leftovers.expect_garbage()

    def _finish(self, release: Release, value: Any) -> Any:
        entry.note_end(release)
        state = self._current_state() if self._state is not None else State.from_env()
        if release.outcome is not JobPhase.COMPLETE:
            abort = RestartAbort(f"the job has failed: {release.message}")
            failure.show_without_frames(abort)
            self._terminate(state, abort)
            raise abort from None
        self._plugins.complete(state.freeze())
        return value

    def _leave_for_good(self, error: BaseException, cause: Cause) -> None:
        self._report(WorkerPhase.STOPPING, fault=failure.fault_of(error, cause, self._iteration))
        self._gate.leave("this worker leaves")
        self._interrupter.abort_once(self._iteration)
        self._leftovers.keep(take_groups())
        self._terminate(self._current_state(), error)

    def _terminate(self, state: State, error: BaseException) -> None:
        state.mode = Mode.TERMINATED
        self._plugins.terminate(state.freeze(), error)

    # ------------------------------------------------------------------------------------------ ending a function

    def _on_look(self, iteration: int) -> None:
        """In the link's thread: say where the main thread stands, if it is in this iteration's function."""
        if iteration == self._iteration and not self._gate.left.is_set():
            self._tell_main_thread(iteration, is_leaving=False)

    def _tell_main_thread(self, iteration: int, *, is_leaving: bool) -> None:
        thread = main_thread(iteration, is_leaving=is_leaving)
        if thread is not None:
            self._link.tell(thread)

    def _on_leave(self, orders: AgentOrders) -> None:
        """In the link's thread: end the function, if it runs, or let it halt after a step."""
        iteration = self._iteration
        if orders.halt is not None:
            self._step_hold.obey(orders.halt)
        if iteration >= 0 and orders.has_left(iteration) and not self._gate.left.is_set():
            leave = orders.leave
            if is_hang(leave, iteration):
                # Before anything is freed: where it stands now tells who waited for whom.
                self._tell_main_thread(iteration, is_leaving=True)
            log_hang(leave, iteration)
            culprit = "" if leave is None else f"{leave.cause} on rank {leave.rank}: {leave.detail}"
            self._gate.leave(f"iteration {iteration} is over: {culprit}")
            self._progress.stop_main()
            self._interrupter.stop(iteration)

    # ------------------------------------------------------------------------------------------ small things

    def _report(
        self, phase: WorkerPhase, fault: Fault | None = None, answer: Answer | None = None, may_wait: bool = False
    ) -> None:
        endpoint = self._store.endpoint if phase is WorkerPhase.READY else None
        self._link.report(
            WorkerReport(
                phase=phase,
                iteration=self._iteration,
                host="" if endpoint is None else endpoint.host,
                port=0 if endpoint is None else endpoint.port,
                fault=fault,
                # Until it reports RUNNING again, the agent may count this report for the next iteration.
                has_progress=self._is_pinged and phase is not WorkerPhase.READY,
                answer=answer,
                checks=self._plugins.health.tell(),
            ),
            may_wait,
        )

    def _current_state(self) -> State:
        if self._state is None:
            raise InternalError("state: want one from the first plan, got none")
        return self._state
