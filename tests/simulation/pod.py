"""A pod in virtual time: an agent with its workers, modelled after the contract in docs/architecture.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from unbroken.agent.decisions.fence import (
    explain,
    holds_the_world,
    is_over,
    lonely_patience_s,
    longest_absence_s,
    ping_interval_s,
)
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Activity,
    Answer,
    Buddies,
    Certificate,
    Consult,
    Fault,
    Finish,
    Halt,
    Halted,
    Heartbeat,
    Hello,
    Interrupt,
    PairOrder,
    Plan,
    Refused,
    RendezvousMessage,
    Report,
    Respawn,
    Welcome,
    WorkerState,
)
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.world import World

ATTACHED = (WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.COMPLETED)
SPEAKING = (WorkerPhase.READY, WorkerPhase.RUNNING)
INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.COMPLETED)
ENTRY_GATHER_S = 0.05
"""So long an agent may wait with the news that its workers have entered an iteration."""


@dataclass
class Worker:
    """Ground truth of one worker."""

    local_rank: int
    incarnation: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    iteration: int = -1
    rank: int | None = None
    port: int = 0
    fault: Fault | None = None
    fault_at_s: float = 0.0
    unheard: Fault | None = None
    """The fault for which its pod has left the iteration, until the rendezvous says that it is over."""
    own_leave: Fault | None = None
    """Why it has left the last iteration that it left by itself."""
    is_hung: bool = False
    """Does not react to anything but the end of its process."""
    hung_at_s: float = 0.0
    blocked_at_s: float | None = None
    """Since when it waits for one that hangs, or has left."""
    activity: Activity | None = None
    is_stubborn: bool = False
    """Hangs, and its agent does not see it."""
    is_waiting_to_leave: bool = False
    """Its function has raised, and nobody has told it yet that the iteration is over."""
    has_completed: bool = False
    """It has returned from the last iteration that it entered, whatever became of its process since."""
    has_ended: bool = False
    """Whether its process has ended well after that."""
    answer: Answer | None = None
    step: int = -1
    """Last step that it has finished in its iteration; kept only from the first order to halt on."""
    order: Halt | None = None
    halt_until_s: float = 0.0
    is_held: bool = False
    """Whether it waits inside of its ping after that step."""
    is_stepping: bool = False
    has_gone_back: bool = False
    saved: int | None = None
    halted: Halted | None = None
    stop_s: float | None = None
    """How long it takes to become READY the next time."""

    @property
    def why_left(self) -> Fault | None:
        """Why it has left its iteration by itself, while it has not entered another one."""
        own = self.own_leave
        is_out = self.phase in (WorkerPhase.STOPPING, WorkerPhase.READY)
        return own if own is not None and is_out and own.iteration == self.iteration else None


class Pod:
    """One pod. What only the agent's process knows is lost when it restarts, what it keeps on disk is not."""

    def __init__(self, world: World, name: str, uid: str, node: str, domains: tuple[str, ...]) -> None:
        self.world = world
        self.name, self.uid, self.node, self.domains = name, uid, node, domains
        self.workers = [Worker(local_rank) for local_rank in range(world.settings.ranks_per_pod)]
        self.is_alive = True
        self.is_agent_up = True
        self.agent_down_s = -math.inf
        """When its agent ended last."""
        self.unheard_since_s = 0.0
        """Since when nobody had heard the rendezvous for its workers then."""
        self.is_muted = False
        """The network swallows what it says, without closing its connection."""
        self.entered_s: float | None = None
        """When its workers entered an iteration, while that is not told yet."""
        self.one_way = ""
        """The one direction that is lost: "up" to the rendezvous, or "down"."""
        self.lost_since_s: float | None = world.now_s
        """Since when the agent knows that it has no contact to the rendezvous."""
        self.is_fence_set = False
        self.fenced: Fault | None = None
        """Why it has left the last iteration that it left by itself."""
        self.is_leaving = False
        self.left_at_s = 0.0
        self.epoch = -1
        """Life of the rendezvous that welcomed it last."""
        self.is_released = False
        self.is_done = False
        self.halt: Halt | None = None
        self.connection: str | None = None
        self.is_welcome = False
        self.welcomed_at_s = 0.0
        self.term = 0
        self.plan: Plan | None = None
        self.is_plan_new = False
        self.is_settling = False
        self.interrupted = -1
        self.seq = 0
        self.heartbeat_interval_s = 6.0
        self.num_starts = 0
        for worker in self.workers:
            self._start(worker)

    # ------------------------------------------------------------------------------------------------- agent: speaking

    def connect(self) -> None:
        """Open a connection and say Hello; try again while that does not work."""
        if not self.is_alive or not self.is_agent_up or self.is_done or self.connection is not None:
            return
        self.connection = self.world.open_connection(self)
        self.is_welcome = False
        if self.connection is None:
            self.world.after(self.world.random.uniform(0.2, 1.0), self.connect, f"{self.name} connects again")
            return
        self.seq, self.entered_s = 0, None
        settings = self.world.settings
        hello = Hello(
            PROTOCOL,
            settings.job,
            self.name,
            self.uid,
            f"s{self.num_starts}",
            self.node,
            settings.ranks_per_pod,
            self.plan.domains if self.plan is not None else (),
            self.term,
            self.plan,
            tuple(self._told(worker, state) for worker, state in zip(self.workers, self.states(), strict=True)),
            self.world.memory.held(self),
            health=self.world.watches.of(self),
            pairs=self.world.pairing.of(self),
            checkpoint_s=self.world.stalls.told_by(self),
            step_ago_s=self.world.steps.ago_s(self),
        )
        # Who is not in the plan now is expected there no more: only a plan that follows lets anybody enter.
        self.is_plan_new = False
        self.say(hello)

    def say(self, message: Hello | Report | Heartbeat) -> None:
        """Send on the open connection."""
        if self.connection is not None:
            self.world.to_coordinator(self.connection, message, self.is_muted or self.one_way == "up")

    def report(self) -> None:
        """Tell the state of all workers."""
        if self.is_alive and self.is_agent_up and self.is_welcome:
            self.seq += 1
            ago_s = 0.0 if self.entered_s is None else self.world.now_s - self.entered_s
            self.entered_s = None
            held = self.world.memory.held(self)
            stalled_s = self.world.stalls.told_by(self)
            word = Report(self.seq, self.states(), self.is_leaving, ago_s, held, checkpoint_s=stalled_s)
            health, ago_s = self.world.watches.of(self), self.world.steps.ago_s(self)
            self.say(replace(word, health=health, step_ago_s=ago_s, pairs=self.world.pairing.of(self)))

    def report_entry(self) -> None:
        """Tell that workers have entered an iteration, a moment later or with the next news."""
        self.entered_s, connection = self.world.now_s, self.connection

        def tell() -> None:
            if self.entered_s is not None and self.connection == connection:
                self.report()

        self.world.after(ENTRY_GATHER_S, tell, "")

    def heartbeat(self) -> None:
        """Say that there is nothing to say."""
        if self.is_alive and self.is_agent_up and self.is_welcome and not self.is_done:
            self.seq += 1
            newest = max(worker.iteration for worker in self.workers)
            step = max(self.world.steps.step_of(worker) for worker in self.workers if worker.iteration == newest)
            stalled_s, ago_s = self.world.stalls.told_by(self), self.world.steps.ago_s(self)
            self.say(Heartbeat(self.seq, step, stalled_s, step_ago_s=ago_s))
            self.world.after(self.heartbeat_interval_s, self._heartbeat_of(self.connection), "")

    def _heartbeat_of(self, connection: str | None) -> Callable[[], None]:
        return lambda: self.heartbeat() if self.connection == connection else None

    def states(self) -> tuple[WorkerState, ...]:
        """Return the workers as the agent reports them."""
        return tuple(
            WorkerState(
                worker.local_rank,
                worker.incarnation,
                worker.phase,
                worker.iteration,
                self.node if worker.phase is WorkerPhase.READY else "",
                worker.port if worker.phase is WorkerPhase.READY else 0,
                worker.fault or worker.unheard or worker.why_left,
                step=(step := self.world.steps.step_of(worker)),
                has_progress=step >= 0,
                policy=self.world.schedule.policy if worker.phase in SPEAKING else None,
                answer=worker.answer if worker.phase is WorkerPhase.READY else None,
                halted=worker.halted if worker.phase is WorkerPhase.RUNNING else None,
                has_ended=worker.has_ended,
                activity=worker.activity,
            )
            for worker in self.workers
        )

    def _told(self, worker: Worker, state: WorkerState) -> WorkerState:
        """Tell in a Hello how old a fault is, and of a pod that left by itself why it did."""
        aged = self._aged(worker, state)
        return aged if self.fenced is None else explain(aged, self.fenced)

    def _aged(self, worker: Worker, state: WorkerState) -> WorkerState:
        """Tell how old a fault is that nobody could be told of when it happened."""
        if state.fault is None:
            return state
        age_s = max(state.fault.detect_s, self.world.now_s - worker.fault_at_s)
        return replace(state, fault=replace(state.fault, detect_s=age_s))

    def disconnected(self) -> None:
        """The connection is gone."""
        self.connection = None
        self.is_welcome = False
        if self.lost_since_s is None:
            self.lost_since_s = self.world.now_s
        self._set_fence(0.01)

    # ---------------------------------------------------------------------------------------------- agent: cut off

    @property
    def can_hear(self) -> bool:
        """Whether anything of the rendezvous arrives."""
        return not self.is_muted and self.one_way != "down"

    @property
    def is_reachable(self) -> bool:
        """Whether all goes through, both ways."""
        return not self.is_muted and not self.one_way

    def cut_off(self, how: str) -> None:
        """Lose all that goes "up", "down", or "both" ways, and notice it some time later by a ping without answer.

        A way that was lost before stays so: behind what a connection has lost it delivers nothing more.
        """
        if self.is_muted or self.one_way not in ("", how):
            how = "both"
        self.is_muted, self.one_way = how == "both", "" if how == "both" else how
        latest_s = 1.5 * ping_interval_s(self.world.settings.timeouts)
        name = self.connection
        self.world.after(self.world.random.uniform(0.0, latest_s), lambda: self._notice_cut(name), "")

    def mend(self) -> None:
        """Let everything through again."""
        self.is_muted, self.one_way = False, ""
        if self.connection is not None:
            self.world.break_connection(self.connection)

    def _notice_cut(self, name: str | None) -> None:
        if name is None or self.connection != name or not (self.is_muted or self.one_way) or not self._acts():
            return
        if self.one_way == "down":
            self.world.break_connection(name)  # Its end arrives.
            return
        self.world.tell(f"{self.name} notices that it is cut off")
        self.disconnected()
        self.connect()

    def refused(self) -> None:
        """Nobody listens where the rendezvous should be."""
        if self.lost_since_s is not None:
            self.lost_since_s = self.world.now_s

    def _set_fence(self, delay_s: float) -> None:
        if not self.is_fence_set:
            self.is_fence_set = True
            self.world.after(delay_s, self._fence, "")

    def _fence(self) -> None:
        """Leave an iteration whose ranks somebody else may be given now."""
        self.is_fence_set = False
        if self.lost_since_s is None or self.is_done or not self._acts():
            return
        limit_s = (
            None if self.plan is None else longest_absence_s(self.plan, self.states(), self.world.settings.timeouts)
        )
        left_s = 1.0 if limit_s is None else self.lost_since_s + limit_s - self.world.now_s
        if left_s > 0 or self.plan is None:
            self._set_fence(min(left_s, 1.0) if left_s > 0 else 1.0)
            return
        self.world.guilty_pods.add(self.uid)
        self.world.tell(f"{self.name} leaves iteration {self.plan.iteration} by itself")
        # As its own agent tells of it: a weak word where the fault may be another's.
        is_weak = is_over(self.plan, self.states()) and not holds_the_world(self.plan)
        cause = Cause.SOFT_TIMEOUT if is_weak else Cause.HEARTBEAT_LOST
        self.fenced = Fault(
            cause, self.plan.iteration, "cut off from the rendezvous", self.world.now_s - self.lost_since_s
        )
        for worker in self.workers:
            self.world.guilty.add((self.uid, worker.local_rank))
        self.interrupted = max(self.interrupted, self.plan.iteration)
        self._settle()
        self._set_fence(1.0)

    def _leave_early(self, worker: Worker, rank: int | None) -> None:
        """In touch with the rendezvous, do not wait for what it will say of a fault in the iteration in force."""
        plan, fault = self.plan, worker.fault
        if plan is None or fault is None or rank is None or not (self._acts() and self.is_welcome):
            return
        is_in_force = plan.iteration > self.interrupted and plan.term == self.term
        if is_in_force and fault.iteration == plan.iteration:
            worker.unheard = fault
            self.interrupted = plan.iteration
            self._settle()

    def _forget_unheard(self, iteration: int) -> None:
        for worker in self.workers:
            if worker.unheard is not None and worker.unheard.iteration <= iteration:
                worker.unheard = None

    # ------------------------------------------------------------------------------------------------- agent: obeying

    def hear(self, message: RendezvousMessage) -> None:
        """Take one message of the rendezvous."""
        assert not isinstance(message, Certificate)
        assert not isinstance(message, Refused), f"{self.name} was refused: {message.reason}"
        if message.term < self.term:
            return
        former, self.term = self.term, message.term
        match message:
            case Welcome():
                self.world.ledger.check_welcome(self, message, former)
                self.is_welcome, self.welcomed_at_s, self.lost_since_s = True, self.world.now_s, None
                self.heartbeat_interval_s = message.heartbeat_interval_s
                self.report()
                self.heartbeat()
            case Interrupt():
                self._forget_unheard(message.iteration)
                self._answer(message)
                self.interrupted = max(self.interrupted, message.iteration)
            case Plan():
                self._forget_unheard(message.iteration - 1)
                self._take_plan(message)
            case Respawn():
                self._replace(message)
            case Consult():
                self._consult(message)
            case Halt() | Finish() | Buddies() | PairOrder():
                self._note(message)
            case _:
                assert_never(message)
        if not self.world.schedule.is_batching:
            self._settle()
        elif not self.is_settling:
            # A busy agent takes several messages before it acts: an Interrupt may overtake the Plan before it.
            self.is_settling = True
            self.world.after(self.world.random.uniform(0.0, 0.01), self._settle, "")

    def _answer(self, order: Interrupt) -> None:
        """Tell what each worker did in an iteration that a hang has ended, each a moment later; some never do."""
        iteration = order.iteration
        if order.cause is not Cause.SOFT_TIMEOUT or iteration <= self.interrupted:
            return
        for worker in self.workers:
            is_asked = worker.iteration == iteration and worker.phase in (WorkerPhase.RUNNING, WorkerPhase.STOPPING)
            activity = self.world.activity_of(worker) if is_asked else None
            if activity is not None:
                self.world.after(self.world.answers.uniform(0.0, 0.05), partial(self._say, worker, activity), "")

    def _say(self, worker: Worker, activity: Activity) -> None:
        if self._acts() and self.workers[worker.local_rank] is worker and worker.iteration == activity.iteration:
            worker.activity = activity
            self.report()

    def _note(self, message: Halt | Finish | Buddies | PairOrder) -> None:
        if isinstance(message, Halt):
            self.halt = message
        elif isinstance(message, Buddies):
            self.world.memory.hear(self, message)
        elif isinstance(message, PairOrder):
            self.world.pairing.hear(self, message)
        else:
            self.world.ledger.check_finish(message)
            if not self.is_released:
                self.is_released = True
                self.world.after(self.world.random.uniform(0.0, 1.0), self._end_workers, "")

    def _end_workers(self) -> None:
        """What follows the training function in the script is over, and so is the pod once its agent has said so."""
        if self.is_alive:
            for worker in self.workers:
                worker.has_ended = worker.phase is WorkerPhase.COMPLETED
            self.report()
        self.is_done = self.is_alive and self.is_agent_up and self.is_welcome
        if not self.is_done:
            self.world.after(0.5, self._end_workers, "")

    def _take_plan(self, plan: Plan) -> None:
        present = self.plan
        if present is None or (plan.term, plan.iteration) > (present.term, present.iteration):
            self.plan, self.is_plan_new = plan, True

    def _replace(self, order: Respawn) -> None:
        for local_rank, incarnation in order.places:
            worker = self.workers[local_rank]
            if worker.incarnation == incarnation:
                self.world.check_respawn(self, worker, order)
                self._respawn(worker)

    def _consult(self, order: Consult) -> None:
        """Let the script of a worker say who is which rank: everybody, backwards."""
        worker, question = self.workers[order.local_rank], order.question
        if worker.incarnation != order.incarnation or worker.phase is not WorkerPhase.READY:
            return
        if worker.is_hung or self.world.random.random() < self.world.schedule.is_silent:
            worker.is_hung = True
            self.world.note_guilt(self, worker, "does not answer")
            return
        numbers = tuple(number for number in range(question.world_size) if number not in question.terminated)[::-1]

        def say() -> None:
            is_same = self.workers[order.local_rank] is worker and worker.phase is WorkerPhase.READY
            if is_same and self._acts() and not worker.is_hung:
                worker.answer = Answer(question.term, question.number, numbers)
                self.report()

        self.world.after(self.world.random.uniform(0.001, 0.5), say, "")

    def _settle(self) -> None:
        self.is_settling = False
        if not self._acts():
            return
        over = max(self.interrupted, -1 if self.plan is None else self.plan.iteration - 1)
        for worker in self.workers:
            is_inside = worker.phase in (WorkerPhase.RUNNING, WorkerPhase.COMPLETED) or worker.is_waiting_to_leave
            if is_inside and worker.iteration <= over:
                self._leave(worker)
        self._pass_on_halt(over)
        plan = self.plan
        if plan is not None and self.is_plan_new and self.is_welcome:
            # Who was let into the former iteration by memory, and still leaves it, is let in when it has.
            still_leave = any(worker.phase is WorkerPhase.STOPPING for worker in self.workers)
            self.is_plan_new = plan.iteration > over and still_leave
            if plan.iteration > over:
                self._enter(plan)

    def _pass_on_halt(self, over: int) -> None:
        halt = self.halt
        if halt is None or halt.iteration <= over:
            return
        for worker in self.workers:
            is_in = worker.phase is WorkerPhase.RUNNING and worker.iteration == halt.iteration
            if is_in and worker.order != halt and not worker.is_hung:
                self.world.training.obey(self, worker, halt)

    def _enter(self, plan: Plan) -> None:
        for part in plan.ranks:
            worker = self.workers[part.local_rank]
            is_due = worker.phase is WorkerPhase.READY and worker.iteration < plan.iteration and not worker.is_hung
            if is_due and part.rank is not None:
                self.world.check_entry(self, worker, plan)
                worker.phase, worker.iteration, worker.rank = WorkerPhase.RUNNING, plan.iteration, part.rank
                worker.fault, worker.has_completed = None, False
                worker.activity = worker.blocked_at_s = None
                worker.step, worker.order, worker.halted, worker.saved = -1, None, None, None
                worker.is_held = worker.has_gone_back = False
                self.world.entered(self, worker, plan)
        self.report_entry()

    def _leave(self, worker: Worker) -> None:
        self.world.ledger.check_leave(self, worker)
        self.world.left(self, worker.iteration)
        worker.phase, worker.is_waiting_to_leave = WorkerPhase.STOPPING, False
        self.report()
        incarnation = worker.incarnation
        timeouts = self.world.settings.timeouts
        if not worker.is_hung:
            delay_s = self.world.random.uniform(0.001, 0.05) if worker.stop_s is None else worker.stop_s
            worker.stop_s = None
            self.world.after(delay_s, lambda: self._get_ready(worker, incarnation), "")
        if not worker.is_stubborn:
            self.world.after(timeouts.hard_s - timeouts.soft_s, lambda: self._end(worker, incarnation), "")

    def _end(self, worker: Worker, incarnation: int) -> None:
        if worker.incarnation != incarnation or worker.phase is not WorkerPhase.STOPPING or not self._acts():
            return
        fault = Fault(Cause.HARD_TIMEOUT, worker.iteration, "did not leave", self.world.settings.timeouts.hard_s)
        self.world.note_guilt(self, worker, "hard-timeout")
        self._gone(worker, fault)

    # --------------------------------------------------------------------------------------------------------- workers

    def _acts(self) -> bool:
        return self.is_alive and self.is_agent_up

    def _start(self, worker: Worker) -> None:
        incarnation = worker.incarnation
        delay_s = self.world.random.uniform(0.5, 8.0)
        if self.world.random.random() < self.world.schedule.bad_start:
            self.world.after(delay_s, lambda: self._fail_start(worker, incarnation), "")
        else:
            self.world.after(delay_s, lambda: self._get_ready(worker, incarnation), "")

    def _fail_start(self, worker: Worker, incarnation: int) -> None:
        if self.is_alive and worker.incarnation == incarnation and worker.phase is WorkerPhase.STARTING:
            self.world.note_guilt(self, worker, "bad start")
            self._gone(worker, Fault(Cause.PROCESS_EXIT, worker.iteration, "exited with code 3: OSError: no disk yet"))

    def _get_ready(self, worker: Worker, incarnation: int) -> None:
        is_due = worker.phase in (WorkerPhase.STARTING, WorkerPhase.STOPPING) and not worker.is_hung
        if self.is_alive and worker.incarnation == incarnation and is_due:
            worker.phase, worker.rank, worker.fault = WorkerPhase.READY, None, None
            worker.port = self.world.next_port()
            self.report()
            if self.is_plan_new and not self.is_settling:
                self._settle()

    def _gone(self, worker: Worker, fault: Fault) -> None:
        rank = worker.rank
        worker.phase, worker.fault, worker.rank = WorkerPhase.GONE, fault, None
        worker.fault_at_s = self.world.now_s - fault.detect_s
        self.report()
        self._leave_early(worker, rank)

    def _respawn(self, worker: Worker) -> None:
        self.workers[worker.local_rank] = new = Worker(worker.local_rank, worker.incarnation + 1)
        worker.phase = WorkerPhase.GONE
        self._start(new)
        self.report()

    def complete(self, worker: Worker) -> None:
        """The training function returned."""
        worker.phase, worker.has_completed = WorkerPhase.COMPLETED, True
        self.report()

    # ---------------------------------------------------------------------------------------------------------- faults

    def raise_exception(self, worker: Worker, text: str, detect_s: float = 0.0) -> None:
        """The training function raises."""
        if worker.phase is WorkerPhase.RUNNING and not worker.is_hung and self.is_alive:
            worker.fault_at_s = self.world.now_s
            worker.fault = Fault(Cause.EXCEPTION, worker.iteration, text, detect_s)
            # It waits at the end of the function until it is told that the iteration is over.
            worker.phase, worker.is_waiting_to_leave = WorkerPhase.STOPPING, True
            self.report()
            self._leave_early(worker, worker.rank)
            self.world.broke(self, worker.iteration)

    def kill(self, worker: Worker) -> None:
        """The worker's process is killed."""
        if worker.phase is not WorkerPhase.GONE and not worker.has_ended and self.is_alive:
            iteration, was_inside = worker.iteration, worker.phase in INSIDE
            self._gone(worker, Fault(Cause.PROCESS_SIGNAL, iteration, "killed by signal 9 (SIGKILL)", 0.002))
            if was_inside:
                self.world.broke(self, iteration)

    def hang(self, worker: Worker, is_stubborn: bool) -> None:
        """The worker stops reacting."""
        if worker.phase is WorkerPhase.RUNNING and self.is_alive:
            worker.is_hung, worker.is_stubborn, worker.hung_at_s = True, is_stubborn, self.world.now_s
            self.world.hung_ever.add((self.uid, worker.local_rank))
            incarnation, soft_s = worker.incarnation, self.world.settings.timeouts.soft_s
            self.world.after(soft_s, lambda: self.suspect(worker, incarnation, soft_s), "")
            self.world.hung(self, worker.iteration)

    def suspect(self, worker: Worker, incarnation: int, age_s: float) -> None:
        """The agent finds the worker's stamps stale."""
        is_same = worker.incarnation == incarnation and worker.phase is WorkerPhase.RUNNING
        if is_same and worker.fault is None and self._acts():
            worker.fault_at_s = self.world.now_s - age_s
            worker.fault = Fault(Cause.SOFT_TIMEOUT, worker.iteration, "no progress", age_s, is_hang=True)
            self.report()

    def leave(self) -> None:
        """The pod is told to end, and ends after its grace."""
        if self.is_alive and not self.is_leaving:
            self.is_leaving = True
            self.left_at_s = self.world.now_s
            self.report()
            grace_s = self.world.settings.timeouts.termination_grace_s
            self.world.after(grace_s, lambda: self.die(is_silent=False), f"{self.name} has left")

    def die(self, is_silent: bool) -> None:
        """The pod is gone; `is_silent`: nobody closes its connection."""
        if not self.is_alive:
            return
        self.is_alive = False
        iterations = {worker.iteration for worker in self.workers if worker.phase in INSIDE}
        for worker in self.workers:
            worker.phase = WorkerPhase.GONE
        if self.connection is not None and not is_silent:
            self.world.break_connection(self.connection)
        self.world.pod_died(self)
        for iteration in iterations:
            self.world.broke(self, iteration)

    def restart_agent(self, down_s: float) -> None:
        """The agent's process ends, and another one comes up."""
        if not self.is_alive or not self.is_agent_up or self.is_done:
            return
        self.is_agent_up, self.agent_down_s = False, self.world.now_s
        self.unheard_since_s = self.world.now_s if self.lost_since_s is None else self.lost_since_s
        self.num_starts += 1
        self.halt = self.fenced = None
        if self.connection is not None:
            self.world.break_connection(self.connection)
        self.world.after(down_s, self._agent_up, f"the agent of {self.name} is back")
        plan = self.plan
        if plan is not None and self.world.settings.is_in_process:
            alone_s = self.unheard_since_s + lonely_patience_s(plan, self.world.settings.timeouts) - self.world.now_s
            self.world.after(max(alone_s, 0.0), partial(self._leave_alone, self.num_starts, plan.iteration), "")

    def _leave_alone(self, start: int, iteration: int) -> None:
        """Workers without an agent leave the iteration by themselves, each of them."""
        if not self.is_alive or self.is_agent_up or self.num_starts != start:
            return
        for worker in self.workers:
            if worker.iteration != iteration or worker.is_hung:
                continue
            if worker.phase is WorkerPhase.RUNNING or worker.is_waiting_to_leave:
                self.world.tell(f"{self.name}/{worker.local_rank} leaves iteration {iteration}: it has no agent")
                self.world.guilty.add((self.uid, worker.local_rank))
                worker.own_leave = Fault(Cause.HEARTBEAT_LOST, iteration, "was without an agent")
                worker.fault_at_s = self.agent_down_s
                self._leave(worker)

    def _agent_up(self) -> None:
        self.is_agent_up = True
        # As the workers tell it; where there is none that it has left alone, from now on.
        has_told = self.world.settings.is_in_process and any(worker.phase in ATTACHED for worker in self.workers)
        self.lost_since_s = self.unheard_since_s if has_told else self.world.now_s
        self._set_fence(0.01)
        self._settle()
        for worker in self.workers:
            # What the agent had found out by itself is forgotten; it looks at the stamps again.
            if worker.is_hung and worker.phase is WorkerPhase.RUNNING:
                self.world.after(1.0, partial(self.suspect, worker, worker.incarnation, 60.0), "")
            if worker.phase is WorkerPhase.STOPPING and not worker.is_stubborn:
                timeouts = self.world.settings.timeouts
                grace_s = timeouts.hard_s - timeouts.soft_s
                self.world.after(grace_s, partial(self._end, worker, worker.incarnation), "")
        self.connect()
