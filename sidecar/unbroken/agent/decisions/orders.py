"""What an agent orders its launcher and workers to do: once a connection, and again on the next one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken.agent.decisions import torchrun_environment
from unbroken.agent.decisions.events import Action, TellLauncher, TellWorker
from unbroken.agent.decisions.fence import lonely_patience_s
from unbroken.agent.decisions.place import Place
from unbroken_core.errors import assert_never
from unbroken_core.messages import Consult, Fault, Finish, Halt, Interrupt, Plan, RankPlan, WorkerState
from unbroken_core.pod.pod_messages import DumpStack, End, Enter, Inspect, Leave, Release, Shutdown, Spawn
from unbroken_core.pod.stacks import where
from unbroken_core.reasons import Cause, JobPhase, WorkerPhase
from unbroken_core.settings import JobSettings, Timeouts

_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.COMPLETED)


@dataclass
class Standing:
    """What the rendezvous has said, newest only."""

    generation: int = 0
    interrupted: int = -1
    """Highest iteration that is over."""
    plan: Plan | None = None
    halt: Halt | None = None
    """The newest order to wait after a step."""
    interrupt: Interrupt | None = None
    consult: Consult | None = None
    """The newest question about ranks, for one of the workers."""
    finish: Finish | None = None
    closed: int = -1
    """Highest iteration that was over when the rendezvous welcomed this agent."""

    def note(self, message: Halt | Consult | Finish) -> None:
        """Keep what counts until the next of its kind."""
        match message:
            case Halt():
                self.halt = message
            case Consult():
                self.consult = message
            case Finish():
                self.finish = message
            case _:
                assert_never(message)

    @property
    def over(self) -> int:
        """Highest iteration in which no worker may stay: interrupted, or older than the plan."""
        return max(self.interrupted, self.plan.iteration - 1 if self.plan is not None else -1)

    @property
    def is_plan_in_force(self) -> bool:
        """Whether workers may be in the plan."""
        return self.plan is not None and self.plan.iteration > self.interrupted

    @property
    def is_plan_open(self) -> bool:
        """Whether the rendezvous would still let workers enter the plan."""
        return self.plan is not None and self.plan.iteration > self.closed


class Orders:
    """Derives orders from the facts about the places; notes in them what it ordered."""

    def __init__(self, settings: JobSettings, places: Sequence[Place], standing: Standing) -> None:
        self._settings = settings
        self._is_in_process = settings.is_in_process
        self._places = places
        self._standing = standing
        self._is_shutdown_sent = False
        self.is_draining = False
        """Whether the pod is to end, and its workers may train until their ranks have moved."""

    def forget_launcher(self) -> None:
        """A launcher attached (again): nothing was said to it yet."""
        self._is_shutdown_sent = False
        for place in self._places:
            place.spawned = place.ended = place.inspected = -1

    def note_hello(self, workers: Sequence[WorkerState]) -> None:
        """Enter nobody into the plan any more of whom this Hello tells that it is not there.

        The rendezvous takes that as said for good: it may cut the next plan before it answers.
        """
        plan = self._standing.plan
        if plan is None:
            return
        active = {part.local_rank for part in plan.ranks if part.rank is not None}
        for place, state in zip(self._places, workers, strict=True):
            if place.local_rank in active and state.iteration < plan.iteration:
                place.is_passed_over = True

    @property
    def shutdown_grace_s(self) -> float:
        """So long workers may take to end by themselves once the job is over, in seconds."""
        timeouts = self._settings.timeouts
        finish = self._standing.finish
        if finish is not None and finish.outcome is JobPhase.COMPLETE:
            # What follows the training function (an evaluation, the last save) is the user's, and may take its time.
            return max(timeouts.completion_s, timeouts.startup_s)
        return timeouts.termination_grace_s

    def issue(
        self,
        workers: Sequence[WorkerState],
        has_launcher: bool,
        is_welcome: bool,
        lost_since_s: float | None,
        now_s: float,
    ) -> list[Action]:
        """Return the orders that are due, and note them as given.

        `is_welcome`: the rendezvous is heard. Else the others may be in another iteration by now: nobody is entered.
        """
        if self._standing.finish is not None:
            return self._finish(self._standing.finish, has_launcher)
        actions: list[Action] = []
        for place, state in zip(self._places, workers, strict=True):
            if self._is_in_process:
                actions += self._guide(place, state, now_s)
            else:
                self._turn(place, state)
            if has_launcher or self._is_in_process:
                actions += self._enter(place, state, is_welcome)
            actions += self._warn(place, lost_since_s, now_s)
            actions += self._halt(place, state)
            actions += self._ask(place)
            if has_launcher:
                actions += self._staff(place)
                actions += self._drain(place, state, is_welcome)
        return actions

    # -------------------------------------------------------------------------------------------- leaving and entering

    def _guide(self, place: Place, state: WorkerState, now_s: float) -> list[Action]:
        """Lead a worker out of an iteration that is over; condemn it when it does not come out in time."""
        if state.phase not in _INSIDE or state.iteration > self._standing.over:
            return []
        if _is_condemned(place):
            return []
        patience_s = self._settings.timeouts.hard_s - self._settings.timeouts.soft_s
        if place.must_be_ready_by_s is None:
            place.must_be_ready_by_s = now_s + patience_s
        elif now_s >= place.must_be_ready_by_s:
            place.must_be_ready_by_s = None
            detail = f"did not leave iteration {state.iteration} within {patience_s:g} s; its process was ended"
            stack = place.stack if place.stack_asked == state.iteration else ()
            place.found = Fault(Cause.HARD_TIMEOUT, state.iteration, detail + where(stack), patience_s, stack)
            return []
        if not place.is_attached or place.left >= state.iteration:
            return []
        place.left = state.iteration
        return [TellWorker(place.local_rank, self._leave(state.iteration))]

    def _leave(self, iteration: int) -> Leave:
        interrupt = self._standing.interrupt
        if interrupt is not None:
            return Leave(iteration, interrupt.cause, interrupt.rank, interrupt.detail)
        newest = self._standing.over + 1
        return Leave(iteration, Cause.POD_LOST, None, f"the job went on to iteration {newest} without this pod")

    def _turn(self, place: Place, state: WorkerState) -> None:
        """Make a place ready for its next process once its part in an iteration that is over has ended."""
        process = place.present
        if process is None or process.exit_code is None or place.entered > self._standing.over:
            return
        if state.phase is WorkerPhase.COMPLETED or place.ended >= place.wanted:
            place.advance(place.wanted + 1)

    def _enter(self, place: Place, state: WorkerState, is_welcome: bool) -> list[Action]:
        plan, part = self._standing.plan, place.part
        if plan is None or part is None or not self._standing.is_plan_in_force:
            return []
        has_entry = self._is_in_process or part.rank is not None
        may_enter = has_entry and is_welcome and self._standing.is_plan_open and not place.is_passed_over
        if may_enter and state.phase is WorkerPhase.READY and state.iteration < plan.iteration:
            place.told = _entry(plan, part, self._settings.timeouts)
            place.entered = -1 if self._is_in_process else plan.iteration
        return self._pass_on(place)

    def _warn(self, place: Place, lost_since_s: float | None, now_s: float) -> list[Action]:
        """Tell a worker since when the rendezvous is not heard, once a connection and at each change."""
        plan, part, worker = self._standing.plan, place.part, place.worker
        if place.warned == lost_since_s or not place.is_attached or plan is None or part is None or worker is None:
            return []
        if part.rank is None or worker.phase not in _INSIDE or worker.iteration != plan.iteration:
            return []
        place.warned = lost_since_s
        lost_s = None if lost_since_s is None else now_s - lost_since_s
        return [TellWorker(place.local_rank, replace(_entry(plan, part, self._settings.timeouts), lost_s=lost_s))]

    def _halt(self, place: Place, state: WorkerState) -> list[Action]:
        """Let the worker wait after a step, or go on: the newest order, once a connection."""
        halt = self._standing.halt
        if halt is None or place.halt == halt or not place.is_attached or halt.iteration <= self._standing.over:
            return []
        worker = place.worker
        is_in = worker is not None and worker.phase is WorkerPhase.RUNNING and state.iteration == halt.iteration
        if not is_in or place.part is None or place.part.rank is None:
            return []
        place.halt = halt
        return [TellWorker(place.local_rank, halt)]

    def _ask(self, place: Place) -> list[Action]:
        """Ask the worker what the rendezvous wants to know of it, once a connection."""
        consult = self._standing.consult
        if consult is None or (consult.local_rank, consult.incarnation) != (place.local_rank, place.wanted):
            return []
        is_waiting = place.worker is not None and place.worker.phase is WorkerPhase.READY
        if not is_waiting or not place.is_attached or place.asked == consult:
            return []
        place.asked = consult
        return [TellWorker(place.local_rank, consult.question)]

    @staticmethod
    def _pass_on(place: Place) -> list[Action]:
        """Tell the worker that is attached what this agent was told about it, once a connection."""
        told, worker = place.told, place.worker
        if told is None or worker is None or not place.is_attached or place.passed >= told.iteration:
            return []
        if worker.phase is not WorkerPhase.READY or worker.iteration >= told.iteration:
            return []
        place.passed = told.iteration
        # Nobody is let in while the rendezvous is not heard.
        place.warned = None
        return [TellWorker(place.local_rank, told)]

    # ------------------------------------------------------------------------------------------------------- processes

    def _staff(self, place: Place) -> list[Action]:
        """Start and end the processes of one place."""
        process = place.process
        if process is None:
            # The launcher has not told yet what it has.
            return []
        if place.is_alive:
            return self._inspect(place) + (self._end(place) if self._must_end(place) else self._look_into(place))
        if place.present is not None or place.spawned >= place.wanted:
            return []
        if self._is_in_process:
            place.spawned = place.wanted
            return [TellLauncher(Spawn(place.local_rank, place.wanted, {}))]
        plan, part = self._standing.plan, place.part
        if place.told is None or plan is None or part is None or place.told.iteration <= self._standing.over:
            return []
        place.spawned = place.wanted
        environment = torchrun_environment.environment(self._settings, plan, part)
        return [TellLauncher(Spawn(place.local_rank, place.wanted, environment))]

    def _drain(self, place: Place, state: WorkerState, is_welcome: bool) -> list[Action]:
        """End a worker of a pod that is to end, unless ranks can still move from it."""
        # Without the rendezvous nobody moves them.
        if not self.is_draining or not place.is_alive or (is_welcome and state.phase in _INSIDE):
            return []
        return self._end(place)

    @staticmethod
    def _look_into(place: Place) -> list[Action]:
        """Ask for the stack of a worker that makes no progress, once an iteration."""
        if place.stack_signal == 0 or place.stack_asked >= place.stack_wanted:
            return []
        place.stack_asked, place.stack = place.stack_wanted, ()
        return [TellLauncher(DumpStack(place.local_rank, place.wanted, place.stack_signal))]

    def _inspect(self, place: Place) -> list[Action]:
        """Ask how a process ends that is ending."""
        # A new process elsewhere gets another port with the end of the one before, and has nothing to gain.
        if not place.is_ending or not self._is_in_process or place.inspected >= place.wanted:
            return []
        place.inspected = place.wanted
        return [TellLauncher(Inspect(place.local_rank, place.wanted))]

    def _must_end(self, place: Place) -> bool:
        if place.present is None or _is_condemned(place):
            return True
        return not self._is_in_process and place.entered <= self._standing.over

    def _end(self, place: Place) -> list[Action]:
        if place.process is None or place.ended >= place.process.incarnation:
            return []
        place.ended = place.process.incarnation
        grace_s = self._settings.timeouts.termination_grace_s
        return [TellLauncher(End(place.local_rank, place.process.incarnation, grace_s))]

    # ------------------------------------------------------------------------------------------------------------- end

    def _finish(self, finish: Finish, has_launcher: bool) -> list[Action]:
        """Let the workers go: those who listen end by themselves, the others are ended."""
        actions: list[Action] = []
        for place in self._places:
            if place.is_attached and not place.is_released:
                place.is_released = True
                actions.append(TellWorker(place.local_rank, Release(finish.outcome, finish.message)))
            elif has_launcher and place.is_alive and not place.is_released:
                actions += self._end(place)
        if has_launcher and not self._is_shutdown_sent:
            self._is_shutdown_sent = True
            exit_code = 0 if finish.outcome is JobPhase.COMPLETE else 1
            actions.append(TellLauncher(Shutdown(exit_code, self.shutdown_grace_s, finish.message)))
        return actions


def _is_condemned(place: Place) -> bool:
    return place.found is not None and place.found.cause is Cause.HARD_TIMEOUT


def _entry(plan: Plan, part: RankPlan, timeouts: Timeouts) -> Enter:
    return Enter(
        plan.generation,
        plan.iteration,
        part.rank,
        plan.world_size,
        plan.master_host,
        plan.master_port,
        plan.spare_ranks,
        None if part.rank is None else lonely_patience_s(plan, timeouts),
    )
