"""Orders to launcher and workers: each once per connection, and again on the next one. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from unbroken.agent.decisions import torchrun_environment
from unbroken.agent.decisions.events import Action, SendToLauncher, SendToWorker
from unbroken.agent.decisions.fence import lonely_patience_s
from unbroken.agent.decisions.instructions import Instructions
from unbroken.agent.decisions.place import Incarnation, LauncherOrders, LocalPlace, Looked
from unbroken_core.pod.liveness import ending_limit_s
from unbroken_core.pod.pod_messages import DumpStack, End, Enter, Inspect, Leave, Look, Release, Shutdown, Spawn
from unbroken_core.pod.stacks import where
from unbroken_core.protocol.messages import Fault, Finish, Plan, RankPlan, WorkerState
from unbroken_core.protocol.settings import JobSettings, StragglerMode
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.COMPLETED)


class Orders:
    """Derives orders from what is known of each place, and notes there what was ordered."""

    def __init__(self, settings: JobSettings, places: Sequence[LocalPlace], instructions: Instructions) -> None:
        self._settings = settings
        self._is_in_process = settings.is_in_process
        self._places = places
        self._instructions = instructions
        self._is_shutdown_sent = False
        self.is_draining = False
        """Whether the pod is to end, and its workers may train until their ranks have moved."""

    def forget_launcher(self) -> None:
        """A launcher attached (again): it has no orders yet."""
        self._is_shutdown_sent = False
        for place in self._places:
            place.orders = LauncherOrders()

    def note_hello(self, workers: Sequence[WorkerState]) -> None:
        """Never let a worker enter the plan that this Hello reports outside it.

        The rendezvous takes Hello as final: it may cut the next plan before it answers.
        """
        plan = self._instructions.plan
        if plan is None:
            return
        active = {part.local_rank for part in plan.ranks if part.rank is not None}
        for place, state in zip(self._places, workers, strict=True):
            if place.local_rank in active and state.iteration < plan.iteration:
                place.incarnation = replace(place.incarnation, is_passed_over=True)

    @property
    def shutdown_grace_s(self) -> float:
        """How long workers may take to end by themselves once the job is over, in seconds."""
        timeouts = self._settings.timeouts
        finish = self._instructions.finish
        if finish is not None and finish.outcome is JobPhase.COMPLETE:
            return ending_limit_s(timeouts)
        return timeouts.termination_grace_s

    def issue(
        self,
        workers: Sequence[WorkerState],
        has_launcher: bool,
        is_accepted: bool,
        lost_since_s: float | None,
        now_s: float,
    ) -> list[Action]:
        """Return the orders that are due, and note them as given.

        Without `is_accepted` no worker enters: the others may be in another iteration by now.
        """
        actions: list[Action] = []
        if self._instructions.finish is not None:
            if self._is_in_process and self._instructions.finish.outcome is JobPhase.FAILED:
                # A worker that was interrupted at the same moment leaves now, not at the end of the launcher's grace.
                for place, state in zip(self._places, workers, strict=True):
                    actions += self._guide(place, state, now_s)
            return [*actions, *self._finish(self._instructions.finish, has_launcher)]
        for place, state in zip(self._places, workers, strict=True):
            if self._is_in_process:
                actions += self._guide(place, state, now_s)
            else:
                self._turn(place, state)
            if has_launcher or self._is_in_process:
                actions += self._enter(place, state, is_accepted)
            actions += self._warn(place, lost_since_s, now_s)
            actions += self._halt(place, state)
            actions += self._ask(place)
            actions += self._look(place)
            if has_launcher:
                actions += self._staff(place)
                actions += self._drain(place, state, is_accepted)
        return actions

    # -------------------------------------------------------------------------------------------- leaving and entering

    def _guide(self, place: LocalPlace, state: WorkerState, now_s: float) -> list[Action]:
        """Order a worker out of an iteration that is over; give it up if it does not leave in time."""
        if state.phase not in _INSIDE or state.iteration > self._instructions.over:
            return []
        if _is_given_up(place):
            return []
        patience_s = self._settings.timeouts.hard_s - self._settings.timeouts.soft_s
        incarnation = place.incarnation
        if incarnation.must_be_ready_by_s is None:
            place.incarnation = replace(incarnation, must_be_ready_by_s=now_s + patience_s)
        elif now_s >= incarnation.must_be_ready_by_s:
            detail = f"did not leave iteration {state.iteration} within {patience_s:g} s; its process was ended"
            if incarnation.is_ending:
                # The script cannot leave what it is not in, and nobody ends a process but the launcher.
                detail = "its main thread has ended; the pod's launcher does not say how: stopped, or it cannot end it"
            stack = incarnation.stack if incarnation.stack_asked == state.iteration else ()
            fault = Fault(Cause.HARD_TIMEOUT, state.iteration, detail + where(stack), patience_s, stack)
            place.incarnation = replace(incarnation, must_be_ready_by_s=None, found=fault)
            return []
        if not place.connection.is_open or place.connection.left >= state.iteration:
            return []
        place.connection = replace(place.connection, left=state.iteration)
        return [SendToWorker(place.local_rank, self._leave(state.iteration))]

    def _leave(self, iteration: int) -> Leave:
        interrupt = self._instructions.interrupt
        if interrupt is not None:
            return Leave(iteration, interrupt.cause, interrupt.rank, interrupt.detail)
        newest = self._instructions.over + 1
        return Leave(iteration, Cause.POD_LOST, None, f"the job went on to iteration {newest} without this pod")

    def _turn(self, place: LocalPlace, state: WorkerState) -> None:
        """Prepare a place for its next process once its process in an iteration that is over has ended."""
        process = place.present
        if process is None or process.exit_code is None or place.entered > self._instructions.over:
            return
        number = place.incarnation.number
        if state.phase is WorkerPhase.COMPLETED or place.orders.ended >= number:
            place.advance(number + 1)

    def _enter(self, place: LocalPlace, state: WorkerState, is_accepted: bool) -> list[Action]:
        plan, part = self._instructions.plan, place.incarnation.part
        if plan is None or part is None or not self._instructions.is_plan_in_force:
            return []
        has_entry = self._is_in_process or part.rank is not None
        may_enter = (
            has_entry and is_accepted and self._instructions.is_plan_open and not place.incarnation.is_passed_over
        )
        if may_enter and state.phase is WorkerPhase.READY and state.iteration < plan.iteration:
            entry = _entry(plan, part, self._settings)
            place.incarnation = replace(place.incarnation, entry=entry, activity=None, step=-1)
            place.entered = -1 if self._is_in_process else plan.iteration
        return self._pass_on(place)

    def _warn(self, place: LocalPlace, lost_since_s: float | None, now_s: float) -> list[Action]:
        """Tell a worker since when there is no contact to the rendezvous: once per connection, and at each change."""
        plan, part, connection = self._instructions.plan, place.incarnation.part, place.connection
        if connection.lost_since_s == lost_since_s or not connection.is_open or plan is None or part is None:
            return []
        report = connection.report
        if report is None or report.phase not in _INSIDE or report.iteration != plan.iteration or part.rank is None:
            return []
        place.connection = replace(connection, lost_since_s=lost_since_s)
        lost_s = None if lost_since_s is None else now_s - lost_since_s
        return [SendToWorker(place.local_rank, replace(_entry(plan, part, self._settings), lost_s=lost_s))]

    def _halt(self, place: LocalPlace, state: WorkerState) -> list[Action]:
        """Pass on the newest order to wait after a step, or to go on: once per connection."""
        halt, connection, part = self._instructions.halt, place.connection, place.incarnation.part
        if (
            halt is None
            or connection.halt == halt
            or not connection.is_open
            or halt.iteration <= self._instructions.over
        ):
            return []
        report = connection.report
        is_in = report is not None and report.phase is WorkerPhase.RUNNING and state.iteration == halt.iteration
        if not is_in or part is None or part.rank is None:
            return []
        place.connection = replace(connection, halt=halt)
        return [SendToWorker(place.local_rank, halt)]

    def _ask(self, place: LocalPlace) -> list[Action]:
        """Pass on the question of the rendezvous, once per connection."""
        consult, connection = self._instructions.consult, place.connection
        present = (place.local_rank, place.incarnation.number)
        if consult is None or (consult.local_rank, consult.incarnation) != present:
            return []
        is_waiting = connection.report is not None and connection.report.phase is WorkerPhase.READY
        if not is_waiting or not connection.is_open or connection.asked == consult:
            return []
        place.connection = replace(connection, asked=consult)
        return [SendToWorker(place.local_rank, consult.question)]

    @staticmethod
    def _pass_on(place: LocalPlace) -> list[Action]:
        """Pass the newest order to enter on to the attached worker, once per connection."""
        entry, connection = place.incarnation.entry, place.connection
        report = connection.report
        if entry is None or report is None or not connection.is_open or connection.entered >= entry.iteration:
            return []
        if report.phase is not WorkerPhase.READY or report.iteration >= entry.iteration:
            return []
        # No worker enters without contact to the rendezvous.
        place.connection = replace(connection, entered=entry.iteration, lost_since_s=None)
        return [SendToWorker(place.local_rank, entry)]

    # ------------------------------------------------------------------------------------------------------- processes

    def _staff(self, place: LocalPlace) -> list[Action]:
        """Start and end the processes of one place."""
        process = place.process
        if process is None:
            # The launcher has not reported its processes yet.
            return []
        if place.is_alive:
            return self._inspect(place) + (self._end(place) if self._must_end(place) else self._look_into(place))
        if place.present is not None or place.orders.started >= place.incarnation.number:
            return []
        environment = {} if self._is_in_process else self._environment(place.incarnation)
        if environment is None:
            return []
        place.orders = replace(place.orders, started=place.incarnation.number)
        return [SendToLauncher(Spawn(place.local_rank, place.incarnation.number, environment))]

    def _environment(self, incarnation: Incarnation) -> dict[str, str] | None:
        """Return the variables of a process that may enter its iteration; None while it may not."""
        plan, part, entry = self._instructions.plan, incarnation.part, incarnation.entry
        if entry is None or plan is None or part is None or entry.iteration <= self._instructions.over:
            return None
        if part.rank is None:
            return None  # It had one when it was to enter: a plan of the same iteration has taken it away.
        return torchrun_environment.environment(self._settings, plan, part)

    @staticmethod
    def _look(place: LocalPlace) -> list[Action]:
        """Ask a worker whose main thread seems to be blocked where that stands, once until it moves on."""
        incarnation, stamps = place.incarnation, place.stamps
        if not place.connection.is_open or stamps is None or incarnation.look_asked >= incarnation.look_wanted:
            return []
        place.incarnation = replace(incarnation, look_asked=incarnation.look_wanted)
        place.looked = Looked(stamps.main_ns)
        return [SendToWorker(place.local_rank, Look(incarnation.look_wanted))]

    def _drain(self, place: LocalPlace, state: WorkerState, is_accepted: bool) -> list[Action]:
        """End a worker of a pod that is to end, unless ranks can still move from it."""
        # Without the rendezvous the ranks cannot move.
        if not self.is_draining or not place.is_alive or (is_accepted and state.phase in _INSIDE):
            return []
        return self._end(place)

    @staticmethod
    def _look_into(place: LocalPlace) -> list[Action]:
        """Ask for the stack of a worker that makes no progress, once until it moves on."""
        incarnation, stack_signal = place.incarnation, place.connection.stack_signal
        if stack_signal == 0 or incarnation.stack_asked >= incarnation.stack_wanted:
            return []
        place.incarnation = replace(incarnation, stack_asked=incarnation.stack_wanted, stack=())
        return [SendToLauncher(DumpStack(place.local_rank, incarnation.number, stack_signal))]

    def _inspect(self, place: LocalPlace) -> list[Action]:
        """Ask for the exit code of a process that is ending."""
        # Without in-process restarts the next process needs another port, which the launcher reports with the exit.
        number = place.incarnation.number
        if not place.incarnation.is_ending or not self._is_in_process or place.orders.inspected >= number:
            return []
        place.orders = replace(place.orders, inspected=number)
        return [SendToLauncher(Inspect(place.local_rank, number))]

    def _must_end(self, place: LocalPlace) -> bool:
        if place.present is None or _is_given_up(place):
            return True
        return not self._is_in_process and place.entered <= self._instructions.over

    def _end(self, place: LocalPlace) -> list[Action]:
        if place.process is None or place.orders.ended >= place.process.incarnation:
            return []
        place.orders = replace(place.orders, ended=place.process.incarnation)
        grace_s = self._settings.timeouts.termination_grace_s
        return [SendToLauncher(End(place.local_rank, place.process.incarnation, grace_s))]

    # ------------------------------------------------------------------------------------------------------------- end

    def _finish(self, finish: Finish, has_launcher: bool) -> list[Action]:
        """Release the workers: those that are attached end by themselves, the others are ended."""
        actions: list[Action] = []
        for place in self._places:
            connection = place.connection
            if connection.is_open and not connection.is_released:
                place.connection = replace(connection, is_released=True)
                actions.append(SendToWorker(place.local_rank, Release(finish.outcome, finish.message)))
            elif has_launcher and place.is_alive and not connection.is_released:
                actions += self._end(place)
        if has_launcher and not self._is_shutdown_sent:
            self._is_shutdown_sent = True
            exit_code = 0 if finish.outcome is JobPhase.COMPLETE else 1
            released = tuple(place.local_rank for place in self._places if place.connection.is_released)
            actions.append(SendToLauncher(Shutdown(exit_code, self.shutdown_grace_s, finish.message, released)))
        return actions


def _is_given_up(place: LocalPlace) -> bool:
    found = place.incarnation.found
    return found is not None and found.cause is Cause.HARD_TIMEOUT


def _entry(plan: Plan, part: RankPlan, settings: JobSettings) -> Enter:
    is_measured = part.rank is not None and settings.stragglers is not StragglerMode.OFF
    return Enter(
        plan.term,
        plan.iteration,
        part.rank,
        plan.world_size,
        plan.master_host,
        plan.master_port,
        plan.spare_ranks,
        None if part.rank is None else lonely_patience_s(plan, settings.timeouts),
        restore=plan.restore,
        window_s=settings.window_s if is_measured else 0.0,
    )
